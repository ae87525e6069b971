"""ParameterGroup: the buffers of one unit's parameters of one dtype in a step, and their switch.

Between uses a module shows its parameters as DTensors over ``main_weight``; from ``unshard`` to ``reshard`` it shows
plain tensors, views of gathered storage, which the forward and backward compute with. Both sets of objects live as
long as the group: switching is a few dictionary writes, and nothing is built on the hot path.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn

from dbuffer.collectives import Part, all_gather
from dbuffer.collectives_together import gather_together
from dbuffer.events import listeners, tell
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.errors import AgreementError
from megatron_fsdp.policy.offload import hand_back
from megatron_fsdp.runtime.freshness import Freshness, refreshes_itself
from megatron_fsdp.runtime.fsdp_params import is_laid_out_like
from megatron_fsdp.runtime.group_parts import GroupParts, group_of_parameter
from megatron_fsdp.runtime.lanes import Ticket, lane
from megatron_fsdp.runtime.weight_buffers import WeightBuffers

__all__ = [
    "ParameterGroup",
    "WeightState",
    "catch_up_together",
    "expect_step",
    "group_of_parameter",
    "is_laid_out_like",
    "refresh_together",
    "refreshes_itself",
    "start_gathers",
]


def start_gathers(groups: Sequence[ParameterGroup], *, check: bool, owner: int = 0) -> None:
    """Issue the gathers of groups of one unit, all of them SHARDED, together, on their lane.

    Args:
        check: look whether main weights changed since the last gather. Backward has no need to: nothing steps between.
        owner: as in ``Lane.submit``.
    """
    if check:
        _follow_main_weights(groups)
    weights: list[WeightBuffers] = []
    ticket = on_host = None
    for group in groups:
        generation = group.freshness.generation
        if group.spec.is_offloaded:
            on_host = hand_back
        group.freshness.gathered = generation
        if not group.rests_whole:
            weights.append(group.weights)
        if group.weights.post_forward is not None:
            group.weights.choose_source(generation)
    if weights:
        gather = functools.partial(_gather, weights)
        ticket = lane("gather", groups[0].spec.device).submit(gather, on_host=on_host, owner=owner)
    # Last, so that whatever is raised before (an interrupt, out of memory) leaves nothing that looks gathered.
    for group in groups:
        group.gather_ticket = None if group.rests_whole else ticket
        group.weight_state = WeightState.GATHERING


def _gather(weights: Sequence[WeightBuffers], works: list[dist.Work] | None) -> None:
    parts: list[Part] = []
    for each in weights:
        parts += each.gather(works)
    if len(parts) == 1:
        all_gather(parts[0].whole, parts[0].shard, parts[0].axis, works)
    else:
        gather_together(parts, works)


def _follow_main_weights(groups: Sequence[ParameterGroup]) -> None:
    """Bring weights at rest up to date with main weights, where they are others and older."""
    stale = []
    for group in groups:
        if group.spec.is_meta:
            group.refuse_meta()
        if not group.weights.has_copy:
            group.freshness.gathered_directly()
        elif group.freshness.wants_refresh():
            stale.append(group)
    if stale:
        refresh_together(stale)


def refresh_together(groups: Sequence[ParameterGroup]) -> None:
    """Bring ``model_weight`` of groups of one unit up to date: casts, and one gather where weights rest whole."""
    for group in groups if listeners else ():
        tell("refresh", group)
    parts = [part for group in groups for part in group.weights.start_refresh()]
    try:
        if parts:
            gather_together(parts)
    finally:
        # Where both share memory the gather writes the main weights' bytes too, with the values that they have.
        share_memory = [group for group in groups if group.weights.end_refresh()]
    for group in groups:
        group.freshness.refreshed()
    for group in share_memory:
        group.freshness.look_again()
    for group in groups if listeners else ():
        tell("refreshed", group)


def expect_step(groups: Iterable[ParameterGroup]) -> None:
    """Take notice that an optimizer is about to step main weights: a step that raises has changed some of them."""
    for group in groups:
        group.freshness.change()


def catch_up_together(groups: Iterable[ParameterGroup]) -> None:
    """Take notice of an optimizer step or a load: gather what rests whole, leave the rest to its next gather."""
    by_unit: dict[int, list[ParameterGroup]] = {}
    for group in groups:
        if group.refreshes_locally:
            group.freshness.change()
        else:
            group.freshness.is_changed()
            by_unit.setdefault(group.unit, []).append(group)
    for found in by_unit.values():
        refresh_together(found)


class WeightState(enum.Enum):
    """Where a group's compute weights are: at rest alone; on their way, as a gather was issued; usable."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class ParameterGroup(GroupParts):
    """Buffers for parameters of one dtype, ``requires_grad`` and strategy, laid out by one plan, and what a step does.

    What it is made of is in ``GroupParts``.

    Attributes:
        weight_state: changed by ``start_gathers``, ``finish_gather`` and ``reshard`` alone.
        gather_ticket: of the gather under way, None where weights rest whole.
        refreshes_locally: whether a refresh is a cast of this rank's shard, without communication.
    """

    def _build(self, spec: GroupSpec, params: Sequence[nn.Parameter] = ()) -> None:
        self.weight_state = WeightState.SHARDED
        self.gather_ticket: Ticket | None = None
        super()._build(spec, params)
        self.freshness = Freshness(self.fsdp_params.counted)
        self.refreshes_locally = self.weights.refreshes_locally

    # ------------------------------------------------------------------ unshard, reshard

    def finish_gather(self) -> None:
        """Make compute wait for the gather and show the gathered weights; no-op unless GATHERING."""
        if self.weight_state is not WeightState.GATHERING:
            return
        if self.gather_ticket is not None:
            try:
                self.gather_ticket.wait()
            except AgreementError:
                # Found by a watch: nobody is to wait for this gather once more.
                self.weight_state = WeightState.SHARDED
                raise
            except RuntimeError as error:
                self.weight_state = WeightState.SHARDED
                AgreementError.raise_for(self.name, "the gather of its weights", error)
        # Each of these may be done again, by whoever comes after an interrupt.
        self.weights.gathered_is_used()
        if not self.rests_whole:
            self.fsdp_params.brought_back()
        self.fsdp_params.module_infos.show_unsharded()
        self.gather_ticket = None
        self.weight_state = WeightState.UNSHARDED

    def show_unsharded(self) -> None:
        """Show gathered weights that ``show_sharded`` took away."""
        if self.weight_state is WeightState.UNSHARDED and not self.fsdp_params.module_infos.is_gathered_everywhere():
            self.fsdp_params.module_infos.show_unsharded()

    def show_sharded(self) -> None:
        """Show the sharded parameters, while gathered weights stay for the backward that follows."""
        self.fsdp_params.module_infos.show_sharded()

    def reshard(self, *, keep_part: bool = False) -> None:
        """Show the sharded parameters and release the gathered weights.

        Args:
            keep_part: of a group with ``reshard_to``, keep a part for the gather of the backward that follows.
        Raises:
            StateError: somebody changed the gathered weights in place.
        """
        if self.weight_state is WeightState.SHARDED:
            return
        if self.weight_state is WeightState.GATHERING:
            self.finish_gather()
        self.fsdp_params.module_infos.show_sharded()
        self.weight_state = WeightState.SHARDED
        # An error that is being handled is what should be seen; the next reshard finds the change as well.
        is_raising = sys.exc_info()[0] is not None
        changed = None if is_raising else self.fsdp_params.changed_in_place()
        if changed is not None:
            self._lose()
        if not self.rests_whole:
            self.fsdp_params.released(is_unchanged=changed is None and not is_raising)
            self.weights.release(keep_generation=self.freshness.gathered if keep_part else None)
        if changed is not None:
            self.fsdp_params.refuse_change(changed)

    def _lose(self) -> None:
        """Gathered weights were changed in place: write them again before anybody uses them."""
        self.freshness.lose()
        if self.weights.can_restore_gathered:
            self.fsdp_params.accept_versions()

    # ------------------------------------------------------------------ main weight to model weight

    def catch_up(self) -> None:
        """Take notice of an optimizer step or a load; see ``catch_up_together``."""
        catch_up_together([self])

    def is_stale(self) -> bool:
        """Whether the gathered weights are older than the main weights.

        Raises:
            StateError: somebody changed the gathered weights in place.
        """
        changed = self.fsdp_params.changed_in_place() if self.weight_state is WeightState.UNSHARDED else None
        if changed is not None:
            self._lose()
            self.fsdp_params.refuse_change(changed)
        return self.freshness.is_stale()

    def is_outdated(self) -> bool:
        """Whether what is gathered is not what was asked for by ``model.unshard()``; raises as ``is_stale``."""
        return self.weight_state is not WeightState.SHARDED and (
            self.is_stale() or not self.fsdp_params.module_infos.shows_gathered
        )

    @property
    def is_untouched(self) -> bool:
        """Whether its weights were never used: nothing was gathered, nothing was trained."""
        return self.freshness.generation == 0 and self.weight_state is WeightState.SHARDED

    def refresh(self) -> None:
        """Bring ``model_weight`` up to date with ``main_weight``: one cast, and a gather where weights rest whole."""
        refresh_together([self])

    # ------------------------------------------------------------------ what a forward finds changed

    def follow_requires_grad(self) -> bool:
        """Take notice of parameters that were frozen or unfrozen; tell whether any was.

        Raises:
            StateError: an unfrozen parameter has no main weight of the dtype that the policy wants.
        """
        is_renewed = self._leave_gradients()
        changed = self.fsdp_params.changed_requires_grad()
        for index in changed:
            trained = self.fsdp_params.sharded_params[index].requires_grad
            if trained and self.gradients is None:
                self._check_main_dtype(index)
                self._make_gradients()
            assert self.gradients is not None
            self.fsdp_params.set_requires_grad(index, trained)
            self.gradients.binding.trained[index] = trained
        return bool(changed) or is_renewed

    def _leave_gradients(self) -> bool:
        """Let whoever took gradients before ``zero_grad`` have their memory; return whether somebody did."""
        if self.gradients is None or not self.gradients.binding.is_taken:
            return False
        self.gradients.binding.dropped()
        if self.gradients.binding.is_taken:
            self._make_gradients()
            return True
        return False

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters, {self.weight_state.value})"
