"""Makes the example's modules importable as the script sees them, and gives them a folder to start in."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))


@pytest.fixture
def plain_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as one process without torchrun, in a folder of its own that holds a text."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 40)
