"""Audit: the engine's promises checked while a model trains, for debugging. Slow: reads all gathered weights twice."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import dbuffer_kernels
from dbuffer.collectives import all_reduce
from dbuffer.events import listen
from dbuffer.mesh import MeshAxis
from dbuffer.storage import FlatStorage
from dbuffer.storage_guard import guard_released_storage
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.runtime.step.gradients import GradientBuffer
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.unit import Unit, WeightState, units_below

__all__ = ["Audit"]


class Audit:
    """Checks a sharded model while a ``with`` block runs; what it finds raises ``StateError``.

    - Gathered weights that are not what the main weights say: on this rank's shard at every gather, and over all ranks
      at the end of every backward.
    - A parameter changed while it was gathered; the change would be lost.
    - A unit whose gradients arrived and were not reduced in that backward, or twice.
    - An operator on gathered weights after they were released (a weight kept from a forward, a module that uses another
      unit's weight).

    Errors name the unit and the parameter. Every rank of the mesh enters it at the same time: one more all-reduce per
    backward and mesh. Weights and gradients keep their bits.

    Args:
        model: has units below it, or is one.
    Raises:
        ConfigError: no module of the model is sharded.

    Example:
        with Audit(model):
            model(batch).square().mean().backward()
            optimizer.step()
    """

    def __init__(self, model: nn.Module) -> None:
        self._units = [unit for unit in units_below(model) if unit.groups]
        if not self._units:
            raise ConfigError("Audit: no module of the model has parameters that fully_shard took")
        self._backward = self._units[0].backward
        self._open = contextlib.ExitStack()
        self._weights: dict[int, list[_WeightAudit]] = {}
        self._gradients: dict[int, _GradientAudit] = {}

    def __enter__(self) -> Audit:
        self._weights = {id(unit): [_WeightAudit(unit, group) for group in unit.groups] for unit in self._units}
        self._gradients = {id(each): _GradientAudit(unit, each) for unit in self._units for each in unit.gradients}
        self._open.enter_context(listen(self._hear))
        self._open.enter_context(guard_released_storage(self._refuse))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _all_weights(self) -> list[_WeightAudit]:
        return [watched for each in self._weights.values() for watched in each]

    def _refuse(self, func: Any, tensor: torch.Tensor, owner: FlatStorage) -> None:
        for group in (watched.group for watched in self._all_weights() if watched.group.gathered.storage is owner):
            for name, param in zip(group.parameters, group.fsdp_params.unsharded_params, strict=True):
                if _overlap(param, tensor):
                    raise StateError(
                        f"unit {group.name!r}: {func} reads the gathered weight of parameter {name!r} after it "
                        "was released. Use weights inside their unit's forward only: put the modules that share one "
                        "into one fully_shard([...]) call, or set_reshard_after_forward(False) on the unit."
                    )

    def _hear(self, action: str, subject: Any) -> None:
        if action in ("unsharded", "reshard"):
            for watched in self._weights.get(id(subject), ()):
                watched.gathered() if action == "unsharded" else watched.resharding()
        elif action in ("gradient", "reducing"):
            counted = self._gradients.get(id(subject))
            if counted is not None:
                counted.received() if action == "gradient" else counted.reduced()
        elif action == "backward" and subject is self._backward:
            for counted in self._gradients.values():
                counted.check()
            _compare_over_ranks(self._all_weights())


class _Gather(NamedTuple):
    unit: str
    checksum: torch.Tensor
    # What is wrong with this rank's part, if anything.
    stale: str | None


class _WeightAudit:
    """What is known of one group's gathered weights."""

    def __init__(self, unit: Unit, group: ParameterGroup) -> None:
        self.group = group
        self._unit, self._name = unit, unit.name
        self._names = tuple(group.parameters)
        self._sums: list[torch.Tensor] | None = None
        # One checksum per gather since the last comparison with the other ranks.
        self.seen: list[_Gather] = []

    def gathered(self) -> None:
        """Compare this rank's shard with the main weights, and remember what was gathered."""
        if self._unit.weight_state is not WeightState.UNSHARDED or self._sums is not None:
            return
        # Said at the end of the backward, on all ranks together: one that raised here would let the others wait.
        stale = self._find_stale()
        self._sums = self._checksums()
        # Far from the ends of int64, so that a negative number compares as well.
        self.seen.append(_Gather(self._name, torch.stack(self._sums).sum() % (1 << 61), stale))

    def _find_stale(self) -> str | None:
        group = self.group
        mine = group.gathered.slice_view(group.main_weight.placements)
        for index, name in enumerate(self._names):
            found, main = mine.get_local_tensor(index), group.main_weight.get_local_tensor(index)
            wanted = main.to(device=found.device, dtype=found.dtype)
            if not torch.equal(_bits(found), _bits(wanted)):
                gap = (found.float() - wanted.float()).abs().max().item()
                return (
                    f"unit {self._name!r}: the gathered weight of parameter {name!r} is not its main weight (up to "
                    f"{gap:.3g} apart): something changed the main weight in a way that shows nowhere. Change it "
                    "through the module's parameters, or call fully_shard_optimizer(optimizer) so that each step is "
                    "seen."
                )
        return None

    def resharding(self) -> None:
        """Compare what was gathered with what is about to be released."""
        if self._unit.weight_state is not WeightState.UNSHARDED or self._sums is None:
            return
        sums, self._sums = self._sums, None
        if sys.exc_info()[0] is not None or self.group.fsdp_params.changed_in_place():
            # The engine cleans up after an error, which is what should be seen, or refuses what PyTorch counts itself.
            return
        for name, before, after in zip(self._names, sums, self._checksums(), strict=True):
            if not torch.equal(before, after):
                raise StateError(
                    f"unit {self._name!r}: parameter {name!r} was changed in place while it was gathered; the change "
                    "is lost when the unit reshards. Change it before forward or after backward, when it is sharded."
                )

    def _checksums(self) -> list[torch.Tensor]:
        gathered = self.group.gathered
        return [dbuffer_kernels.checksum(gathered.get_local_tensor(i), key=0) for i in range(len(self._names))]


class _GradientAudit:
    """Whether one gradient buffer was reduced after gradients had arrived, and once."""

    def __init__(self, unit: Unit, buffer: GradientBuffer) -> None:
        self._unit, self._buffer = unit, buffer
        self._is_waiting = False
        self._reduced_in = 0

    def received(self) -> None:
        self._is_waiting = True

    def reduced(self) -> None:
        # A unit that this rank did not use is reduced too, once per backward, because others may have used it.
        backward = self._unit.backward.number
        if not self._is_waiting and self._reduced_in == backward:
            self._fail("were reduced twice")
        self._reduced_in, self._is_waiting = backward, False

    def check(self) -> None:
        """Look whether everything that arrived was reduced, at the end of a backward that ends a step."""
        was_waiting, self._is_waiting = self._is_waiting, False
        if was_waiting and self._unit.requires_gradient_sync and not self._buffer.rests_partial:
            self._fail("arrived and were not reduced")

    def _fail(self, what: str) -> None:
        raise StateError(
            f"unit {self._unit.name!r}: gradients {what} in this backward, so main_grad is wrong. This is an error of "
            "the engine or of code that calls its methods; please report it with the model's forward."
        )


def _compare_over_ranks(weights: Sequence[_WeightAudit]) -> None:
    """Raise where a rank gathered old weights, or ranks gathered different ones for the same use."""
    by_axes: dict[tuple[int, ...], tuple[tuple[MeshAxis, ...], list[_Gather]]] = {}
    for watched in weights:
        axes = tuple(axis for axis in watched.group.main_weight.axes if axis.size > 1)
        seen, watched.seen = watched.seen, []
        by_axes.setdefault(tuple(id(axis.gather_group) for axis in axes), (axes, []))[1].extend(seen)
    for axes, seen in by_axes.values():
        if not seen:
            continue
        sums = torch.stack([one.checksum for one in seen])
        is_stale = torch.tensor([one.stale is not None for one in seen], device=sums.device).long()
        extremes = torch.stack([sums, -sums, is_stale])
        for axis in axes:
            all_reduce(extremes, axis, "max")
        highest, lowest, stale = extremes.tolist()
        for index, one in enumerate(seen):
            if stale[index]:
                raise StateError(
                    one.stale or f"unit {one.unit!r}: on another rank a gathered weight is not its main one"
                )
            if highest[index] != -lowest[index]:
                raise StateError(
                    f"unit {one.unit!r}: the ranks gathered different weights in the backward that ended or the "
                    "forward before it. Look for collectives of your own on the mesh's communicators, ranks that call "
                    "units in another order (Watch), or a custom all-gather."
                )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, end = other.storage_offset(), other.storage_offset() + other.numel()
    return one.storage_offset() < end and start < one.storage_offset() + one.numel()
