"""The page of who owns which matrix: load, bytes, bound and gap, of a live optimizer or of shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.formatting import format_bytes
from megatron_fsdp.optim.muon import Muon
from megatron_fsdp.optim.ownership import Ownership

__all__ = ["OwnershipReport", "explain_ownership", "ownership_report"]


@dataclass(frozen=True, slots=True)
class OwnershipReport:
    """What one step of Muon takes from ranks that share matrices. ``str()`` gives a page, ``to_dict`` plain data.

    Attributes:
        num_ranks, num_replicas: who shares, and in how many replicas they hold the shards.
        num_matrices, num_elements: all of them.
        mean_flops, max_flops: Newton-Schulz operations of a rank. redundant_flops: if every rank did all of them.
        largest_flops: of the largest matrix. bound_flops: see ``Ownership``.
        mean_received_bytes, max_received_bytes: of matrices and updates, of a rank in a step.
        gathered_bytes: what a rank would receive if every rank gathered every matrix.
        least_owned, most_owned: matrices of a rank.

    Example:
        for report in explain_ownership(Muon(muon_param_groups(model), lr=0.02)):
            print(report)  # who owns which matrix, and the bytes on the wire
    """

    num_ranks: int
    num_replicas: int
    num_matrices: int
    num_elements: int
    mean_flops: float
    max_flops: int
    redundant_flops: int
    largest_flops: int
    bound_flops: float
    mean_received_bytes: float
    max_received_bytes: int
    gathered_bytes: int
    least_owned: int
    most_owned: int

    @property
    def gap(self) -> float:
        """How far the rank with most work is above the bound, relative to it."""
        return self.max_flops / self.bound_flops - 1 if self.bound_flops else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, ready for ``json.dumps``."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "gap": self.gap}

    def lines(self) -> list[str]:
        """Return the page."""
        mean = self.mean_flops or 1.0
        least, most = self.least_owned, self.most_owned
        owned = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        ranks = f"{self.num_ranks:,} ranks"
        if self.num_replicas > 1:
            ranks += f" ({self.num_replicas:,} replicas)"
        rows = [
            ("muon", f"{self.num_matrices:,} matrices", f"{owned} on each of {ranks}"),
            ("owner load, mean", _operations(self.mean_flops), "Newton-Schulz operations of a rank in a step"),
            ("owner load, most", _operations(self.max_flops), f"{self.max_flops / mean:.3f} of the mean"),
            ("bound", _operations(self.bound_flops), f"no ownership does better; {self.gap:.1%} above it"),
            ("largest matrix", _operations(self.largest_flops), "one rank has it whole"),
            ("every rank all", _operations(self.redundant_flops), "what gathering everywhere would compute"),
            ("received, mean", format_bytes(round(self.mean_received_bytes)), "of matrices and updates by a rank"),
            ("received, most", format_bytes(self.max_received_bytes), self._received()),
            ("every rank all", format_bytes(self.gathered_bytes), "what gathering everywhere would receive"),
        ]
        return [f"{label:<18}{amount:>14}  {note}".rstrip() for label, amount, note in rows]

    def _received(self) -> str:
        return (
            f"{self.max_received_bytes / self.mean_received_bytes:.3f} of the mean" if self.mean_received_bytes else ""
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())


def explain_ownership(optimizer: Optimizer) -> tuple[OwnershipReport, ...]:
    """Return a report for each set of ranks that shares matrices; every rank calls it.

    Raises:
        ConfigError: the optimizer is another one.

    Example:
        optimizer = Muon(muon_param_groups(model), lr=0.02)
        for report in explain_ownership(optimizer):
            print(report)
    """
    if not isinstance(optimizer, Muon):
        raise ConfigError(f"explain_ownership: found {type(optimizer).__name__}; wanted a megatron_fsdp.optim.Muon")
    itemsize = optimizer.options.message_dtype.itemsize
    return tuple(ownership_report(domain.exchange.ownership, itemsize) for domain in optimizer.domains())


def ownership_report(ownership: Ownership, itemsize: int = 2) -> OwnershipReport:
    """Return the report of an ownership.

    Args:
        itemsize: bytes of an element on the wire.
    """
    owned = [ownership.owners.count(rank) for rank in range(ownership.num_ranks)]
    num_ranks, matrix_numel = ownership.num_ranks, ownership.matrix_numel
    held = matrix_numel // ownership.num_shards
    return OwnershipReport(
        num_ranks=num_ranks,
        num_replicas=ownership.num_replicas,
        num_matrices=len(ownership.works),
        num_elements=matrix_numel,
        mean_flops=ownership.mean_flops,
        max_flops=ownership.max_flops,
        redundant_flops=ownership.total_flops,
        largest_flops=ownership.largest_flops,
        bound_flops=ownership.bound_flops,
        mean_received_bytes=ownership.mean_received * itemsize,
        max_received_bytes=max(ownership.received_numel) * itemsize,
        gathered_bytes=(matrix_numel - held) * itemsize,
        least_owned=min(owned),
        most_owned=max(owned),
    )


def _operations(count: float) -> str:
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if count >= size:
            return f"{count / size:,.4g} {unit}flop"
    return f"{count / 1e6:,.4g} Mflop"
