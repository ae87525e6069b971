"""Tries every fault several times and writes the table of docs/reliability.md.

    python -m tests.faults.reliability --times 3

It needs the repository's root, ``kernels`` and ``examples`` on PYTHONPATH, and takes about ten seconds per try.
"""

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """One kind of fault and what came of trying it.

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
        recovery = "-"
        if self.recovery_s:
            recovery = f"{statistics.median(self.recovery_s):.1f} s"
        return f"| {self.fault} | {self.tried} | {self.lost} | {self.steps_redone} | {recovery} |"


def main(words: Sequence[str]) -> int:
    """Try, write the table, and return 0 when nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="tries of each fault")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="the rows of others stay as they are")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        wanted = _run(Job(_folder(folder, "undisturbed"))).losses
        rows = []
        for kind in args.kinds:
            for row in KINDS[kind](Path(folder), args.times, wanted):
                print(row.line(), flush=True)
                rows.append(row)
    _write(rows)
    return 1 if any(row.lost for row in rows) else 0


def _kills(folder: Path, times: int, wanted: Mapping[int, float]) -> Iterator[Row]:
    faults = [(moment, Fault(moment, 5, 0)) for moment in STEP_MOMENTS]
    faults += [(moment, Fault(moment, 6, rank)) for moment, (_, _, _, rank) in SAVE_MOMENTS.items()]
    for mode, flags in (("", ()), (", asynchronous", ("--async-save",))):
        for moment, fault in faults:
            is_save = moment in SAVE_MOMENTS
            if mode and not is_save:
                continue
            tries = []
            for number in range(times):
                rank = fault.rank if is_save else number % 2
                job = Job(
                    _folder(folder, f"{moment}{mode}-{number}".replace(" ", "-").replace(":", "")),
                    max_restarts=1,
                    fault=Fault(moment, fault.iteration, rank),
                    more_flags=flags,
                )
                tries.append(_run(job))
                if not tries[-1].has_died:
                    raise RuntimeError(f"{moment}{mode}: no rank was killed, so nothing was tried")
            yield _row(
                f"a rank killed in {moment}{mode}" if not is_save else f"killed in {moment}{mode}", tries, wanted
            )


def _restarts(folder: Path, times: int, wanted: Mapping[int, float]) -> Iterator[Row]:
    for num_ranks in (1, 3):
        yield _row(
            f"killed in backward, resumed on {num_ranks} rank(s) instead of 2",
            [_resume_on(_folder(folder, f"ranks-{num_ranks}-{number}"), num_ranks) for number in range(times)],
            wanted,
        )
    yield _row("SIGTERM to torchrun, resumed", [_stop(_folder(folder, f"stop-{n}")) for n in range(times)], wanted)


def _stalls(folder: Path, times: int, wanted: Mapping[int, float]) -> Iterator[Row]:
    for moment in (*STALLS, *BRANCHES):
        kind, _, place = moment.partition(": ")
        name = (
            f"a rank stalled in {place}, found after 10 s"
            if kind == "stall"
            else f"another branch on one rank: {place}"
        )
        tries = []
        for number in range(times):
            fault = Fault(moment, 5, number % 2)
            root = _folder(folder, f"{moment}-{number}".replace(" ", "-").replace(":", ""))
            tries.append(_run(Job(root, max_restarts=1, fault=fault, more_flags=TIMEOUT)))
        yield _row(name, tries, wanted)


KINDS = {"kills": _kills, "stalls": _stalls, "restarts": _restarts}


def _row(fault: str, tries: Sequence[Outcome], wanted: Mapping[int, float]) -> Row:
    lost = sum(outcome.status != 0 or not _is_same(outcome.losses, wanted) for outcome in tries)
    recovery = tuple(outcome.recovery_s for outcome in tries if outcome.recovery_s is not None)
    return Row(fault, len(tries), lost, max(outcome.steps_redone for outcome in tries), recovery)


def _is_same(losses: Mapping[int, float], wanted: Mapping[int, float]) -> bool:
    return losses.keys() == wanted.keys() and all(abs(losses[step] - wanted[step]) <= TOLERANCE for step in wanted)


def _resume_on(folder: Path, num_ranks: int) -> Outcome:
    _run(Job(folder, fault=Fault("backward", 5, 0)))
    return _run(Job(folder, num_ranks, more_flags=("--load", "run")))


def _stop(folder: Path) -> Outcome:
    def send(job: Job, process: "subprocess.Popen[str]") -> None:
        job.wait_for_iteration(2)
        os.kill(process.pid, signal.SIGTERM)

    # Validation slows the steps down, so that the signal comes before the last one.
    Job(folder, more_flags=("--eval-interval", "1", "--eval-iters", "60")).run(send)
    return _run(Job(folder, more_flags=("--load", "run")))


def _run(job: Job) -> Outcome:
    return job.run()


def _folder(root: str | Path, name: str) -> Path:
    folder = Path(root) / name
    folder.mkdir()
    return folder


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
