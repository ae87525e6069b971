"""Tries every fault several times and writes the table of docs/reliability.md.

    python -m tests.faults.reliability --times 3

Run it with the repository's root, ``kernels`` and ``examples`` on PYTHONPATH. A try takes about ten seconds.
"""

import argparse
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from tests.faults.injection import BRANCHES, SAVE_MOMENTS, STALLS, STEP_MOMENTS, Fault
from tests.faults.job import NUM_ITERATIONS, ROOT, SAVE_INTERVAL, Job, Outcome

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TOLERANCE = 1e-5
# Ranks that wait find out after 0.8 of it.
TIMEOUT = ("--distributed-timeout-minutes", "0.2")


@dataclass(frozen=True, slots=True)
class Row:
    """A fault and the results of its tries.

    Attributes:
        lost: tries after which the job failed or a loss was not that of the undisturbed run.
        steps_redone: the most of any try. recovery_s: of each try that measures it.
    """

    fault: str
    tried: int
    lost: int
    steps_redone: int
    recovery_s: tuple[float, ...]

    def line(self) -> str:
        """Return the row in Markdown."""
        recovery = f"{statistics.median(self.recovery_s):.1f} s" if self.recovery_s else "-"
        return f"| {self.fault} | {self.tried} | {self.lost} | {self.steps_redone} | {recovery} |"


# ---------------------------------------------------------------- tries

Try: TypeAlias = Callable[[Path, int], Outcome]
"""Runs a job in a folder; the number of the try says which rank it concerns, where that is free."""


def _faulty(moment: str, iteration: int, *flags: str) -> Try:
    def run(folder: Path, number: int) -> Outcome:
        rank = SAVE_MOMENTS[moment][3] if moment in SAVE_MOMENTS else number % 2
        return Job(folder, max_restarts=1, fault=Fault(moment, iteration, rank), more_flags=flags).run()

    return run


def _resumed_on(num_ranks: int) -> Try:
    def run(folder: Path, number: int) -> Outcome:
        assert Job(folder, fault=Fault("backward", 5, 0)).run().status != 0
        return Job(folder, num_ranks, more_flags=("--load", "run")).run()

    return run


def _stopped(folder: Path, number: int) -> Outcome:
    """Stop by SIGTERM, go on for a step on three ranks, and then on one."""

    def send(job: Job, process: "subprocess.Popen[str]") -> None:
        job.wait_for_iteration(2)
        os.kill(process.pid, signal.SIGTERM)

    # Validation slows the steps down, so that the signal comes before the last one.
    stopped = Job(folder, more_flags=("--eval-interval", "1", "--eval-iters", "60")).run(send)
    last = max(stopped.losses)
    assert f"stopped by SIGTERM after {last} iterations" in stopped.output
    assert 2 <= last < NUM_ITERATIONS
    paused = Job(folder, 3, more_flags=("--load", "run", "--exit-interval", str(last + 1))).run()
    assert f"resuming from run/iter_{last:07d}" in paused.output
    return Job(folder, 1, more_flags=("--load", "run")).run()


FAULTS: dict[str, Try] = {
    **{f"a rank killed in {moment}": _faulty(moment, 5) for moment in STEP_MOMENTS},
    **{f"killed in {moment}": _faulty(moment, 6) for moment in SAVE_MOMENTS},
    **{f"killed in {moment}, asynchronous": _faulty(moment, 6, "--async-save") for moment in SAVE_MOMENTS},
    **{f"a rank stalled in {moment.partition(': ')[2]}, found after 10 s": _faulty(moment, 5, *TIMEOUT)
       for moment in STALLS},
    **{f"another branch on one rank: {moment.partition(': ')[2]}": _faulty(moment, 5, *TIMEOUT) for moment in BRANCHES},
    **{f"killed in backward, resumed on {num} rank(s) instead of 2": _resumed_on(num) for num in (1, 3)},
    "SIGTERM to torchrun, resumed": _stopped,
}  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Try, write the table, and return 0 when nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="tries of each fault")
    parser.add_argument("--faults", default="", help="only those with this in their name; the other rows stay")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as root:

        def folder(name: str) -> Path:
            made = Path(root) / re.sub(r"\W+", "-", name)
            made.mkdir()
            return made

        wanted = Job(folder("undisturbed")).run().losses
        rows = []
        for name, run in FAULTS.items():
            if args.faults in name:
                tries = [run(folder(f"{name} {number}"), number) for number in range(args.times)]
                rows.append(_row(name, tries, wanted))
                print(rows[-1].line(), flush=True)
    _write(rows)
    return 1 if any(row.lost for row in rows) else 0


def _row(fault: str, tries: Sequence[Outcome], wanted: Mapping[int, float]) -> Row:
    lost = sum(outcome.status != 0 or not is_same(outcome.losses, wanted) for outcome in tries)
    recovery = tuple(outcome.recovery_s for outcome in tries if outcome.recovery_s is not None)
    return Row(fault, len(tries), lost, max(outcome.steps_redone for outcome in tries), recovery)


def is_same(losses: Mapping[int, float], wanted: Mapping[int, float]) -> bool:
    """Compare losses with those of another run, up to fp32 sums in another order."""
    return losses.keys() == wanted.keys() and all(abs(losses[step] - wanted[step]) <= TOLERANCE for step in wanted)


def _write(rows: Sequence[Row]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    lines = [
        BEGIN,
        "",
        f"{NUM_ITERATIONS} iterations on 2 ranks, a checkpoint every {SAVE_INTERVAL}; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} CPU cores.",
        "",
        "| fault | tried | lost | steps redone, at most | recovery, median |",
        "|---|---|---|---|---|",
        *_merged([line for line in old.splitlines() if line.startswith("| ")][1:], rows),
        "",
        END,
    ]
    PAGE.write_text(before + "\n".join(lines) + after, encoding="utf-8")


def _merged(old: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the old lines with those of the same faults replaced, and the new ones behind them."""
    lines = {line.split("|")[1].strip(): line for line in old}
    lines |= {row.fault: row.line() for row in rows}
    return list(lines.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
