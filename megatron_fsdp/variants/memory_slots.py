"""Assign the buffers of a model to memory slots, which are allocated once and reused (dbuffer/slot_pool.py)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dbuffer import BufferPlacement, SlotPool
from dbuffer.placements import flat_axes
from dbuffer.slot_memory import from_communicator, from_symmetric_memory
from dbuffer_kernels.switches import is_off
from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Call, Unit
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.slots import SlotChoice

__all__ = [
    "BufferPools", "check_reshard", "communicator_has_memory", "keep_gathered", "place_unit", "pools_of", "reshard_to",
    "use_slots",
]  # fmt: skip


class BufferPools(StepHooks[Unit, Call]):
    """The pools of one root: units that ask for the same kind of slots share them."""

    def __init__(self) -> None:
        # Storages keep their pool alive: the memory goes with the last one that takes slots from it.
        self._pools: weakref.WeakValueDictionary[tuple[object, ...], SlotPool] = weakref.WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.nbytes for pool in self._pools.values())

    def get(
        self, use: str, choice: SlotChoice, group: ParameterGroup, placements: Sequence[BufferPlacement]
    ) -> SlotPool:
        """Return the pool from which a parameter group takes the memory of its weights or its gradients.

        Args:
            use: "weights" or "gradients". Each has its own pools, because their sizes differ.
            choice: sizing and source of the slots.
            group: the parameter group.
            placements: placements of the sharded buffer; its collectives run along the first ``Flat`` axis.
        Raises:
            StorageError: this machine or this PyTorch does not support the memory of ``choice.source``.
        """
        assert choice.sizing is not None
        device, members = group.spec.compute_device, None
        if choice.source != "device":
            axis = group.main_weight.axes[flat_axes(placements)[0]]
            members = axis.gather_group if use == "weights" else axis.reduce_group
        key = (use, choice, device, members)
        pool = self._pools.get(key)
        if pool is None:
            allocate = None
            if members is not None and choice.source == "communicator":
                allocate = from_communicator(members, device)
            elif members is not None:
                allocate = from_symmetric_memory(members, device, choice.source)
            pool = self._pools[key] = SlotPool(device, choice.sizing, allocate)
        return pool


def pools_of(unit: Unit) -> BufferPools:
    """Return the pools of the unit's root."""
    return next(hook for hook in unit.root.hooks if isinstance(hook, BufferPools))


def use_slots(choices: Mapping[Unit, SlotChoice]) -> None:
    """Let units allocate from memory slots; a choice without sizing returns to the allocator.

    If one of them cannot, none of them changes.
    """
    before = {unit: unit.slots for unit in choices}
    try:
        for unit, choice in choices.items():
            unit.slots = choice
            place_unit(unit)
    except BaseException:
        for unit, choice in before.items():
            unit.slots = choice
            place_unit(unit)
        raise


def communicator_has_memory(unit: Unit) -> bool:
    """Return whether the unit's communicators have their own allocator, as NCCL's do."""
    axes = [(axis, group.spec.device) for group in unit.groups for axis in group.main_weight.axes]
    return bool(axes) and all(from_communicator(axis.gather_group, device) is not None for axis, device in axes)


def place_unit(unit: Unit) -> None:
    """Connect the unit's buffers to the memory that ``unit.slots`` names."""
    choice = unit.slots
    # A unit that stays gathered until backward would hold a slot as large as the largest unit: give it its own size.
    stays = choice.sizing == "largest" and not unit.reshards_after_forward()
    of_weights = replace(choice, sizing="by_size") if stays else choice
    pools = None if choice.sizing is None or is_off("slots") else pools_of(unit)
    for group in unit.groups:
        placements, weights, gradients = group.spec.placements, group.weights, group.gradient_buffer
        if not group.weights.rests_whole:
            # Weights that stay gathered need no slot.
            pool = None
            if pools is not None and not weights.keeps_gathered:
                pool = pools.get("weights", of_weights, group, placements.parameter)
            group.gathered.storage.use_pool(pool)
        if gradients is not None:
            pool = None
            if pools is not None and not gradients.rests_partial:
                pool = pools.get("gradients", choice, group, placements.gradient)
            gradients.take_from(pool)
            # Gradient buffers stay allocated, so that a step with slots allocates no memory.
            gradients.keep(pools is not None or group.spec.is_offloaded)


def keep_gathered(group: ParameterGroup, *, keeps: bool, is_sharded: bool) -> None:
    """Keep the memory of gathered weights allocated while they are resharded (True), or stop doing so (False)."""
    group.spec = replace(group.spec, keeps_gathered=keeps)
    group.weights.keeps_gathered = keeps
    if is_sharded and not group.weights.rests_whole:
        if keeps:
            group.gathered.reallocate_storage()
        else:
            group.weights.release()


def reshard_to(unit: Unit, choice: bool | int | None) -> None:
    """Set whether weights stay gathered between forward and backward; see ``fully_shard(reshard_after_forward=...)``.

    Raises:
        ConfigError: ``choice`` is an int that does not divide the number of ranks that shard the weights.
    """
    size = check_reshard(unit, choice)
    for group in unit.groups:
        group.weights.keep_part_for(size)
    # reshard_after_forward=1: each rank keeps whole weights, so they stay gathered.
    unit.reshard_after_forward = choice if choice is None or isinstance(choice, bool) else size != 1
    if unit.slots.sizing is not None:
        place_unit(unit)


def check_reshard(unit: Unit, choice: bool | int | None) -> int:
    """Return the number of ranks over which weights stay sharded after forward; 0 if ``choice`` is not a number.

    Raises:
        ConfigError: an int that does not divide the number of ranks that shard the weights.
    """
    if choice is not None and not isinstance(choice, int):
        raise ConfigError(
            f"reshard_after_forward={choice!r} is a {type(choice).__name__}. fix: None, a bool or a number of ranks"
        )
    size = 0 if choice is None or isinstance(choice, bool) else choice
    for group in unit.groups:
        group.weights.check_part(size)
    return size
