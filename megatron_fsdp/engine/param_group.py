"""ParameterGroup: the weight and gradient buffers of one unit's parameters of one dtype, and the gather of weights.

A group moves through the states of its unit (``unit.WeightState``). In order of time: ``start_gathers`` issues the
all-gather, ``use_gathered`` registers the unsharded parameters in the modules, and ``release`` releases the gathered
weights after the sharded parameters are registered again. A step makes no tensors here.
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
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import BufferPlacement, DBuffer, Flat, PlacementError, Plan, Replicate
from dbuffer.collectives.all_gather import all_gather, all_gather_together
from dbuffer.collectives.parts import Part
from dbuffer.events import listeners, tell
from dbuffer.layout import only_flat_axis
from dbuffer.mesh import MeshAxis, neighbours
from dbuffer.route import Route
from dbuffer.storage import FlatStorage
from dbuffer_kernels import cast_copy
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.engine.freshness import Freshness
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.optimizer_steps import repeat_first_step_checks
from megatron_fsdp.engine.params import FSDPParams
from megatron_fsdp.engine.reduce import ReduceFunction
from megatron_fsdp.engine.split_main_params import Remainder
from megatron_fsdp.engine.streams import Ticket, expect_host_read, lane
from megatron_fsdp.engine.unsharded_param import GatheredWeight
from megatron_fsdp.errors import ConfigError, StateError

__all__ = [
    "GatherFunction",
    "GatherHooks",
    "ParameterGroup",
    "WeightBuffers",
    "announce_step",
    "announce_step_of",
    "group_of_parameter",
    "groups_stepped_by",
    "note_group",
    "start_gathers",
]


# A replacement for the all-gather: (output, input, group, async_op) -> handle or None, as FSDP2's ``AllGather``.
GatherFunction = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, bool], "dist.Work | None"]


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
        if not group.rests_whole:
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
        if has_changed or group.freshness.is_suspect or is_refreshed_always:
            stale.append(group)
    for group in stale:
        if group.is_meta:
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


class PostForwardShard:
    """This rank's part of a group's gathered weights, kept from forward to backward.

    With ``reshard_after_forward=8`` on 64 ranks, eight neighbours hold the whole weights together, so backward gathers
    within them (one machine) instead of over all ranks, for eight times the shard's memory in between.

    Args:
        gathered: the buffer of gathered weights.
        axis: the axis that the weights are sharded over. size: number of ranks that hold the whole weights together.
    Attributes:
        axis: the axis of these ranks. storage: the memory of the part.
    """

    def __init__(self, gathered: DBuffer, axis: MeshAxis, size: int) -> None:
        self._gathered = gathered
        self.axis = neighbours(axis, size)
        numel = gathered.layout.numel // size
        self.storage = FlatStorage(numel, gathered.dtype, gathered.device, name=f"{gathered.name}: post-forward shard")
        self.storage.release()
        self._generation = -1

    def _mine(self) -> torch.Tensor:
        numel = self.storage.tensor.numel()
        return self._gathered.local_buffer.narrow(0, self.axis.rank * numel, numel)

    def keep(self, generation: int) -> None:
        """Copy this rank's part of the gathered weights, whose generation the caller gives."""
        self.storage.reallocate()
        self.storage.tensor.copy_(self._mine())
        self._generation = generation

    def holds(self, generation: int) -> bool:
        """Return True if the part is allocated and has weights of ``generation``."""
        return self.storage.is_allocated and self._generation == generation

    def gather(self) -> Part:
        """Return the gather of the whole weights from the smaller group."""
        mine = self._mine()
        mine.copy_(self.storage.tensor)
        return Part("all_gather", self.axis, self._gathered.local_buffer, mine)

    def drop(self) -> None:
        """Release the memory."""
        self.storage.release()


class GatherHooks(Protocol):
    """Gathers bytes instead of the main weights of a group, and makes weights from them (``variants/``).

    Attributes:
        sent: the bytes of this rank. arrived: the bytes of all ranks, allocated during a gather; may be the buffer of
            gathered weights itself.
        has_arrived: the last gather brought bytes, and ``post_all_gather`` has not made weights from them yet.
    """

    sent: DBuffer
    arrived: DBuffer
    has_arrived: bool

    def attach(self, weights: WeightBuffers) -> DBuffer:
        """Make ``sent`` and ``arrived`` for these main weights; return the buffer of gathered weights."""

    def refresh(self) -> None:
        """Update ``sent`` after a change of main weights."""

    def pre_all_gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Fill ``sent``, and return its gather into ``arrived``, as ``WeightBuffers.gather`` does."""

    def post_all_gather(self) -> None:
        """Make weights from ``arrived``, on the gather lane."""

    def release(self, *, keeps_gathered: bool) -> None:
        """Release memory other than the gathered weights, which the caller releases unless ``keeps_gathered``."""

    def agreed(self) -> Iterator[str]:
        """Yield descriptions that must be equal on all ranks."""


class WeightBuffers:
    """Main weights, resting weights and gathered weights of one group.

    Per use of the unit: ``gather`` reads resting weights and writes gathered weights; ``release`` frees those. If main
    and resting weights are two buffers, the first forward after a step copies main to resting weights (``_refresh``).

    Args:
        hooks: gathers bytes instead of the main weights; None to gather the weights.

    Attributes:
        main: the main weights, which the optimizer updates.
        model: the resting weights, which gathers read. ``main`` itself if the strategy shards both alike; the gather
            casts it to the compute dtype. Otherwise a buffer of the compute dtype, with ``main`` as a slice of it if
            the dtypes are equal.
        remainder: the low bits of FP32 main weights, if ``main`` has only the high ones (split weights); else None.
        gathered: the gathered weights, which compute uses; ``model`` itself with ``rests_whole``.
        rests_whole: every rank has the whole resting weights, so nothing is gathered.
        post_forward: the part kept from forward to backward, or None. is_from_part: the next gather reads that part.
        gather_function: called instead of the all-gather; None for the all-gather.
        has_copy: ``model`` is not ``main``, so a changed ``main`` needs a refresh.
        keeps_gathered: ``release`` keeps the memory of gathered weights.
        refreshes_locally: a refresh casts this rank's shard, without communication.
        can_restore_gathered: a refresh and a gather write all of the gathered weights again.
    """

    main: DBuffer
    model: DBuffer
    post_forward: PostForwardShard | None = None
    is_from_part = False
    gather_function: GatherFunction | None = None
    keeps_gathered = False
    _route: Route | None = None

    def __init__(self, plan: Plan, spec: GroupSpec, name: str, *, hooks: GatherHooks | None = None) -> None:
        self._spec, self._plan, self.gather_hooks = spec, plan, hooks
        placements, dtypes = spec.placements, spec.dtypes
        resting, stepped = placements.parameter, placements.optimizer
        whole: tuple[BufferPlacement, ...] = (Replicate(),) * len(resting)
        self.rests_whole = resting == whole
        if spec.gathers_main_weights:
            self.main = self.model = self._buffer(stepped, dtypes.main, spec.resting_device)
        else:
            self.model = self._buffer(resting, dtypes.compute, spec.resting_device)
            if dtypes.main is dtypes.compute:
                # The optimizer's shard is a slice of the resting weights, not a second copy.
                self.main = self.model.slice_view(stepped)
            else:
                self.main = self._buffer(stepped, dtypes.main, spec.resting_device)
        # A group on the meta device has no weights to gather; its refresh raises the error.
        self.has_copy = self.main is not self.model or spec.is_meta
        self.refreshes_locally = self.main.placements == self.model.placements
        self.gathered = self.model
        if not self.rests_whole:
            # PyTorch makes views on allocated memory only; ``release`` follows when the views exist.
            self.gathered = self.make_gathered() if hooks is None else hooks.attach(self)
        # .data gives the views a separate version counter: autograd must not take another gather, which writes the
        # same values, for a change of the tensors that it saved.
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

    def sharded_rows(self, index: int, owned: OwnedParameter) -> DTensor:
        """Return the sharded parameter, a DTensor over ``main``."""
        rows = self.main.get_dtensor(index)
        return rows if owned.split is None else owned.split.as_sharded(rows)

    def unsharded_param(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        """Return the unsharded parameter, a view of ``gathered``."""
        like = self.gathered.get_local_tensor(index)
        view = self._views.as_strided(like.shape, like.stride(), like.storage_offset())
        if owned.split is not None:
            return nn.Parameter(owned.split.gathered(view), requires_grad=False)
        # ``nn.Parameter(view)`` would have a separate version counter, so the class of a view is changed instead.
        param: Any = view.detach()
        param.__class__ = GatheredWeight
        assert isinstance(param, GatheredWeight)
        return param

    # ------------------------------------------------------------------ gather and release

    def gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Allocate the gathered weights, and return the gather into them for the caller to issue.

        A gather of more than one collective is issued here.
        """
        self.gathered.storage.reallocate()
        hooks = self.gather_hooks
        if self.is_from_part and self.post_forward is not None:
            if hooks is not None:
                # The part is one of the bytes, or of the weights that were made from them.
                hooks.has_arrived = hooks.arrived is self.gathered
            return [self.post_forward.gather()]
        if hooks is not None:
            return self._gather_bytes(hooks, works)
        source = self.model
        if self._spec.is_offloaded or source.dtype is not self.gathered.dtype:
            source = self._gathered_shard
            if source.dtype is self.model.dtype:
                source.local_buffer.copy_(self.model.local_buffer, non_blocking=True)
            else:
                main = self.model.local_buffer
                if self._spec.is_offloaded:
                    # Copy to the device before the cast, which is cheap there (FSDP2's ``all_gather_inputs``).
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

    def _gather_bytes(self, hooks: GatherHooks, works: list[dist.Work] | None) -> list[Part]:
        if self.gather_function is not None:
            raise ConfigError(
                f"{self.main.name}: has all-gather hooks and a custom all-gather function. fix: give one of the two"
            )
        parts = hooks.pre_all_gather(works)
        hooks.has_arrived = True
        return parts

    def release(self, *, keep_generation: int | None = None) -> None:
        """Release the gathered weights.

        Args:
            keep_generation: the weights' generation, to keep a part of them after forward; None to keep no part.
        """
        if self.rests_whole:
            return
        if keep_generation is not None and self.post_forward is not None:
            self.post_forward.keep(keep_generation)
        if not self.keeps_gathered:
            self.gathered.storage.release()
        if self.gather_hooks is not None:
            self.gather_hooks.release(keeps_gathered=self.keeps_gathered)

    # ------------------------------------------------------------------ main weights have changed

    def start_refresh(self) -> list[Part]:
        """Cast this rank's main weights into the resting weights.

        Returns:
            The gather for the caller to issue, if resting weights are sharded less than main weights. A gather of more
            than one collective is issued here.
        """
        main, model = self.main, self.model
        if self.gather_hooks is not None:
            self.gather_hooks.refresh()
        if main is model:
            return []
        if self.remainder is not None:
            self.remainder.current()
        if self._spec.is_offloaded:
            # The collective and the cast run on the compute device.
            staged = self._buffer(main.placements, model.dtype, self._spec.compute_device)
            cast_copy(main.local_buffer.to(staged.device, non_blocking=True), staged.local_buffer)
            model.local_buffer.copy_(staged.redistribute(model.placements).local_buffer, non_blocking=True)
            return []
        shard = model if self.refreshes_locally else model.slice_view(main.placements)
        if shard.local_buffer.data_ptr() != main.local_buffer.data_ptr():
            cast_copy(main.local_buffer, shard.local_buffer)
        return [] if shard is model else Route(shard, model).parts(None)

    def end_refresh(self) -> bool:
        """Return True if the refresh wrote the memory of main weights (with the same values)."""
        if self.remainder is not None and self.main is not self.model:
            # The remainder still belongs to these main weights.
            self.remainder.accept()
        return not self.refreshes_locally

    # ------------------------------------------------------------------ between steps

    def values(self) -> DBuffer:
        """Return main weights in the optimizer's dtype: ``main``, or an FP32 copy of split weights.

        Changes of a copy take effect with ``store``.
        """
        return self.main if self.remainder is None else self.remainder.join()

    def store(self, values: DBuffer) -> None:
        """Write back the buffer that ``values`` returned, after the caller has changed it."""
        if self.remainder is not None:
            self.remainder.split(values)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write main weights from whole tensors in plan order, of any dtype and device."""
        values = self.values()
        for index, tensor in enumerate(tensors):
            values.write_tensor(index, tensor)
        self.store(values)

    def keep_part_for(self, size: int) -> None:
        """Keep a part of the weights from forward to backward, so that ``size`` neighbours hold them together.

        Args:
            size: number of these neighbours; 0 keeps no part.
        Raises:
            ConfigError: see ``check_part``.
        """
        axis = self.check_part(size)
        self.post_forward = None
        if axis is not None and size < axis.size:
            self.post_forward = PostForwardShard(self.gathered, axis, size)

    def check_part(self, size: int) -> MeshAxis | None:
        """Return the axis that ``keep_part_for`` would cut into groups of ``size``; None if it keeps no part.

        Raises:
            ConfigError: weights are not sharded over exactly one axis, or ``size`` does not divide it.
        """
        if not size or self.rests_whole:
            return None
        try:
            axis = only_flat_axis(self.model.axes, self.model.placements)
        except PlacementError as error:
            raise ConfigError(
                f"reshard_after_forward={size} needs weights that are sharded over exactly one axis: {error}. fix: use "
                "True or False"
            ) from error
        if size < 1 or axis.size % size:
            raise ConfigError(
                f"reshard_after_forward={size} does not divide the {axis.size} ranks of axis {axis.name!r} over which "
                "weights are sharded. fix: give a divisor, True or False"
            )
        return axis

    def agreed(self) -> Iterator[str]:
        """Yield descriptions that must be equal on all ranks, in addition to plan and dtypes."""
        if self.gather_hooks is not None:
            yield from self.gather_hooks.agreed()

    def rename(self, name: str) -> None:
        """Change the unit's name in messages and reports."""
        named = {"main_weight": self.main, "model_weight": self.model}
        if self.remainder is not None:
            named["remainder"] = self.remainder.buffer
        if not self.rests_whole:
            named["gathered weights"] = self.gathered
        for kind, buffer in named.items():
            buffer.rename(f"unit {name!r}: {kind}")


_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()
# For each optimizer: the ids of its parameters, and their groups. Empty after another parameter was recorded.
_STEPPED: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[weakref.ref[ParameterGroup]]]] = (
    weakref.WeakKeyDictionary()
)


def group_of_parameter(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group of a sharded parameter; None for any other tensor."""
    reference = _GROUPS.get(parameter)
    return None if reference is None else reference()


def note_group(parameter: torch.Tensor, group: ParameterGroup) -> None:
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
        name: the unit's name, for messages. unit: the unit's identity. module: the first module of the unit.
        owned: descriptions of the parameters. parameters: sharded parameters by name within the unit, in plan order.
        plan: where the tensors lie in the buffers. spec: mesh, placements, dtypes and devices.
        weights: the weight buffers; ``main_weight``, ``model_weight`` and ``gathered`` are three of them.
        gradient_buffer: None for a frozen group.
        fsdp_params: the sharded and the unsharded parameters.
        rests_whole: every rank has the whole resting weights, so nothing is gathered.
        is_meta: nothing is allocated yet, because the parameters were on the meta device.
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
    rests_whole: bool
    is_meta: bool
    is_writable = False
    module: weakref.ref[nn.Module]

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name, self.unit = name, 0
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
        split = self.owned[0].split
        return flat if split is None else flat + split.sharded_axes

    def use_gathered(self) -> None:
        """Register the unsharded parameters in the modules, after compute waits for the gather; may be repeated."""
        if self.weights.post_forward is not None:
            self.weights.post_forward.drop()
        if not self.rests_whole:
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
        if not self.rests_whole:
            self.fsdp_params.forbid_reads(is_unchanged=not (changed or is_raising))
            self.weights.release(keep_generation=self.freshness.gathered_generation if keep_part else None)
        return changed

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters)"


def announce_step(groups: Iterable[ParameterGroup]) -> None:
    """Note that main weights have changed or are about to change, so that resting weights are refreshed before use.

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
