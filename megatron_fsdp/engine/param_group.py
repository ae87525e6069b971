"""ParameterGroup: the parameters of one unit that share buffers, and the gather of a unit's groups.

A group moves through the states of its unit (``unit.WeightState``). In order of time: ``start_gathers`` issues the
all-gather, ``use_gathered`` registers the unsharded parameters in the modules, and ``release`` releases the gathered
weights after the sharded parameters are registered again. A step makes no tensors here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import BufferPlacement, DBuffer, Flat, Plan
from dbuffer.collectives.all_gather import all_gather, all_gather_together
from dbuffer.collectives.parts import Part
from dbuffer.events import listeners, tell
from dbuffer.mesh import MeshAxis
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.engine.freshness import Freshness
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.optimizer_steps import repeat_first_step_checks
from megatron_fsdp.engine.params import FSDPParams
from megatron_fsdp.engine.reduce import ReduceFunction
from megatron_fsdp.engine.streams import Ticket, expect_host_read, lane
from megatron_fsdp.engine.weight_buffers import WeightBuffers
from megatron_fsdp.errors import StateError

__all__ = [
    "ParameterGroup",
    "announce_step",
    "announce_step_of",
    "group_of_parameter",
    "groups_stepped_by",
    "record_group",
    "start_gathers",
]


def start_gathers(groups: Sequence[ParameterGroup], *, check: bool, owner: int = 0) -> Ticket | None:
    """Issue the gathers of one unit's groups as one submission to the gather lane; return None if none is needed.

    FSDP2's ``FSDPParamGroup.unshard``.

    Args:
        check: look whether main weights changed since the last gather; see ``Unit.unshard``.
        owner: see ``Lane.submit``.
    """
    stale = _find_stale(groups) if check else []
    weights: list[WeightBuffers] = []
    then = None
    for group in groups:
        generation = group.freshness.generation + (group in stale)
        if group.spec.is_offloaded:
            expect_host_read(group.spec.device)
        group.freshness.gathered_generation = generation
        if not group.weights.rests_whole:
            weights.append(group.weights)
            if group.weights.gather_hooks is not None:
                then = functools.partial(_post_all_gather, weights)
        part = group.weights.post_forward
        if part is not None:
            group.weights.is_from_part = part.holds(generation)
    if not weights and not stale:
        return None
    gather = functools.partial(_gather, stale, weights)
    return lane("gather", groups[0].spec.device).submit(gather, then, owner=owner)


def _gather(stale: Sequence[ParameterGroup], weights: Sequence[WeightBuffers], works: list[dist.Work] | None) -> None:
    if stale:
        _refresh(stale)
    parts: list[Part] = []
    for each in weights:
        parts += each.gather(works)
    if len(parts) == 1:
        all_gather(parts[0].whole, parts[0].shard, parts[0].axis, works)
    else:
        all_gather_together(parts, works)


@torch.no_grad()
def _post_all_gather(weights: Sequence[WeightBuffers]) -> None:
    """Make weights from gathered bytes, on the gather lane; an interrupted call may be repeated."""
    for each in weights:
        hooks = each.gather_hooks
        if hooks is not None and hooks.has_arrived:
            hooks.post_all_gather()
            hooks.has_arrived = False
            # The bytes stay if a part of them is kept after forward. Slots are returned by compute, not on the lane.
            is_kept = each.post_forward is not None or hooks.arrived.storage.takes_slots
            if hooks.arrived is not each.gathered or not is_kept:
                hooks.arrived.release_storage()


def _find_stale(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Return the groups whose resting weights are older than their main weights.

    Raises:
        StateError: the parameters are still on the meta device.
    """
    stale = []
    for group in groups:
        has_changed = group.freshness.notice_changes()
        if not group.weights.has_copy:
            # Gathers read main weights directly.
            group.freshness.mark_refreshed()
            continue
        # A change through .data of the local part, or by a user's kernel, is not counted. So a refresh without
        # communication is done before every forward, and any refresh before every forward in evaluation.
        is_refreshed_always = group.weights.refreshes_locally or not torch.is_grad_enabled()
        if has_changed or group.freshness.may_have_changed or is_refreshed_always:
            stale.append(group)
    for group in stale:
        if group.spec.is_meta:
            raise StateError(
                f"unit {group.name!r}: parameters {', '.join(map(repr, group.parameters))} are on the meta device "
                "still. fix: call materialize(model), or model.to_empty(device=...) and initialise it, or load a "
                "checkpoint"
            )
    return stale


def _refresh(groups: Sequence[ParameterGroup]) -> None:
    """Copy main weights to resting weights, for several groups of one unit: casts, and one gather.

    With ZeRO-1 and ZeRO-2 this is the all-gather of a step, which the next forward issues. On a CPU the gather is
    complete on return, so that a gather into the memory of main weights is not taken for a change of them.
    """
    for group in groups if listeners else ():
        tell("refresh", group)
    parts = [part for group in groups for part in group.weights.start_refresh()]
    try:
        if parts:
            all_gather_together(parts)
    finally:
        # With shared memory the gather also writes main weights, with the same values.
        share_memory = [group for group in groups if group.weights.end_refresh()]
    for group in groups:
        group.freshness.mark_refreshed()
    for group in share_memory:
        group.freshness.resynchronize()
    for group in groups if listeners else ():
        tell("refreshed", group)


_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()
# For each optimizer: the ids of its parameters, and their groups. Empty after another parameter was recorded.
_STEPPED: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[weakref.ref[ParameterGroup]]]] = (
    weakref.WeakKeyDictionary()
)


def group_of_parameter(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group of a sharded parameter; None for any other tensor."""
    reference = _GROUPS.get(parameter)
    return None if reference is None else reference()


def record_group(parameter: torch.Tensor, group: ParameterGroup) -> None:
    """Record the group of a sharded parameter for ``group_of_parameter``."""
    _GROUPS[parameter] = weakref.ref(group)
    _STEPPED.clear()
    repeat_first_step_checks()


def groups_stepped_by(optimizer: Optimizer) -> list[ParameterGroup]:
    """Return the groups of an optimizer's sharded parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = [*map(id, params)]
    known = _STEPPED.get(optimizer)
    if known is None or known[0] != ids:
        groups = dict.fromkeys(map(group_of_parameter, params))
        known = ids, [weakref.ref(group) for group in groups if group is not None]
        _STEPPED[optimizer] = known
    return [group for reference in known[1] if (group := reference()) is not None]


class ParameterGroup:
    """Buffers for parameters of one dtype, ``requires_grad`` and strategy, laid out by one plan.

    FSDP2's ``FSDPParamGroup``; ``make_param_group`` makes it. ``Unit`` calls it in a step.

    Attributes:
        name: the unit's name, for messages. unit_id: ``id`` of the unit. module: the first module of the unit.
        owned: descriptions of the parameters. parameters: sharded parameters by name within the unit, in plan order.
        plan: where the tensors lie in the buffers. spec: mesh, placements, dtypes and devices.
        weights: the weight buffers; ``main_weight``, ``model_weight`` and ``gathered`` are three of them.
        gradient_buffer: None for a frozen group.
        fsdp_params: the sharded and the unsharded parameters.
        is_writable: gathered weights may be changed, inside ``unsharded(model, writeback=True)``.
        freshness: the age of the resting and the gathered weights.
        reduce_hook, reduce_function: see ``set_reduction``.
        gradient_weight: this rank's gradients are multiplied by it (``GradientBuffer.weigh``).
    """

    weights: WeightBuffers
    main_weight: DBuffer
    model_weight: DBuffer
    gathered: DBuffer
    fsdp_params: FSDPParams
    parameters: dict[str, nn.Parameter]
    gradient_buffer: GradientBuffer | None
    is_writable = False
    module: weakref.ref[nn.Module]

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name, self.unit_id = name, 0
        self.plan, self.spec, self.owned = plan, spec, tuple(owned)
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.reduce_function: ReduceFunction | None = None
        self.gradient_weight = 1.0
        self.freshness = Freshness([])

    def unshard(self) -> None:
        """Gather the weights of the whole unit, and register the unsharded parameters: ``FSDPModule.unshard``."""
        module: Any = self.module()
        module.unshard()

    def reshard(self) -> None:
        """Release the gathered weights of the unit: ``FSDPModule.reshard``."""
        module: Any = self.module()
        module.reshard()

    @property
    def main_grad(self) -> DBuffer | None:
        """The buffer that gradients are accumulated in; None for a frozen group."""
        return None if self.gradient_buffer is None else self.gradient_buffer.main_grad

    @property
    def requires_grad(self) -> bool:
        """True if one of the parameters is trained."""
        return self.gradient_buffer is not None and 1 in self.gradient_buffer.binding.trained

    def spread_over(self, placements: Sequence[BufferPlacement]) -> list[MeshAxis]:
        """Return the axes whose ranks hold different elements of a buffer of this group with these placements.

        These are the ``Flat`` data-parallel axes and the tensor-parallel axes of the parameters.
        """
        flat = [axis for axis, placement in zip(self.main_weight.axes, placements, strict=True) if placement == Flat()]
        tensor_parallel = self.owned[0].tensor_parallel
        return flat if tensor_parallel is None else flat + tensor_parallel.sharded_axes

    def use_gathered(self) -> None:
        """Register the unsharded parameters in the modules, after compute waits for the gather; may be repeated."""
        if self.weights.post_forward is not None:
            self.weights.post_forward.drop()
        if not self.weights.rests_whole:
            self.fsdp_params.allow_reads()
        self.fsdp_params.module_infos.show(is_gathered=True)

    def release(self, *, keep_part: bool, is_raising: bool) -> Sequence[torch.Tensor]:
        """Release the gathered weights, after the modules have the sharded parameters again.

        Args:
            keep_part: keep a part for backward's gather, if the group has ``reshard_after_forward=N``.
            is_raising: an exception is being handled, so do not check for in-place changes.
        Returns:
            Unsharded parameters of which one was changed in place; empty without a change.
        """
        changed = () if is_raising else self.fsdp_params.changed_in_place()
        if changed:
            # A gather writes the weights again before their next use.
            self.freshness.mark_gathered_changed()
            if self.weights.can_restore_gathered:
                self.fsdp_params.accept_versions()
        if not self.weights.rests_whole:
            self.fsdp_params.forbid_reads(is_unchanged=not (changed or is_raising))
            self.weights.release(keep_generation=self.freshness.gathered_generation if keep_part else None)
        return changed

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters)"


def announce_step(groups: Iterable[ParameterGroup]) -> None:
    """Mark main weights as changed, or about to change, so that resting weights are refreshed before use.

    Modules that still show gathered weights, after an evaluation for example, show the sharded ones, which are not old.
    Optimizers call this before they step, because a step that raises may have changed some weights.
    """
    for group in groups:
        group.freshness.has_changed = True
        if group.fsdp_params.module_infos.shows_gathered:
            group.fsdp_params.module_infos.show(is_gathered=False)


def announce_step_of(optimizer: Optimizer) -> None:
    """Call ``announce_step`` for the groups of an optimizer's parameters.

    Groups of other optimizers do not count: an optimizer of this rank alone must not make this rank gather alone.
    """
    announce_step(groups_stepped_by(optimizer))
