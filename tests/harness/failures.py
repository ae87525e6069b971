"""Kinds of failures of a rank, and the error that the calling test gets."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FailureKind(Enum):
    """How a rank failed. Earlier members are likelier causes of later ones."""

    DIED = "died"
    RAISED = "raised"
    UNCLEAN = "left something behind"
    STUCK = "did not finish"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's failure.

    Attributes:
        rank: the rank in the failed call, which is also the worker's position in the pool.
        kind: how it failed.
        report: traceback, exit reason or stack of the hung rank; several lines.
        output: the rank's stdout and stderr during the call.
        exit_code: of a rank that DIED, as ``subprocess`` gives it (-9 for SIGKILL); None for the other kinds.
    """

    rank: int
    kind: FailureKind
    report: str
    output: str = ""
    exit_code: int | None = None


class RankError(Exception):
    """Raised in the calling test when a rank did not return; carries the failures, the likely cause first."""

    def __init__(self, function: str, world_size: int, failures: Sequence[RankFailure]) -> None:
        """Build the message from the failures.

        Args:
            function: qualified name of the function that ran.
            world_size: number of ranks it ran on.
            failures: at least one, the likely cause first.
        """
        self.failures = tuple(failures)
        ranks = ", ".join(f"{failure.rank} {failure.kind.value}" for failure in self.failures)
        sections = [f"{function} failed on {len(self.failures)} of {world_size} ranks (rank {ranks})"]
        for failure in self.failures:
            sections.append(f"---- rank {failure.rank} {failure.kind.value} ----\n{failure.report.rstrip()}")
            if failure.output.strip():
                sections.append(f"---- rank {failure.rank} wrote ----\n{failure.output.rstrip()}")
        super().__init__("\n".join(sections))


def describe_exit(exit_code: int) -> str:
    """Say in words why a process ended, from the exit code that ``subprocess`` reports."""
    if exit_code >= 0:
        return f"The process ended with exit code {exit_code} before the function returned."
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    return f"The process was killed by signal {-exit_code} ({name}), exit code {exit_code}."
