"""The matrix: all cases on ranks of this machine, and what those of one run say together."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.certify.certificate import Certificate, HostWait
from tests.certify.cases import CASES, Case, run_case
from tests.certify.host_order import order_findings
from tests.harness import run_ranks

# The limit for all cases of one number of ranks together.
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Run:
    """A case that was run, and the certificate of all ranks together."""

    case: Case
    certificate: Certificate

    @property
    def is_clean(self) -> bool:
        """True if only expected waits were found."""
        return self.certificate.is_clean(self.case.host_may)


def case_named(name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in CASES if case.name == name)


def run_on_rank(names: Sequence[str]) -> list[Certificate]:
    """Run cases one after the other on this rank; every rank calls it."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        with warnings.catch_warnings():
            # Such as the padding of models as small as these.
            warnings.simplefilter("ignore")
            try:
                found.append(run_case(case_named(name)))
            except Exception as error:
                text = f"it raised {type(error).__name__}: {error}".partition("\n")[0]
                found.append(Certificate(name, disorders=(text,)))
    return found


def run_matrix(cases: Sequence[Case]) -> list[Run]:
    """Run cases, all of one number of ranks in one process group."""
    runs = []
    for num_ranks in sorted({case.num_ranks for case in cases}):
        same = [case for case in cases if case.num_ranks == num_ranks]
        by_rank = run_ranks(num_ranks, run_on_rank, [case.name for case in same], timeout=TIMEOUT_S)
        for case, of_ranks in zip(same, zip(*by_rank, strict=True), strict=True):
            runs.append(Run(case, merged(case.name, of_ranks)))
    return runs


def merged(name: str, certificates: Sequence[Certificate]) -> Certificate:
    """Merge the certificates that the ranks of one run made, and check the order of their collectives."""
    host_waits: Counter[tuple[str, str, bool]] = Counter()
    for certificate in certificates:
        for host_wait in certificate.host_waits:
            host_waits[host_wait.what, host_wait.place, host_wait.is_engine] += host_wait.count

    def of(key: str) -> tuple[str, ...]:
        lines = dict.fromkeys(line for certificate in certificates for line in getattr(certificate, key))
        return tuple(lines)

    return Certificate(
        name,
        sum(one.num_operators for one in certificates),
        sum(one.num_conflicts for one in certificates),
        sum(one.num_reuses for one in certificates),
        races=of("races"),
        early_reuses=of("early_reuses"),
        disorders=(*of("disorders"), *order_findings([one.issues for one in certificates])),
        host_waits=tuple(HostWait(*key, count) for key, count in host_waits.items()),
    )
