"""Ranks started as ``make train`` does: one message where a rank says why, torchrun's report where none does."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SAYS_WHY = """\
from gpt.launch import Ranks, report_error
from megatron_fsdp import ConfigError
raise SystemExit(report_error(ConfigError("found 3"), Ranks.from_environment()))
"""


def start(script: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run the code on two ranks."""
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\n{code}")
    command = [sys.executable, str(ROOT / "examples/start_ranks.py"), "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*command, str(script)], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)


def test_an_error_that_every_rank_has_is_one_line(tmp_path: Path) -> None:
    ended = start(tmp_path / "script.py", SAYS_WHY)
    assert (ended.returncode, ended.stderr) == (2, "pretrain_gpt.py: error: found 3\n")


def test_a_rank_that_dies_without_a_word_is_reported_by_torchrun(tmp_path: Path) -> None:
    ended = start(tmp_path / "script.py", "raise SystemExit(7)")
    assert ended.returncode != 0
    assert "ChildFailedError" in ended.stderr
    assert "exitcode  : 7" in ended.stderr
