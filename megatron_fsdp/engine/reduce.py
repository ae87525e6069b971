"""Reduction: from the packed gradients of a group to ``main_grad``, and from ``main_grad`` to final gradients.

Each microbatch's packed gradients are reduced and folded into ``main_grad`` (FSDP2's ``foreach_reduce``). Some
strategies leave partial sums over an axis in ``main_grad``: over all axes in ZeRO-0 and 1, over the outer axis in HSDP
and HFSDP. These axes are reduced once per step, in the order in which units are closed (docs/design/order.md,
"Streams"). Microbatches are accumulated in the dtype of ``main_grad`` and sent in the reduce dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from dbuffer import BufferPlacement, DBuffer, Partial, PlacementError
from dbuffer.collectives.all_reduce import all_reduce_together
from dbuffer.collectives.parts import Part
from dbuffer.collectives.reduce_scatter import reduce_scatter, reduce_scatter_together
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


def start_reductions(reductions: Sequence[GradientReduction], works: list[dist.Work] | None) -> None:
    """Issue the reductions of one unit's packed buffers, as one collective if they allow it."""
    parts: list[Part] = []
    for reduction in reductions:
        parts += reduction.start(works)
    if len(parts) == 1 and parts[0].kind == "reduce_scatter":
        reduce_scatter(parts[0].shard, parts[0].whole, parts[0].axis, parts[0].op, works)
    else:
        _issue(parts, works)


def _issue(parts: Sequence[Part], works: list[dist.Work] | None) -> None:
    all_reduce_together([part for part in parts if part.kind == "all_reduce"], works)
    reduce_scatter_together([part for part in parts if part.kind == "reduce_scatter"], works)


def fold(reductions: Sequence[GradientReduction]) -> None:
    """Accumulate the reduced gradients in ``main_grad``, on the device."""
    for reduction in reductions:
        reduction.fold()
        if reduction.frees_packed:
            reduction.packed.release_storage()


def fold_on_host(reductions: Sequence[GradientReduction]) -> None:
    """Accumulate the reduced gradients in ``main_grad``, on the CPU."""
    for reduction in reductions:
        reduction.fold_on_host()


def start_last(reductions: Sequence[GradientReduction], works: list[dist.Work] | None) -> None:
    """Issue the reduction of one unit's ``main_grad`` over the axes that still hold partial sums."""
    for reduction in reductions:
        if reduction.wire is not None:
            reduction.wire.load()
    parts: list[Part] = []
    for reduction in reductions:
        parts += reduction.start_last(works)
    _issue(parts, works)


def complete_last(reductions: Sequence[GradientReduction]) -> None:
    """Write the results of the last reductions to ``final``."""
    for reduction in reductions:
        reduction.complete_last()


class Wire:
    """The send buffer of a step's last reduction, if ``main_grad`` has another dtype or device than the collective.

    Its memory is allocated from ``load`` to ``unload``.

    Args:
        main_grad: partial sums. final: the slice of ``main_grad`` that the optimizer reads.

    Attributes:
        whole: the send buffer. part: the slice of it that becomes ``final``.
        scale: factor for the sums in ``whole``, a power of two.
    """

    def __init__(self, main_grad: DBuffer, final: DBuffer, dtype: torch.dtype, device: torch.device) -> None:
        self.scale = 1.0
        plan, mesh, placements = main_grad.plan, main_grad.mesh, main_grad.placements
        self.whole = DBuffer.from_plan(plan, mesh, placements, dtype, device, name="gradients on the wire")
        self.part = self.whole.slice_view(final.placements)
        self._main_grad, self._final = main_grad, final
        self.whole.release_storage()

    def load(self) -> None:
        """Allocate ``whole``, and cast or copy ``main_grad`` into it."""
        self.whole.reallocate_storage()
        source, out = self._main_grad.local_buffer, self.whole.local_buffer
        if source.device == out.device:
            accumulate(source, out, scale=self.scale, overwrite=True)
        else:
            out.copy_(source if self.scale == 1.0 else source * self.scale)

    def unload(self, hook: Hook | None) -> None:
        """Write the reduced ``part`` to ``final``, and release ``whole``.

        Args:
            hook: called before, with the average on the device of the collective.
        """
        part, final = self.part.local_buffer, self._final.local_buffer
        averaged = final if part.device == final.device else torch.empty_like(part, dtype=final.dtype)
        accumulate(part, averaged, scale=1.0 / self.scale, overwrite=True)
        if hook is not None:
            hook(averaged)
        if averaged is not final:
            final.copy_(averaged)
        self.whole.release_storage()


class GradientReduction(Protocol):
    """Reduces the packed gradients of one group into ``main_grad``, and ``main_grad`` into final gradients.

    A gradient buffer holds one, chosen when the buffer is made: a ``Reduction``, or an ``InvariantReduction`` of
    variants/ for ``MixedPrecisionPolicy(reduction="invariant")``.

    Per microbatch: ``begin_sum``, ``prepare``, ``start``, ``fold``, ``fold_on_host``, ``release``. Once per step:
    ``start_last``, ``complete_last``.

    Attributes:
        packed: receives autograd's gradients. main_grad: the buffer that gradients are accumulated in. final: the slice
            of it that the optimizer reads.
        wide: holds reduced gradients of a wider dtype than ``packed``; None if reductions stay in ``packed``.
        rests_partial: ``packed`` is ``main_grad``, which is reduced once per step. rests_final: each microbatch's
            reduction leaves final gradients.
        hook: called with each reduced gradient (1-D, averaged) before it is accumulated, to reduce it further.
        function: called instead of the reduce-scatter; None for the reduce-scatter.
        keeps: ``wide`` stays allocated.
        adds_on_host: ``fold_on_host`` has work to do.
        frees_packed: the lane releases the packed buffer after the fold, because a ``LanePacker`` allocated it there.
        wire: the send buffer of a step's last reduction; None if ``main_grad`` itself is sent.
        finishes_on_lane: the last reduction may run on a lane; False if ``main_grad`` is in CPU memory.
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
        """Prepare the next ``start``.

        Args:
            scale: factor for the sum over ranks.
            overwrites: ``fold`` overwrites ``main_grad``; False: ``fold`` adds to it.
        """

    def start(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the reduction for the caller to issue; issue it here if it takes more than one collective."""

    def fold(self) -> None:
        """Accumulate the reduced gradients in ``main_grad``, on the device."""

    def fold_on_host(self) -> None:
        """Accumulate the reduced gradients in ``main_grad``, on the CPU, after ``fold``."""

    def release(self) -> None:
        """Release the memory of the reduced gradients, which are folded."""

    def keep(self, keeps: bool) -> None:
        """Keep the memory of reduced gradients allocated permanently (True) or only during a reduction (False)."""

    def release_all(self) -> None:
        """Release the memory of reduced gradients and of the send buffer ``wire``."""

    def start_last(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the last reduction for the caller to issue; issue it here if it takes more than one collective."""

    def complete_last(self) -> None:
        """Write the last reduction's result to ``final``, and call the hook."""


def make_reduction(main_weight: DBuffer, spec: GroupSpec) -> Reduction:
    """Make the gradient buffers of a group and the ``Reduction`` over them."""
    dtypes, placements = spec.dtypes, spec.placements
    partial: tuple[BufferPlacement, ...] = (Partial("sum"),) * len(placements.gradient)
    rests_partial = placements.gradient == partial
    left = zip(main_weight.axes, placements.gradient, placements.optimizer, strict=True)
    # The remaining axes have one rank each (one replica, say), so a microbatch's reduction is final.
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
    host = HostSums(main_grad) if spec.is_offloaded else None
    return Reduction(packed, reduced, main_grad, final, wire=wire, host=host)


def gradient_buffer(
    main_weight: DBuffer,
    spec: GroupSpec,
    placements: tuple[BufferPlacement, ...],
    dtype: torch.dtype,
    name: str,
    device: torch.device,
) -> DBuffer:
    """Make a buffer with the plan and the mesh of the main weights."""
    is_pinned = spec.is_pinned and device.type == "cpu"
    plan, mesh = main_weight.plan, main_weight.mesh
    return DBuffer.from_plan(plan, mesh, placements, dtype, device, name=name, pin_memory=is_pinned)


class Reduction:
    """The ordinary ``GradientReduction``: one reduce-scatter, and a fold of the result into ``main_grad``.

    Args:
        packed: receives autograd's gradients.
        reduced: this rank's result of the reduce-scatter: a slice of ``packed``, or a buffer of a wider dtype.
        main_grad: the buffer that gradients are accumulated in. final: the slice of it that the optimizer reads.
        wire: the send buffer of a step's last reduction; None if ``main_grad`` itself is sent.
        host: accumulates in CPU memory; None if ``main_grad`` is on the device.

    Attributes:
        rests_final: ``main_grad`` is ``final``, so no reduction follows at the end of a step.
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
        self.rests_final = final is main_grad
        self.hook: Hook | None = None
        self.function: ReduceFunction | None = None
        self.keeps = self.frees_packed = self.adds_on_host = False
        self.finishes_on_lane = host is None
        self._host, self._reduced = host, reduced
        # The reduction into ``reduced`` if that has a wider dtype, else nothing.
        self._wide: list[Part] = [] if self.wide is None else _wide_part(packed, reduced)
        self._route = Route(packed, reduced)
        self.wire = wire
        self._last = Route(main_grad, final) if wire is None else Route(wire.whole, wire.part)
        self._scale, self._overwrites = 1.0, True

    def begin_sum(self, binding: GradBinding) -> Accumulation:
        """Begin a sum or continue it; see ``GradBinding.begin_sum``."""
        return binding.begin_sum()

    def prepare(self, scale: float, *, overwrites: bool) -> None:
        """Prepare the next ``start``.

        Args:
            scale: factor for the sum over ranks.
            overwrites: ``fold`` overwrites ``main_grad``; False: ``fold`` adds to it.
        """
        self._scale, self._overwrites = scale, overwrites
        if self._wide:
            self._reduced.reallocate_storage()
        if self._host is not None:
            self.adds_on_host = not overwrites
            if overwrites:
                HOST_WRITES.add(self.packed.device)

    def start(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the reduction for the caller to issue; issue it here if it takes more than one collective."""
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
        """Accumulate the result in ``main_grad``, or copy it to CPU memory."""
        averaged = self._averaged()
        if self._host is None:
            accumulate(averaged, self.main_grad.local_buffer, scale=self._scale, overwrite=self._overwrites)
        else:
            self._host.fold(averaged, self._scale, overwrites=self._overwrites)

    def _averaged(self) -> torch.Tensor:
        """Return the reduced gradients; if the hook's turn is now, after scaling and the hook."""
        source = self._reduced.local_buffer
        # If a last reduction follows, ``complete_last`` calls the hook.
        if self.hook is not None and self.rests_final:
            self.hook(source.mul_(self._scale))
            self._scale = 1.0
        return source

    def fold_on_host(self) -> None:
        """Add the copy in CPU memory to ``main_grad``."""
        if self._host is not None and not self._overwrites:
            self._host.add(self._scale)

    def release(self) -> None:
        """Release the memory of the reduced gradients, which are folded."""
        if self._wide and not self.keeps:
            self._reduced.release_storage()

    def keep(self, keeps: bool) -> None:
        """Keep the memory of reduced gradients allocated permanently (True) or only during a reduction (False)."""
        self.keeps = keeps
        if keeps and self._wide:
            self._reduced.reallocate_storage()
        self.release()

    def release_all(self) -> None:
        """Release the memory of reduced gradients and of the send buffer ``wire``."""
        self.release()
        if self.wire is not None:
            self.wire.whole.release_storage()

    def start_last(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the last reduction for the caller to issue; issue it here if it takes more than one collective."""
        return self._last.parts(works)

    def complete_last(self) -> None:
        """Write the last reduction's result to ``final``, and call the hook."""
        if self.wire is not None:
            self.wire.unload(self.hook)
        elif self.hook is not None:
            self.hook(self.final.local_buffer)


class HostSums:
    """Accumulates gradients that are reduced on a device in ``main_grad`` in CPU memory (offload).

    Gradients of the first microbatch are scaled and cast on the device and copied to ``main_grad``; the host waits once
    for all units, at the end of the backward (``wait_for_host_writes``). Gradients of later microbatches are copied to
    a staging buffer, and the CPU adds them to ``main_grad``; the host waits for each unit's copy.
    """

    def __init__(self, main_grad: DBuffer) -> None:
        self._main_grad = main_grad
        self._staging: torch.Tensor | None = None

    def fold(self, source: torch.Tensor, scale: float, *, overwrites: bool) -> None:
        """Copy reduced gradients to CPU memory: to ``main_grad`` if it is overwritten, else to the staging buffer."""
        sums = self._main_grad.local_buffer
        if overwrites:
            averaged = torch.empty_like(source, dtype=sums.dtype)
            accumulate(source, averaged, scale=scale, overwrite=True)
            sums.copy_(averaged, non_blocking=True)
            return
        if self._staging is None:
            # Pinned if ``main_grad`` is, so that the copy is asynchronous.
            self._staging = torch.empty(source.numel(), dtype=source.dtype, device="cpu", pin_memory=sums.is_pinned())
        self._staging.copy_(source, non_blocking=True)

    def add(self, scale: float) -> None:
        """Add the staging buffer to ``main_grad``."""
        if self._staging is not None:
            accumulate(self._staging, self._main_grad.local_buffer, scale=scale)


def _wide_part(packed: DBuffer, reduced: DBuffer) -> list[Part]:
    """Return the reduce-scatter from ``packed`` to ``reduced``, which has a wider dtype.

    Raises:
        ConfigError: gradients are sharded over several axes, or none.
    """
    try:
        axis = only_flat_axis(reduced.axes, reduced.placements)
    except PlacementError as error:
        raise ConfigError(
            f"MixedPrecisionPolicy(accumulate_dtype={reduced.dtype}) needs gradients that are sharded over exactly one "
            f"axis: {error}. fix: use another strategy, or reduce_dtype={reduced.dtype}"
        ) from error
    return [Part("reduce_scatter", axis, packed.local_buffer, reduced.local_buffer, "sum")]
