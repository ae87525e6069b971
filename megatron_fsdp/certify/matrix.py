"""The matrix: all cases on ranks of this machine, and what they say about each wait of the engine together."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.certify.cases import CASES, Case, run_case
from megatron_fsdp.certify.certificate import Certificate, merged
from megatron_fsdp.certify.ranks import on_ranks

__all__ = ["Run", "case_named", "idle_places", "run_matrix", "run_on_rank"]


@dataclass(frozen=True, slots=True)
class Run:
    """A case that was run.

    Attributes:
        certificate: of all ranks together. seconds: on rank 0.
    """

    case: Case
    certificate: Certificate
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found but what is meant to be."""
        return self.certificate.is_clean(self.case.host_may)


def case_named(name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in CASES if case.name == name)


def run_on_rank(names: Sequence[str]) -> list[tuple[Certificate, float]]:
    """Run cases one after the other on this rank; every rank calls it."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        begin = time.perf_counter()
        with warnings.catch_warnings():
            # Such as the padding of models as small as these.
            warnings.simplefilter("ignore")
            try:
                certificate = run_case(case_named(name))
            except Exception as error:
                text = f"it raised {type(error).__name__}: {error}".partition("\n")[0]
                certificate = Certificate(name, disorders=(text,))
        found.append((certificate, time.perf_counter() - begin))
    return found


def run_matrix(cases: Sequence[Case], on: Callable[..., list[list[tuple[Certificate, float]]]] = on_ranks) -> list[Run]:
    """Run cases, all of one number of ranks in one process group.

    Args:
        on: runs a function on a number of ranks, as ``on_ranks`` does.
    """
    runs = []
    for num_ranks in sorted({case.num_ranks for case in cases}):
        same = [case for case in cases if case.num_ranks == num_ranks]
        by_rank = on(num_ranks, run_on_rank, [case.name for case in same])
        for case, of_ranks in zip(same, zip(*by_rank, strict=True), strict=True):
            certificate = merged(case.name, [certificate for certificate, _ in of_ranks])
            runs.append(Run(case, certificate, of_ranks[0][1]))
    return runs


def idle_places(runs: Sequence[Run]) -> list[str]:
    """Return the engine's waits that were good for nothing in every run in which they were executed.

    A line of the lanes waits on behalf of whoever called it, so a place is both lines.
    """
    idle: dict[str, bool] = {}
    for run in runs:
        for wait in run.certificate.waits:
            if wait.is_engine:
                idle[wait.place] = idle.get(wait.place, True) and wait.is_idle
    return [place for place, is_idle in idle.items() if is_idle]
