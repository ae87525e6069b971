"""ParameterGroup: the buffers of one unit's parameters of one dtype in a step, and their switch.

Between uses a module shows its parameters as DTensors over ``main_weight``; from ``unshard`` to ``reshard`` it shows
plain tensors, views of gathered storage, which the forward and backward compute with. Both sets of objects live as
long as the group: switching is a few dictionary writes, and nothing is built on the hot path.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import BufferPlacement, DBuffer, Flat, Plan
from dbuffer.collectives import Part, all_gather
from dbuffer.collectives_together import gather_together
from dbuffer.mesh import MeshAxis
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.policy.offload import hand_back
from megatron_fsdp.runtime.guards.refusals import refuse_meta
from megatron_fsdp.runtime.step.freshness import Freshness
from megatron_fsdp.runtime.step.lane_types import Ticket
from megatron_fsdp.runtime.step.lanes import lane
from megatron_fsdp.runtime.step.weight_buffers import WeightBuffers
from megatron_fsdp.runtime.weights.hooked_weights import land
from megatron_fsdp.runtime.weights.resting_copy import refresh_together

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.fsdp_params import FSDPParams
    from megatron_fsdp.runtime.step.gradients import GradientBuffer
    from megatron_fsdp.runtime.step.reduction import ReduceFunction

__all__ = [
    "ParameterGroup",
    "group_of_parameter",
    "note_group",
    "start_gathers",
]


def start_gathers(groups: Sequence[ParameterGroup], *, check: bool, owner: int = 0) -> Ticket | None:
    """Issue the gathers of the groups of one unit together, on their lane; return None where nothing has to come.

    Args:
        check: look whether main weights changed since the last gather. Backward has no need to: nothing steps between.
        owner: as in ``Lane.submit``.
    """
    stale = _find_stale(groups) if check else []
    weights: list[WeightBuffers] = []
    on_host = then = None
    for group in groups:
        generation = group.freshness.generation + (group in stale)
        if group.spec.is_offloaded:
            on_host = hand_back
        group.freshness.gathered = generation
        if not group.rests_whole:
            weights.append(group.weights)
            if group.weights.lands:
                then = functools.partial(land, weights)
        if group.weights.post_forward is not None:
            group.weights.choose_source(generation)
    if not weights and not stale:
        return None
    gather = functools.partial(_gather, stale, weights)
    return lane("gather", groups[0].spec.device).submit(gather, then, on_host, owner=owner)


def _gather(stale: Sequence[ParameterGroup], weights: Sequence[WeightBuffers], works: list[dist.Work] | None) -> None:
    if stale:
        refresh_together(stale)
    parts: list[Part] = []
    for each in weights:
        parts += each.gather(works)
    if len(parts) == 1:
        all_gather(parts[0].whole, parts[0].shard, parts[0].axis, works)
    else:
        gather_together(parts, works)


def _find_stale(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Return the groups whose weights at rest are older than main weights; the host's own are brought up to date."""
    stale = []
    for group in groups:
        if group.spec.is_meta:
            refuse_meta(group.name, group.parameters)
        if not group.weights.has_copy:
            group.freshness.gathered_directly()
        elif group.freshness.wants_refresh():
            stale.append(group)
    if stale and stale[0].spec.is_offloaded:
        refresh_together(stale)
        return []
    return stale


_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def group_of_parameter(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group that a sharded parameter belongs to, None for any other tensor."""
    reference = _GROUPS.get(parameter)
    return None if reference is None else reference()


def note_group(parameter: torch.Tensor, group: ParameterGroup) -> None:
    """Let ``group_of_parameter`` find the group of a sharded parameter."""
    _GROUPS[parameter] = weakref.ref(group)


class ParameterGroup:
    """Buffers for parameters of one dtype, ``requires_grad`` and strategy, laid out by one plan, and what a step does.

    ``make_param_group`` makes it.

    Attributes:
        name: the unit's name, for messages. unit: its identity.
        owned: what it was built from. parameters: the sharded ones by name within the unit, in plan order.
        plan: where the tensors sit. spec: what else it was built from.
        weights: its weight buffers. gradients: its gradient buffers; None for a frozen group.
        fsdp_params: the two sets of parameter objects.
        rests_whole: whether compute weights are whole on every rank all the time.
        freshness: how old the compute weights are.
        reduce_hook, reduce_function: see ``set_reduction``.
        refreshes_locally: whether a refresh is a cast of this rank's shard, without communication.
    """

    weights: WeightBuffers
    fsdp_params: FSDPParams
    parameters: dict[str, nn.Parameter]
    gradients: GradientBuffer | None
    freshness: Freshness
    rests_whole: bool
    refreshes_locally: bool

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name = name
        self.unit = 0
        self.plan = plan
        self.spec = spec
        self.owned = tuple(owned)
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.reduce_function: ReduceFunction | None = None

    @property
    def main_weight(self) -> DBuffer:
        """What the optimizer updates, at the optimizer placement."""
        return self.weights.main

    @property
    def model_weight(self) -> DBuffer:
        """The compute-dtype copy at rest; ``main_weight`` itself where dtype and placement agree."""
        return self.weights.model

    @property
    def gathered(self) -> DBuffer:
        """The weights that compute uses, allocated from ``unshard`` to ``reshard``."""
        return self.weights.gathered

    @property
    def main_grad(self) -> DBuffer | None:
        """The gradient accumulator, at the gradient placement; None for a frozen group."""
        return None if self.gradients is None else self.gradients.main_grad

    @property
    def requires_grad(self) -> bool:
        """Whether any of its parameters is trained."""
        return self.gradients is not None and 1 in self.gradients.binding.trained

    @property
    def is_meta(self) -> bool:
        """Whether nothing is allocated yet: the parameters were on the meta device."""
        return self.spec.is_meta

    def spread_over(self, placements: Sequence[BufferPlacement]) -> list[MeshAxis]:
        """Return the axes whose ranks hold different elements of a buffer of this group that is placed so.

        These are the ``Flat`` data-parallel axes, and those along which the parameters were sharded before.
        """
        flat = [axis for axis, placement in zip(self.main_weight.axes, placements, strict=True) if placement == Flat()]
        split = self.owned[0].split
        return flat if split is None else flat + split.sharded_axes

    # ------------------------------------------------------------------ unshard, reshard

    def show_unsharded(self) -> None:
        """Show gathered weights, which are usable, where sharded parameters are registered."""
        if not self.fsdp_params.module_infos.is_gathered_everywhere():
            self.fsdp_params.module_infos.show_unsharded()

    def use_gathered(self) -> None:
        """Show the gathered weights, which compute has been made to wait for; it may be done again."""
        if self.weights.post_forward is not None:
            self.weights.post_forward.drop()
        if not self.rests_whole:
            self.fsdp_params.brought_back()
        self.fsdp_params.module_infos.show_unsharded()

    def release(self, *, keep_part: bool, is_raising: bool) -> int | None:
        """Release the gathered weights, which no module shows any more.

        Args:
            keep_part: of a group with ``reshard_to``, keep a part for the gather of the backward that follows.
            is_raising: do not look whether they were changed.
        Returns:
            Which of them was changed in place, None for none.
        """
        changed = None if is_raising else self.fsdp_params.changed_in_place()
        if changed is not None:
            self.lose_gathered()
        if not self.rests_whole:
            self.fsdp_params.released(is_unchanged=changed is None and not is_raising)
            self.weights.release(keep_generation=self.freshness.gathered if keep_part else None)
        return changed

    def lose_gathered(self) -> None:
        """Gathered weights were changed in place: write them again before anybody uses them."""
        self.freshness.lose()
        if self.weights.can_restore_gathered:
            self.fsdp_params.accept_versions()

    # ------------------------------------------------------------------ main weight to model weight

    @property
    def is_untouched(self) -> bool:
        """Whether its weights were never used: nothing was gathered, nothing was trained."""
        return self.freshness.generation == 0

    def refresh(self) -> None:
        """Bring ``model_weight`` up to date with ``main_weight``: one cast, and a gather where weights rest whole."""
        refresh_together([self])

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters)"
