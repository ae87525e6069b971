"""Certificate: the counts of checks and the findings of one configuration, as text."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from megatron_fsdp.certify.checker import Checker, Issue
from megatron_fsdp.certify.clocks import VirtualStreams
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.streams import drive_with
from megatron_fsdp.engine.unit import units_below

__all__ = ["Certificate", "Certification", "HostWait", "certify", "watching"]


@dataclass(frozen=True, slots=True)
class HostWait:
    """A line at which the host would wait for a GPU. ``is_engine``: the line is the engine's, not the job's."""

    what: str
    place: str
    is_engine: bool
    count: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of one configuration, on one rank or merged over all ranks.

    Attributes:
        num_operators, num_conflicts, num_reuses: operators seen, pairs of accesses checked that share bytes on
            different queues, and last uses of released memory checked.
        races, early_reuses, disorders: findings, a line each. ``disorders`` are of collectives over ranks.
        host_waits: by line.
        issues: collectives of one rank, in order; empty of several.
    """

    name: str
    num_operators: int = 0
    num_conflicts: int = 0
    num_reuses: int = 0
    races: tuple[str, ...] = ()
    early_reuses: tuple[str, ...] = ()
    disorders: tuple[str, ...] = ()
    host_waits: tuple[HostWait, ...] = ()
    issues: tuple[Issue, ...] = ()

    @property
    def engine_host_waits(self) -> list[HostWait]:
        """The waits at lines of the engine."""
        return [one for one in self.host_waits if one.is_engine]

    def is_clean(self, host_may: Sequence[str] = ()) -> bool:
        """Return True if there are no findings but allowed host waits, given by the beginnings of ``HostWait.what``."""
        waits = [one for one in self.engine_host_waits if not one.what.startswith(tuple(host_may))]
        return not (self.races or self.early_reuses or self.disorders or waits)

    def lines(self) -> Iterator[str]:
        """Yield the certificate as lines of text."""
        yield (
            f"{self.name}: {self.num_operators:,} operators, {self.num_conflicts:,} conflicts and {self.num_reuses:,} "
            f"reuses checked; {len(self.races)} races, {len(self.early_reuses)} early reuses, {len(self.disorders)} "
            f"disorders, {sum(one.count for one in self.engine_host_waits)} host waits in the engine and "
            f"{sum(one.count for one in self.host_waits if not one.is_engine)} in the job"
        )
        kinds = ("race", self.races), ("early reuse", self.early_reuses), ("disorder", self.disorders)
        for what, found in kinds:
            yield from (f"  {what}: {line}" for line in found)
        yield from (f"  host waits {one.count} times: {one.what} at {one.place}" for one in self.host_waits)


class Certification:
    """A running check, and its result at the end.

    Attributes:
        streams, checker: for who wants to look in between.
    """

    def __init__(self, name: str) -> None:
        self.streams = VirtualStreams()
        self.checker = Checker(self.streams)
        self._name = name
        self._first_wait = 0
        self._notes: list[str] = []

    def know(self, model: nn.Module, *optimizers: Optimizer) -> None:
        """Name a sharded model's memory in findings. Offloaded buffers and step counters count as host memory."""
        for group in _groups(model):
            _name_buffers(self.checker, group)
        for optimizer in optimizers:
            self.checker.lies_on_host(*_step_counters(optimizer))

    def begin(self) -> None:
        """Start the measured steps: forget all host waits so far."""
        self._first_wait = len(self.streams.waits)
        self.checker.syncs.clear()

    def note(self, finding: str) -> None:
        """Add the caller's finding."""
        self._notes.append(finding)

    def certificate(self) -> Certificate:
        """Return this rank's findings so far."""
        checker, memory = self.checker, self.checker.memory
        counted = self.streams.waits[self._first_wait :]
        syncs = Counter((what, origin.place, origin.is_engine) for what, origin in checker.syncs)
        syncs.update(("a wait for an event", one.via.place, one.via.is_engine) for one in counted if one.is_host)
        return Certificate(
            self._name,
            checker.num_operators,
            memory.num_conflicts,
            memory.num_reuses,
            races=tuple(one.place for one in memory.conflicts),
            early_reuses=tuple(one.place for one in memory.reuses),
            disorders=(*self._notes, *dict.fromkeys(checker.misplaced)),
            host_waits=tuple(HostWait(*key, count) for key, count in syncs.items()),
            issues=tuple(checker.issues),
        )


@contextlib.contextmanager
def watching(name: str) -> Iterator[Certification]:
    """Check everything that runs in the block, on streams with CUDA's semantics; make the models inside the block."""
    certification = Certification(name)
    with drive_with(certification.streams), certification.checker:
        yield certification


@contextlib.contextmanager
def certify(model: nn.Module, *optimizers: Optimizer, name: str = "this job") -> Iterator[Certification]:
    """Check the steps that run in the block. Two steps are enough to check the effects of one step on the next.

    Lanes become streams with CUDA's semantics inside the block, so the ranks must compute on CPUs. The check costs tens
    of microseconds per operator. Call ``certificate()`` of the yielded object for the result::

        with certify(model, optimizer) as check:
            for batch in two_batches:
                train_step(model, optimizer, batch)
        print("\\n".join(check.certificate().lines()))

    Args:
        model: sharded already, between two steps. optimizers: of it; their step counters lie on the host.
    """
    with watching(name) as certification:
        certification.know(model, *optimizers)
        certification.begin()
        yield certification


def _groups(model: nn.Module) -> Iterator[ParameterGroup]:
    for unit in units_below(model):
        yield from unit.groups


def _name_buffers(checker: Checker, group: ParameterGroup) -> None:
    gradients = group.gradient_buffer
    buffers = {
        "main_weight": group.main_weight,
        "model_weight": group.model_weight,
        "main_grad": group.main_grad,
        "packed gradients": None if gradients is None else gradients.packed,
    }
    for what, buffer in buffers.items():
        if buffer is not None and buffer.is_allocated:
            checker.name(f"unit {group.name!r}: {what}", buffer.local_buffer)
            if group.spec.is_offloaded and what != "packed gradients":
                checker.lies_on_host(buffer.local_buffer)
    if group.spec.is_offloaded and group.weights.remainder is not None:
        checker.lies_on_host(group.weights.remainder.buffer.local_buffer)


def _step_counters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        if not group.get("capturable"):
            for parameter in group["params"]:
                values = optimizer.state.get(parameter, {}).values()
                yield from (value for value in values if isinstance(value, torch.Tensor) and value.dim() == 0)
