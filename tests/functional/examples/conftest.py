"""Fixtures for the tests of the training script."""

from pathlib import Path

import pytest


@pytest.fixture
def documents(tmp_path: Path) -> str:
    """Return a text with many empty documents in places, so that samples have 0 to 9 tokens that count."""
    path = tmp_path / "documents"
    words = b"the quick brown fox jumps over the lazy dog and runs"
    path.write_bytes(b"".join(words[index % 7 : index % 7 + index % 31] + b"\0" * (index % 13) for index in range(999)))
    return str(path)
