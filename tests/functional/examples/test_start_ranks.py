"""Ranks started as ``make train`` does: one message where a rank says why, torchrun's report where none does."""

import os
import signal
import subprocess
import sys
import time
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


ENDS_WHEN_ASKED = """\
import os, time
from gpt.signals import StopSignal
rank = os.environ["RANK"]
with StopSignal(on_interrupt="asked" if rank == "0" else "") as stop:
    open(f"ready-{rank}", "w").close()
    while not stop.received:
        time.sleep(0.01)
    open(f"ended-{rank}", "w").write(stop.received)
"""


def test_ctrl_c_lets_the_ranks_end_and_is_no_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\n{ENDS_WHEN_ASKED}")
    command = [sys.executable, str(ROOT / "examples/start_ranks.py"), "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    job = subprocess.Popen(
        [*command, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while job.poll() is None and not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    # A terminal sends it to torchrun alone: each rank has a session of its own.
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=120)
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == ["Ctrl-C"] * 2
    assert (job.returncode, said.split()) == (130, ["asked"])
