"""ParameterGroup: the buffers of one unit's parameters of one dtype in a step, and their switch.

Between uses a module shows its parameters as DTensors over ``main_weight``; from ``unshard`` to ``reshard`` it shows
plain tensors, views of gathered storage, which the forward and backward compute with. Both sets of objects live as
long as the group: switching is a few dictionary writes, and nothing is built on the hot path.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import BufferPlacement, DBuffer, Flat, PlacementError, Plan, Replicate
from dbuffer.collectives import Part, all_gather
from dbuffer.collectives_together import gather_together
from dbuffer.events import listeners, tell
from dbuffer.layout import only_flat_axis
from dbuffer.mesh import MeshAxis, make_gather_groups, neighbours
from dbuffer.route import GatherRoutes, Route
from dbuffer.storage import FlatStorage
from dbuffer_kernels import cast_copy
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.engine.freshness import CHECKS, Freshness
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.params import FSDPParams
from megatron_fsdp.engine.reduce import ReduceFunction
from megatron_fsdp.engine.split_main_params import Remainder
from megatron_fsdp.engine.streams import HOST_READS, Ticket, lane, settle_host
from megatron_fsdp.engine.unsharded_param import GatheredWeight
from megatron_fsdp.errors import ConfigError, StateError

__all__ = [
    "GatherFunction",
    "GatherHooks",
    "ParameterGroup",
    "WeightBuffers",
    "announce_step",
    "group_of_parameter",
    "note_group",
    "start_gathers",
]


# A replacement for the all-gather: (output, input, group, async_op) -> handle or None, as FSDP2's ``AllGather``.
GatherFunction = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, bool], "dist.Work | None"]


def start_gathers(groups: Sequence[ParameterGroup], *, check: bool, owner: int = 0) -> Ticket | None:
    """Issue the gathers of the groups of one unit together, on their lane; return None where nothing has to come.

    FSDP2's ``FSDPParamGroup.unshard``.

    Args:
        check: forward asks: look whether main weights changed since the last gather, and use the communicator of
            forward. False: backward asks. Nothing steps between, and it has a communicator of its own
            (``MeshAxis.of_forward``).
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
            if group.weights.hooks is not None:
                then = functools.partial(_land, weights)
        part = group.weights.post_forward
        if part is not None:
            group.weights.is_from_part = part.holds(generation)
    if not weights and not stale:
        return None
    gather = functools.partial(_gather, stale, weights, check)
    return lane("gather", groups[0].spec.device).submit(gather, then, owner=owner)


def _gather(
    stale: Sequence[ParameterGroup],
    weights: Sequence[WeightBuffers],
    in_forward: bool,
    works: list[dist.Work] | None,
) -> None:
    if stale:
        stale[0].weights.refresh(stale)
    parts: list[Part] = []
    for each in weights:
        parts += each.gather(works, in_forward)
    if len(parts) == 1:
        all_gather(parts[0].whole, parts[0].shard, parts[0].axis, works)
    else:
        gather_together(parts, works)


@torch.no_grad()
def _land(weights: Sequence[WeightBuffers]) -> None:
    """Make weights of what arrived, on the lane of the gather; a call that was interrupted may be repeated."""
    for each in weights:
        hooks = each.hooks
        if hooks is not None and hooks.has_arrived:
            hooks.post_all_gather()
            hooks.has_arrived = False
            # Of bytes a part may be kept after forward; and slots are given back where compute does so.
            is_kept = each.post_forward is not None or hooks.arrived.storage.takes_slots
            if hooks.arrived is not each.gathered or not is_kept:
                hooks.arrived.release_storage()


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


class PostForwardShard:
    """This rank's part of a group's gathered weights while forward is over and backward has not begun.

    With ``reshard_after_forward=8`` on 64 ranks, eight neighbours hold the whole weights together, so backward gathers
    within them (one machine) instead of over all ranks, for eight times the shard's memory in between.

    Args:
        axis: over which the weights are sharded. size: of the smaller groups.
    Attributes:
        axis: the smaller group. storage: what the part lies in.
    """

    def __init__(self, gathered: DBuffer, axis: MeshAxis, size: int) -> None:
        self._gathered = gathered
        self.axis = neighbours(axis, size)
        make_gather_groups([self.axis])
        numel = gathered.layout.numel // size
        self.storage = FlatStorage(numel, gathered.dtype, gathered.device, name=f"{gathered.name}: post-forward shard")
        self.storage.release()
        self._generation = -1

    def _mine(self) -> torch.Tensor:
        numel = self.storage.tensor.numel()
        return self._gathered.local_buffer.narrow(0, self.axis.rank * numel, numel)

    def keep(self, generation: int) -> None:
        """Copy this rank's part of the gathered weights, which are of a certain generation."""
        self.storage.reallocate()
        self.storage.tensor.copy_(self._mine())
        self._generation = generation

    def holds(self, generation: int) -> bool:
        """Whether it holds weights of that generation."""
        return self.storage.is_allocated and self._generation == generation

    def gather(self, in_forward: bool) -> Part:
        """Return the gather of the whole weights from the smaller group."""
        mine = self._mine()
        mine.copy_(self.storage.tensor)
        axis = self.axis.of_forward if in_forward else self.axis.of_backward
        return Part(axis, self._gathered.local_buffer, mine)

    def drop(self) -> None:
        """Release the memory."""
        self.storage.release()


class GatherHooks(Protocol):
    """What is gathered in place of the main weights of a group, and how it becomes weights (``variants/``).

    Attributes:
        sent: the bytes of this rank, beside main weights. arrived: those of all ranks, which come and go; they may be
            the gathered weights themselves.
        has_arrived: whether the last gather brought bytes, of which weights are still to be made.
    """

    sent: DBuffer
    arrived: DBuffer
    has_arrived: bool

    def attach(self, weights: WeightBuffers) -> DBuffer:
        """Make ``sent`` and ``arrived`` for these main weights; return the buffer of gathered weights."""

    def refresh(self) -> None:
        """Follow a change of main weights."""

    def pre_all_gather(self, works: list[dist.Work] | None, in_forward: bool) -> list[Part]:
        """Fill ``sent``, and return its gather into ``arrived``, as ``WeightBuffers.gather`` does."""

    def post_all_gather(self) -> None:
        """Make weights of ``arrived``, on the lane of the gather."""

    def release(self, *, keeps_gathered: bool) -> None:
        """Release what came with the gathered weights, which are released unless ``keeps_gathered``."""

    def agreed(self) -> Iterator[str]:
        """Yield what all ranks must have in common."""


class WeightBuffers:
    """Main weights, weights at rest, and gathered weights, and how the last ones come and go.

    Args:
        hooks: what is gathered in place of the main weights; None for these, which a cast at most makes compute
            weights.

    Attributes:
        main: what the optimizer updates.
        model: what gathers start from: ``main`` itself where placements agree, which a gather casts on its way; else
            compute weights at rest, which share the memory of ``main`` where the dtype is one.
        remainder: what ``main`` lacks of FP32 weights; None unless these are split.
        gathered: what compute uses; ``model`` itself where that rests whole on every rank.
        rests_whole: whether it does.
        post_forward: the part kept from forward to backward, if any. is_from_part: whether the next gather takes it.
        gather_function: used instead of the all-gather.
        has_copy: whether gathers start from anything but ``main`` itself, which a refresh brings up to date.
        keeps_gathered: ``release`` leaves the memory of gathered weights where it is.
        refreshes_locally: whether a refresh is a cast of this rank's shard, without communication.
        can_restore_gathered: whether a refresh and a gather write all of the gathered weights again.
    """

    main: DBuffer
    model: DBuffer
    post_forward: PostForwardShard | None = None
    is_from_part = False
    gather_function: GatherFunction | None = None
    keeps_gathered = False
    _routes: GatherRoutes | None = None
    _refresh_route: Route | None = None

    def __init__(self, plan: Plan, spec: GroupSpec, name: str, *, hooks: GatherHooks | None = None) -> None:
        self._spec, self._plan, self.hooks = spec, plan, hooks
        placements, dtypes = spec.placements, spec.dtypes
        resting, stepped = placements.parameter, placements.optimizer
        whole: tuple[BufferPlacement, ...] = (Replicate(),) * len(resting)
        self.rests_whole = resting == whole
        if spec.gathers_main_weights:
            self.main = self.model = self._buffer(stepped, dtypes.main, spec.resting_device)
        else:
            self.model = self._buffer(resting, dtypes.compute, spec.resting_device)
            if dtypes.main is dtypes.compute:
                # The optimizer's shard is a slice of the compute weights, not a second copy.
                self.main = self.model.slice_view(stepped)
            else:
                self.main = self._buffer(stepped, dtypes.main, spec.resting_device)
        # A group on the meta device has no weights to gather, which its refresh says.
        self.has_copy = self.main is not self.model or spec.is_meta
        self.refreshes_locally = self.main.placements == self.model.placements
        self.gathered = self.model
        if not self.rests_whole:
            # PyTorch makes views only on memory that is there; ``release`` follows when the views exist.
            self.gathered = self.make_gathered() if hooks is None else hooks.attach(self)
        # .data gives the views a version counter of their own. Gathering again must not look to autograd like a change
        # of the tensors it saved: the values are the same.
        self._views = self.gathered.local_buffer.data
        self._gathered_shard = self.gathered.slice_view(resting)
        self.can_restore_gathered = self.gathered is not self.model or self.main.dtype is not self.model.dtype
        self.remainder = Remainder(self.main, pin_memory=spec.is_pinned) if dtypes.is_split else None
        self.rename(name)
        self.main.zero_()

    def make_gathered(self) -> DBuffer:
        """Return a new buffer for gathered weights of the compute dtype."""
        whole: tuple[BufferPlacement, ...] = (Replicate(),) * len(self._spec.placements.parameter)
        return self._buffer(whole, self._spec.dtypes.compute, self._spec.compute_device)

    def _buffer(self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, device: torch.device) -> DBuffer:
        spec = self._spec
        return DBuffer.from_plan(self._plan, spec.mesh, placements, dtype, device, pin_memory=spec.is_pinned)

    def resting(self, index: int, owned: OwnedParameter) -> DTensor:
        """Return the sharded parameter, over ``main``."""
        rows = self.main.get_dtensor(index)
        return rows if owned.split is None else owned.split.resting(rows)

    def unsharded(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        """Return the parameter that compute uses, over ``gathered``."""
        like = self.gathered.get_local_tensor(index)
        view = self._views.as_strided(like.shape, like.stride(), like.storage_offset())
        if owned.split is not None:
            return nn.Parameter(owned.split.gathered(view), requires_grad=False)
        # A parameter that is made has a version counter of its own.
        param: Any = view.detach()
        param.__class__ = GatheredWeight
        assert isinstance(param, GatheredWeight)
        return param

    # ------------------------------------------------------------------ gather and release

    def gather(self, works: list[dist.Work] | None, in_forward: bool) -> list[Part]:
        """Allocate the gathered weights and return the gather into them; one that is no single collective is issued.

        Args:
            in_forward: forward asks, not backward: each has a communicator on gloo.
        """
        self.gathered.storage.reallocate()
        hooks = self.hooks
        if self.is_from_part and self.post_forward is not None:
            if hooks is not None:
                # A part of the bytes, or of the weights that were made of them.
                hooks.has_arrived = hooks.arrived is self.gathered
            return [self.post_forward.gather(in_forward)]
        if hooks is not None:
            return self._gather_bytes(hooks, works, in_forward)
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
            if self._routes is None:
                self._routes = GatherRoutes(source, self.gathered)
            route = self._routes.forward if in_forward else self._routes.backward
            return route.ready or route.parts(works)
        group = only_flat_axis(source.axes, source.placements).gather_group
        work = self.gather_function(self.gathered.local_buffer, source.local_buffer, group, works is not None)
        if works is not None and work is not None:
            works.append(work)
        return []

    def _gather_bytes(self, hooks: GatherHooks, works: list[dist.Work] | None, in_forward: bool) -> list[Part]:
        if self.gather_function is not None:
            raise ConfigError(
                f"{self.main.name}: all-gather hooks and a custom all-gather function; give one of the two"
            )
        parts = hooks.pre_all_gather(works, in_forward)
        hooks.has_arrived = True
        return parts

    def release(self, *, keep_generation: int | None = None) -> None:
        """Release the gathered weights; where a part is kept after forward, note the generation it is of."""
        if self.rests_whole:
            return
        if keep_generation is not None and self.post_forward is not None:
            self.post_forward.keep(keep_generation)
        if not self.keeps_gathered:
            self.gathered.storage.release()
        if self.hooks is not None:
            self.hooks.release(keeps_gathered=self.keeps_gathered)

    # ------------------------------------------------------------------ main weights that have changed

    def refresh(self, groups: Sequence[ParameterGroup]) -> None:
        """Bring weights at rest of groups of one unit up to date, this one's among them: casts, and one gather.

        On a CPU the host waits for it: who looks for changes of main weights sees nothing of a gather into their
        memory.

        Raises:
            StateError: their parameters are on the meta device still.
        """
        for group in groups:
            if group.is_meta:
                raise StateError(
                    f"unit {group.name!r}: parameters {', '.join(map(repr, group.parameters))} are on the meta device "
                    "still. Call materialize(model), or model.to_empty(device=...) and initialise it, or load a "
                    "checkpoint."
                )
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

    def start_refresh(self) -> list[Part]:
        """Begin to bring weights at rest up to date with main weights: cast them.

        Returns:
            The gather that is left to do where weights rest coarser; one that is no single collective is done.
        """
        main, model = self.main, self.model
        if self.hooks is not None:
            self.hooks.refresh()
        if main is model:
            return []
        if self.remainder is not None:
            self.remainder.current()
        if self._spec.is_offloaded:
            # Collectives run where compute does, and so does the cast.
            staged = self._buffer(main.placements, model.dtype, self._spec.compute_device)
            cast_copy(main.local_buffer.to(staged.device, non_blocking=True), staged.local_buffer)
            model.local_buffer.copy_(staged.redistribute(model.placements).local_buffer, non_blocking=True)
            return []
        shard = model if self.refreshes_locally else model.slice_view(main.placements)
        if shard.local_buffer.data_ptr() != main.local_buffer.data_ptr():
            cast_copy(main.local_buffer, shard.local_buffer)
        if shard is model:
            return []
        if self._refresh_route is None:
            self._refresh_route = GatherRoutes(shard, model).forward
        return self._refresh_route.ready or self._refresh_route.parts(None)

    def end_refresh(self) -> bool:
        """Return whether the refresh wrote main weights' own memory (with the values it had)."""
        if self.remainder is not None and self.main is not self.model:
            # The remainder stays theirs.
            self.remainder.accept()
        return not self.refreshes_locally

    # ------------------------------------------------------------------ between steps

    def values(self) -> DBuffer:
        """Return main weights in the dtype in which they are stepped: ``main``, or an FP32 copy where they are split.

        Changes of a copy count when ``store`` has taken it.
        """
        return self.main if self.remainder is None else self.remainder.join()

    def store(self, values: DBuffer) -> None:
        """Take over what ``values`` returned, with what was written to it since."""
        if self.remainder is not None:
            self.remainder.split(values)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write main weights from whole tensors in plan order, of any dtype and device."""
        values = self.values()
        for index, tensor in enumerate(tensors):
            values.write_tensor(index, tensor)
        self.store(values)

    def keep_part_for(self, size: int) -> None:
        """Keep, from forward to backward, a part of the weights such that ``size`` neighbours hold them together.

        Args:
            size: of the smaller group; 0 goes back to one shard per rank.
        Raises:
            ConfigError: as ``check_part``.
        """
        axis = self.check_part(size)
        self.post_forward = None
        if axis is not None and size < axis.size:
            self.post_forward = PostForwardShard(self.gathered, axis, size)

    def check_part(self, size: int) -> MeshAxis | None:
        """Return the axis that ``keep_part_for`` would cut into groups of ``size``; None for none.

        Raises:
            ConfigError: weights are not sharded over exactly one axis, or ``size`` does not divide it.
        """
        if not size or self.rests_whole:
            return None
        try:
            axis = only_flat_axis(self.model.axes, self.model.placements)
        except PlacementError as error:
            raise ConfigError(
                f"reshard_after_forward={size} needs weights that are sharded over exactly one axis: {error}; use True "
                "or False"
            ) from error
        if size < 1 or axis.size % size:
            raise ConfigError(
                f"reshard_after_forward={size}: it must divide the {axis.size} ranks of axis {axis.name!r} over which "
                "weights are sharded"
            )
        return axis

    def agreed(self) -> Iterator[str]:
        """Yield what ranks must have in common beside plan and dtypes."""
        if self.hooks is not None:
            yield from self.hooks.agreed()

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        named = {"main_weight": self.main, "model_weight": self.model}
        if self.remainder is not None:
            named["remainder"] = self.remainder.buffer
        if not self.rests_whole:
            named["gathered weights"] = self.gathered
        for what, buffer in named.items():
            buffer.rename(f"unit {name!r}: {what}")


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
        is_writable: whether gathered weights may be changed: inside ``unsharded(model, writeback=True)``.
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
    is_writable = False
    module: weakref.ref[nn.Module]

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name, self.unit = name, 0
        self.plan, self.spec, self.owned = plan, spec, tuple(owned)
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.reduce_function: ReduceFunction | None = None

    def unshard(self) -> None:
        """Gather the weights of the unit, whose groups move together, and show them: ``FSDPModule.unshard``."""
        module: Any = self.module()
        module.unshard()

    def reshard(self) -> None:
        """Release the gathered weights of the unit: ``FSDPModule.reshard``."""
        module: Any = self.module()
        module.reshard()

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


def announce_step(groups: Iterable[ParameterGroup]) -> None:
    """Take notice that main weights are changed, or about to be: what rests is made again before its next use.

    An optimizer says so before it steps: one that raises has changed some of them.
    """
    for group in groups:
        group.freshness.has_changed = True
