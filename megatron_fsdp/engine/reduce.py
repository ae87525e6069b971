"""How packed gradients reach ``main_grad``, and ``main_grad`` the optimizer.

Every microbatch's packed gradients are reduced and folded into ``main_grad`` (FSDP2's ``foreach_reduce``). Gradients
that rest as partial sums over some axis (all of them in ZeRO-0 and 1, the outer one in HSDP and HFSDP) are reduced over
it once a step, in the order in which units are closed (docs/design/order.md, "Streams"). Microbatches are added up in
the dtype of ``main_grad``, and travel in that of the other reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from dbuffer import BufferPlacement, DBuffer, Partial, PlacementError
from dbuffer.collectives import Part, reduce_scatter
from dbuffer.collectives_together import all_reduce_together, reduce_together
from dbuffer.layout import only_flat_axis
from dbuffer.route import Route
from dbuffer_kernels import accumulate
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.engine.accumulation import Accumulation, GradBinding
from megatron_fsdp.engine.streams import HOST_WRITES
from megatron_fsdp.errors import ConfigError

__all__ = [
    "GradientReduction",
    "Hook",
    "ReduceFunction",
    "Reduction",
    "Wire",
    "complete_last",
    "fold",
    "fold_on_host",
    "gradient_buffer",
    "make_reduction",
    "start_last",
    "start_reductions",
]

Hook = Callable[[torch.Tensor], None]

# A replacement for the reduce-scatter: (output, input, group, op, async_op) -> handle or None, as FSDP2's
# ``ReduceScatter``.
ReduceFunction = Callable[
    [torch.Tensor, torch.Tensor, dist.ProcessGroup, dist.ReduceOp.RedOpType, bool], "dist.Work | None"
]


class Wire:
    """Partial sums while they travel, in a dtype or on a device of their own; memory is there from ``load`` on.

    Args:
        main_grad: the sums. final: the slice of them that is wanted.

    Attributes:
        whole: what travels. part: the slice of it that becomes ``final``.
        scale: sums are multiplied by it on the wire, a power of two.
    """

    def __init__(self, main_grad: DBuffer, final: DBuffer, dtype: torch.dtype, device: torch.device) -> None:
        self.scale = 1.0
        plan, mesh, placements = main_grad.plan, main_grad.mesh, main_grad.placements
        self.whole = DBuffer.from_plan(plan, mesh, placements, dtype, device, name="gradients on the wire")
        self.part = self.whole.slice_view(final.placements)
        self._main_grad, self._final = main_grad, final
        self.whole.release_storage()

    def load(self) -> None:
        """Cast the sums."""
        self.whole.reallocate_storage()
        source, out = self._main_grad.local_buffer, self.whole.local_buffer
        if source.device == out.device:
            accumulate(source, out, scale=self.scale, overwrite=True)
        else:
            out.copy_(source if self.scale == 1.0 else source * self.scale)

    def unload(self, hook: Hook | None) -> None:
        """Write what came of them to ``final``, which a hook sees first, where it was reduced."""
        part, final = self.part.local_buffer, self._final.local_buffer
        averaged = final if part.device == final.device else torch.empty_like(part, dtype=final.dtype)
        accumulate(part, averaged, scale=1.0 / self.scale, overwrite=True)
        if hook is not None:
            hook(averaged)
        if averaged is not final:
            final.copy_(averaged)
        self.whole.release_storage()


class GradientReduction(Protocol):
    """How the gradients of one group get from the packed buffer to the optimizer.

    A group holds one, chosen when its gradient buffers are made: a ``Reduction``; or, for
    ``MixedPrecisionPolicy(reduction="invariant")``, that of variants/invariant_reduction.py.

    Attributes:
        packed: receives autograd's gradients. main_grad: the accumulator. final: the slice of it that the optimizer
            reads. wide: sums of a wider dtype than is sent; None where they lie in ``packed``.
        rests_partial: whether ``packed`` is ``main_grad``, which is reduced once, at the end. rests_final: whether each
            microbatch's reduction gives what the optimizer reads.
        hook: called with each reduced gradient (1-D, averaged) before it is accumulated, to reduce it further.
        function: used instead of the reduce-scatter.
        keeps: what is reduced into has memory all the time, where it has its own.
        adds_on_host: whether ``fold_on_host`` has anything to do.
        frees_packed: the packed buffer is the lane's, which gives it back.
        wire: what travels in the place of ``main_grad`` at the end of a step; None for nothing else.
        finishes_on_lane: whether what is left to reduce may be issued on a lane; the host's own memory is not.
    """

    packed: DBuffer
    main_grad: DBuffer
    final: DBuffer
    wide: DBuffer | None
    rests_partial: bool
    rests_final: bool
    hook: Hook | None
    function: ReduceFunction | None
    keeps: bool
    adds_on_host: bool
    frees_packed: bool
    wire: Wire | None
    finishes_on_lane: bool

    def begin_sum(self, binding: GradBinding) -> Accumulation:
        """Begin a sum, or continue it, before gradients of this backward are packed; ``GradBinding.begin_sum``."""

    def prepare(self, scale: float, *, overwrites: bool) -> None:
        """Get ready for the next ``start``.

        Args:
            scale: the sum over ranks is multiplied by it.
            overwrites: ``main_grad`` holds nothing yet.
        """

    def start(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the reduction to be issued; one that is no single collective is issued."""

    def fold(self) -> None:
        """Do the device's work on its result."""

    def fold_on_host(self) -> None:
        """Do the CPU's work after that."""

    def release(self) -> None:
        """Release what the reduction left, which is folded."""

    def keep(self, keeps: bool) -> None:
        """Keep the memory of what is reduced into all the time, or while it is in use."""

    def discard(self) -> None:
        """Release what the reductions left, that of sums on the wire included."""

    def start_last(self, on_all: list[Part], scattered: list[Part], works: list[dist.Work] | None) -> None:
        """Add what is left to reduce to one of the two lists; what is no single collective is issued."""

    def complete_last(self) -> None:
        """Bring what is reduced to ``final``, and let the hook reduce it further."""


def make_reduction(main_weight: DBuffer, spec: GroupSpec) -> Reduction:
    """Make the gradient buffers of a group, and the way from one to the next; see ``GradientReduction``."""
    dtypes, placements = spec.dtypes, spec.placements
    partial: tuple[BufferPlacement, ...] = (Partial("sum"),) * len(placements.gradient)
    rests_partial = placements.gradient == partial
    left = zip(main_weight.axes, placements.gradient, placements.optimizer, strict=True)
    # Replicas of one rank, say: what a microbatch's reduction leaves here is final.
    is_alone = all(axis.size == 1 for axis, now, last in left if now != last)
    rests_final = is_alone and not rests_partial
    resting = placements.optimizer if rests_final else placements.gradient
    device = spec.compute_device
    main_grad = gradient_buffer(main_weight, spec, resting, dtypes.main_grad, "main_grad", main_weight.device)
    packed = reduced = final = main_grad
    if not rests_partial:
        packed = gradient_buffer(main_weight, spec, partial, dtypes.reduce, "packed gradients", device)
        if dtypes.accumulate is None:
            reduced = packed.slice_view(placements.gradient)
        else:
            wide, named = dtypes.accumulate, "reduced gradients"
            reduced = gradient_buffer(main_weight, spec, placements.gradient, wide, named, device)
    if resting != placements.optimizer:
        final = main_grad.slice_view(placements.optimizer)
    wire, sent = None, dtypes.accumulate or dtypes.reduce
    if not is_alone and (sent is not main_grad.dtype or main_grad.device != device):
        wire = Wire(main_grad, final, sent, device)
    reduction = Reduction(
        packed, reduced, main_grad, final, wire=wire, host=HostSums(main_grad) if spec.is_offloaded else None
    )
    reduction.rests_final = rests_final
    return reduction


def gradient_buffer(
    main_weight: DBuffer,
    spec: GroupSpec,
    placements: tuple[BufferPlacement, ...],
    dtype: torch.dtype,
    name: str,
    device: torch.device,
) -> DBuffer:
    """Make a buffer with the plan and the mesh of main weights."""
    is_pinned = spec.is_pinned and device.type == "cpu"
    plan, mesh = main_weight.plan, main_weight.mesh
    return DBuffer.from_plan(plan, mesh, placements, dtype, device, name=name, pin_memory=is_pinned)


class Reduction:
    """The ordinary ``GradientReduction``: one reduce-scatter, and a fold of its result into ``main_grad``.

    Args:
        packed: receives autograd's gradients. reduced: the slice of it that its reduction leaves to this rank; or, of a
            wider dtype, memory of its own.
        main_grad: the accumulator. final: the slice of it that the optimizer reads.
        wire: what travels in the place of ``main_grad`` at the end of a step. host: adds up in CPU memory; None where
            sums lie on the device.

    Attributes:
        is_last: whether ``main_grad`` is what the optimizer reads, so that nothing is left to reduce.
    """

    def __init__(
        self,
        packed: DBuffer,
        reduced: DBuffer,
        main_grad: DBuffer,
        final: DBuffer,
        *,
        wire: Wire | None,
        host: HostSums | None,
    ) -> None:
        self.packed, self.main_grad, self.final = packed, main_grad, final
        self.wide = None if reduced.dtype is packed.dtype else reduced
        self.rests_partial = packed is main_grad
        self.rests_final = False
        self.hook: Hook | None = None
        self.function: ReduceFunction | None = None
        self.keeps = self.frees_packed = self.adds_on_host = False
        self.finishes_on_lane = host is None
        self._host, self._reduced = host, reduced
        # The reduction into memory of its own, where sums are of a wider dtype.
        self._wide: list[Part] = [] if self.wide is None else _wide_part(packed, reduced)
        self._route = Route(packed, reduced)
        self.is_last = final is main_grad
        self.wire = wire
        self._last = Route(main_grad, final) if wire is None else Route(wire.whole, wire.part)
        self._scale, self._overwrites = 1.0, True

    def begin_sum(self, binding: GradBinding) -> Accumulation:
        """Begin a sum or continue it; see ``GradBinding.begin_sum``."""
        return binding.begin_sum()

    def prepare(self, scale: float, *, overwrites: bool) -> None:
        """Get ready for the next ``start``.

        Args:
            scale: the sum over ranks is multiplied by it.
            overwrites: ``main_grad`` holds nothing yet.
        """
        self._scale, self._overwrites = scale, overwrites
        if self._wide:
            self._reduced.reallocate_storage()
        if self._host is not None:
            self.adds_on_host = not overwrites
            if overwrites:
                HOST_WRITES.add(self.packed.device)

    def start(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the reduction to be issued; one that is no single collective is issued."""
        if self.function is None:
            return self._wide or self._route.ready or self._route.parts(works)
        reduced = self._reduced
        group = only_flat_axis(reduced.axes, reduced.placements).reduce_group
        is_async = works is not None
        work = self.function(reduced.local_buffer, self.packed.local_buffer, group, dist.ReduceOp.SUM, is_async)
        if works is not None and work is not None:
            works.append(work)
        return []

    def fold(self) -> None:
        """Add its result to ``main_grad``, or copy it to CPU memory."""
        averaged = self._averaged()
        if self._host is None:
            accumulate(averaged, self.main_grad.local_buffer, scale=self._scale, overwrite=self._overwrites)
        else:
            self._host.fold(averaged, self._scale, overwrites=self._overwrites)

    def _averaged(self) -> torch.Tensor:
        """Return what came of it, still to be scaled, but for a hook, which sees averages."""
        source = self._reduced.local_buffer
        # Where axes are left to reduce at the end, the hook's turn comes after them.
        if self.hook is not None and self.is_last:
            self.hook(source.mul_(self._scale))
            self._scale = 1.0
        return source

    def fold_on_host(self) -> None:
        """Add what was copied to CPU memory to ``main_grad`` there."""
        if self._host is not None and not self._overwrites:
            self._host.add(self._scale)

    def release(self) -> None:
        """Release what the reduction left, which is folded."""
        if self._wide and not self.keeps:
            self._reduced.release_storage()

    def keep(self, keeps: bool) -> None:
        """Have the memory of what is reduced into all the time, or while it is in use."""
        self.keeps = keeps
        if keeps and self._wide:
            self._reduced.reallocate_storage()
        self.release()

    def discard(self) -> None:
        """Release what the reductions left, that of sums on the wire included."""
        self.release()
        if self.wire is not None:
            self.wire.whole.release_storage()

    def start_last(self, on_all: list[Part], scattered: list[Part], works: list[dist.Work] | None) -> None:
        """Add what is left to reduce to one of the two lists; what is no single collective is issued."""
        part = self._last.part_on_all()
        if part is not None:
            on_all.append(part)
        else:
            scattered += self._last.parts(works)

    def complete_last(self) -> None:
        """Bring what is reduced to ``final``, and let the hook reduce it further."""
        if self.wire is not None:
            self.wire.unload(self.hook)
        elif self.hook is not None:
            self.hook(self.final.local_buffer)


class HostSums:
    """Sums in CPU memory of gradients that are reduced on a device.

    Those of the first microbatch are scaled and cast on the device and copied to ``main_grad``; those of later ones are
    copied to a buffer beside it, from which the CPU adds them once the copy is over. Only for these the host waits unit
    by unit; for the first ones it waits once, at the end of the backward (``settle_host_writes``).
    """

    def __init__(self, main_grad: DBuffer) -> None:
        self._main_grad = main_grad
        self._staging: torch.Tensor | None = None

    def fold(self, source: torch.Tensor, scale: float, *, overwrites: bool) -> None:
        """Copy what was reduced to CPU memory."""
        sums = self._main_grad.local_buffer
        if overwrites:
            averaged = torch.empty_like(source, dtype=sums.dtype)
            accumulate(source, averaged, scale=scale, overwrite=True)
            sums.copy_(averaged, non_blocking=True)
            return
        if self._staging is None:
            # In pages that a GPU writes, as ``main_grad`` is.
            self._staging = torch.empty(source.numel(), dtype=source.dtype, pin_memory=sums.is_pinned())
        self._staging.copy_(source, non_blocking=True)

    def add(self, scale: float) -> None:
        """Add it up there."""
        if self._staging is not None:
            accumulate(self._staging, self._main_grad.local_buffer, scale=scale)


def _wide_part(packed: DBuffer, reduced: DBuffer) -> list[Part]:
    """Return the reduction of one axis whose sum is of a wider dtype.

    Raises:
        ConfigError: gradients are sharded over several axes, or none.
    """
    try:
        axis = only_flat_axis(reduced.axes, reduced.placements)
    except PlacementError as error:
        raise ConfigError(
            f"MixedPrecisionPolicy(accumulate_dtype={reduced.dtype}) needs gradients that are sharded over exactly one "
            f"axis: {error}; use another strategy, or reduce_dtype={reduced.dtype}"
        ) from error
    return [Part(axis, packed.local_buffer, reduced.local_buffer, "sum")]


def start_reductions(reductions: Sequence[GradientReduction], works: list[dist.Work] | None) -> None:
    """Issue the reductions of packed buffers of one unit, as one collective where they allow it."""
    parts: list[Part] = []
    for reduction in reductions:
        parts += reduction.start(works)
    if len(parts) == 1:
        reduce_scatter(parts[0].shard, parts[0].whole, parts[0].axis, parts[0].op, works)
    else:
        reduce_together(parts, works)


def fold(reductions: Sequence[GradientReduction]) -> None:
    """Add what was reduced to ``main_grad``, on the device."""
    for reduction in reductions:
        reduction.fold()
        if reduction.frees_packed:
            reduction.packed.release_storage()


def fold_on_host(reductions: Sequence[GradientReduction]) -> None:
    """Add what was copied to CPU memory to ``main_grad`` there."""
    for reduction in reductions:
        reduction.fold_on_host()


def start_last(reductions: Sequence[GradientReduction], works: list[dist.Work] | None) -> None:
    """Reduce ``main_grad`` of groups of one unit over the axes that still hold partial sums, or issue it."""
    on_all: list[Part] = []
    scattered: list[Part] = []
    for reduction in reductions:
        if reduction.wire is not None:
            reduction.wire.load()
    for reduction in reductions:
        reduction.start_last(on_all, scattered, works)
    all_reduce_together(on_all, works)
    reduce_together(scattered, works)


def complete_last(reductions: Sequence[GradientReduction]) -> None:
    """Bring what was reduced last to what the optimizer reads."""
    for reduction in reductions:
        reduction.complete_last()
