"""ParameterGroup: the buffers of one unit's parameters of one dtype in a step, and their switch.

Between uses a module shows its parameters as DTensors over ``main_weight``; from ``unshard`` to ``reshard`` it shows
plain tensors, views of gathered storage, which the forward and backward compute with. Both sets of objects live as
long as the group: switching is a few dictionary writes, and nothing is built on the hot path.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import BufferPlacement, DBuffer, Flat, Plan
from dbuffer.collectives import Part, all_gather
from dbuffer.collectives_together import gather_together
from dbuffer.layout import only_flat_axis
from dbuffer.mesh import MeshAxis
from dbuffer.route import Route
from dbuffer_kernels import cast_copy
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.runtime.step.freshness import CHECKS, Freshness
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams
from megatron_fsdp.runtime.step.gradients import GradientBuffer, ReduceFunction
from megatron_fsdp.runtime.step.lanes import HOST_READS, Ticket, lane, settle_host

__all__ = ["GatherFunction", "ParameterGroup", "WeightBuffers", "group_of_parameter", "note_group", "start_gathers"]

# A replacement for the all-gather: (output, input, group, async_op) -> handle or None, as FSDP2's ``AllGather``.
GatherFunction = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, bool], "dist.Work | None"]


def start_gathers(groups: Sequence[ParameterGroup], *, check: bool, owner: int = 0) -> Ticket | None:
    """Issue the gathers of the groups of one unit together, on their lane; return None where nothing has to come.

    FSDP2's ``FSDPParamGroup.unshard``.

    Args:
        check: look whether main weights changed since the last gather. Backward has no need to: nothing steps between.
        owner: as in ``Lane.submit``.
    """
    stale = _find_stale(groups) if check else []
    weights: list[WeightBuffers] = []
    then = None
    for group in groups:
        generation = group.freshness.generation + (group in stale)
        if group.spec.is_offloaded:
            if settle_host not in CHECKS:
                CHECKS.append(settle_host)
            HOST_READS.add(group.spec.device)
        group.freshness.gathered = generation
        if not group.rests_whole:
            weights.append(group.weights)
            if group.weights.land is not None:
                then = functools.partial(group.weights.land, weights)
        part = group.weights.post_forward
        if part is not None:
            group.weights.is_from_part = part.holds(generation)
    if not weights and not stale:
        return None
    gather = functools.partial(_gather, stale, weights)
    return lane("gather", groups[0].spec.device).submit(gather, then, owner=owner)


def _gather(stale: Sequence[ParameterGroup], weights: Sequence[WeightBuffers], works: list[dist.Work] | None) -> None:
    if stale:
        stale[0].weights.refresh(stale)
    parts: list[Part] = []
    for each in weights:
        parts += each.gather(works)
    if len(parts) == 1:
        all_gather(parts[0].whole, parts[0].shard, parts[0].axis, works)
    else:
        gather_together(parts, works)


def _find_stale(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Return the groups whose weights at rest are older than main weights."""
    stale = []
    for group in groups:
        if not group.weights.has_copy:
            # A gather takes main weights as they are now.
            group.freshness.is_changed()
            group.freshness.refreshed()
            continue
        # No counter shows a change through .data or by a foreach operator (clipped or averaged weights), so before a
        # forward a refresh that needs no communication is always done, and in evaluation every one.
        if group.weights.refreshes_locally or not torch.is_grad_enabled():
            group.freshness.is_suspect = True
        if group.freshness.is_changed() or group.freshness.is_suspect:
            stale.append(group)
    if stale and stale[0].is_meta:
        stale[0].weights.refresh(stale)
        return []
    return stale


class WeightBuffers:
    """Main weights, weights at rest, and gathered weights, and how the last ones come and go.

    ``runtime/weights`` has the kinds that there are; ``ShardedWeights`` says what the attributes are.
    """

    main: DBuffer
    model: DBuffer
    gathered: DBuffer
    # ``SplitWeights`` lower halves, and the ``PostForwardShard``, of groups that have one.
    remainder: Any = None
    rests_whole = False
    post_forward: Any = None
    is_from_part = False
    gather_function: GatherFunction | None = None
    has_copy = True
    keeps_gathered = False
    refreshes_locally = True
    can_restore_gathered = True
    _spec: GroupSpec
    _gathered_shard: DBuffer
    _route: Route | None = None

    # Of each kind: see ``runtime/weights/sharded_weights.py``.
    agreed: Callable[[], Iterator[str]]
    rename: Callable[[str], None]
    values: Callable[[], DBuffer]
    store: Callable[[DBuffer], None]
    fill: Callable[[Sequence[torch.Tensor]], None]
    keep_part_for: Callable[[int], None]
    check_part: Callable[[int], MeshAxis | None]
    refresh: Callable[[Sequence[ParameterGroup]], None]
    start_refresh: Callable[[], list[Part]]
    end_refresh: Callable[[], bool]
    # Of those with hooks: what follows the gather, of all of a unit's.
    land: Callable[[Sequence[WeightBuffers]], None] | None = None

    def gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Allocate the gathered weights and return the gather into them; one that is no single collective is issued."""
        self.gathered.storage.reallocate()
        if self.is_from_part and self.post_forward is not None:
            return [self.post_forward.gather()]
        source = self.model
        if self._spec.is_offloaded or source.dtype is not self.gathered.dtype:
            source = self._gathered_shard
            if source.dtype is self.model.dtype:
                source.local_buffer.copy_(self.model.local_buffer, non_blocking=True)
            else:
                main = self.model.local_buffer
                if self._spec.is_offloaded:
                    # First to the device, where the cast costs nothing (FSDP2's ``all_gather_inputs``).
                    main = main.to(source.device, non_blocking=True)
                cast_copy(main, source.local_buffer)
        if self.gather_function is None:
            if self._route is None:
                self._route = Route(source, self.gathered)
            return self._route.ready or self._route.parts(works)
        group = only_flat_axis(source.axes, source.placements).gather_group
        work = self.gather_function(self.gathered.local_buffer, source.local_buffer, group, works is not None)
        if works is not None and work is not None:
            works.append(work)
        return []

    def release(self, *, keep_generation: int | None = None) -> None:
        """Release the gathered weights; where a part is kept after forward, note the generation it is of."""
        if self.rests_whole:
            return
        if keep_generation is not None and self.post_forward is not None:
            self.post_forward.keep(keep_generation)
        if not self.keeps_gathered:
            self.gathered.storage.release()


_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def group_of_parameter(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group that a sharded parameter belongs to, None for any other tensor."""
    reference = _GROUPS.get(parameter)
    return None if reference is None else reference()


def note_group(parameter: torch.Tensor, group: ParameterGroup) -> None:
    """Let ``group_of_parameter`` find the group of a sharded parameter."""
    _GROUPS[parameter] = weakref.ref(group)


class ParameterGroup:
    """Buffers for parameters of one dtype, ``requires_grad`` and strategy, laid out by one plan.

    FSDP2's ``FSDPParamGroup``; ``make_param_group`` makes it.

    Attributes:
        name: the unit's name, for messages. unit: its identity. module: the first of its modules.
        owned: what it was built from. parameters: the sharded ones by name within the unit, in plan order.
        plan: where the tensors sit. spec: what else it was built from.
        weights: its weight buffers; ``main_weight``, ``model_weight`` and ``gathered`` are the three of them.
        gradients: its gradient buffers; None for a frozen group.
        fsdp_params: the two sets of parameter objects.
        rests_whole: whether compute weights are whole on every rank all the time.
        is_meta: whether nothing is allocated yet: the parameters were on the meta device.
        freshness: how old the compute weights are.
        reduce_hook, reduce_function: see ``set_reduction``.
    """

    weights: WeightBuffers
    main_weight: DBuffer
    model_weight: DBuffer
    gathered: DBuffer
    fsdp_params: FSDPParams
    parameters: dict[str, nn.Parameter]
    gradients: GradientBuffer | None
    freshness: Freshness
    rests_whole: bool
    is_meta: bool
    module: Callable[[], Any]

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name, self.unit = name, 0
        self.plan, self.spec, self.owned = plan, spec, tuple(owned)
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.reduce_function: ReduceFunction | None = None

    def unshard(self) -> None:
        """Gather the weights of the unit, whose groups move together, and show them: ``FSDPModule.unshard``."""
        self.module().unshard()

    def reshard(self) -> None:
        """Release the gathered weights of the unit: ``FSDPModule.reshard``."""
        self.module().reshard()

    @property
    def main_grad(self) -> DBuffer | None:
        """The gradient accumulator, at the gradient placement; None for a frozen group."""
        return None if self.gradients is None else self.gradients.main_grad

    @property
    def requires_grad(self) -> bool:
        """Whether any of its parameters is trained."""
        return self.gradients is not None and 1 in self.gradients.binding.trained

    def spread_over(self, placements: Sequence[BufferPlacement]) -> list[MeshAxis]:
        """Return the axes whose ranks hold different elements of a buffer of this group that is placed so.

        These are the ``Flat`` data-parallel axes, and those along which the parameters were sharded before.
        """
        flat = [axis for axis, placement in zip(self.main_weight.axes, placements, strict=True) if placement == Flat()]
        split = self.owned[0].split
        return flat if split is None else flat + split.sharded_axes

    def use_gathered(self) -> None:
        """Show the gathered weights, which compute has been made to wait for; it may be done again."""
        if self.weights.post_forward is not None:
            self.weights.post_forward.drop()
        if not self.rests_whole:
            self.fsdp_params.brought_back()
        self.fsdp_params.module_infos.show(is_gathered=True)

    def release(self, *, keep_part: bool, is_raising: bool) -> Sequence[torch.Tensor]:
        """Release the gathered weights, which no module shows any more.

        Args:
            keep_part: of a group with ``reshard_to``, keep a part for the gather of the backward that follows.
            is_raising: do not look whether they were changed.
        Returns:
            Weights of which one was changed in place; none where none was.
        """
        changed = () if is_raising else self.fsdp_params.changed_in_place()
        if changed:
            # They are written again before they are used.
            self.freshness.lose()
            if self.weights.can_restore_gathered:
                self.fsdp_params.accept_versions()
        if not self.rests_whole:
            self.fsdp_params.released(is_unchanged=not (changed or is_raising))
            self.weights.release(keep_generation=self.freshness.gathered if keep_part else None)
        return changed

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters)"
