"""DBuffer: tensors in one flat buffer, and how its placement on a device mesh is changed.

Collectives change where the data lives and never where a tensor lies in it, so a tensor is a view in every state that
holds all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dbuffer import collectives
from dbuffer.errors import LayoutError, PlacementError
from dbuffer.flat_tensors import FlatTensors
from dbuffer.mesh import axis_index
from dbuffer.placements import BufferPlacement, Flat, Partial, Replicate, flat_axes, validate_placements
from dbuffer_kernels import cast_copy

__all__ = ["DBuffer"]


class DBuffer(FlatTensors):
    """Tensors of given shapes in one flat buffer on a mesh, whose placements change by collectives.

    How one is made, and how its tensors are reached, is in ``FlatTensors``.
    """

    def redistribute(
        self,
        placements: Sequence[BufferPlacement],
        *,
        out: DBuffer | None = None,
        works: list[dist.Work] | None = None,
    ) -> DBuffer:
        """Return the same content under other placements: gathers, reductions and slices, one axis at a time.

        Args:
            placements: one per axis. ``Partial`` can only stay or be reduced away.
            out: where to write; a new buffer when None.
            works: when given, the last collective is asynchronous and its handle is appended here.
        Raises:
            PlacementError: a change that has no meaning (``Replicate`` to ``Partial``), or shards that would not be
                contiguous.
        """
        target = validate_placements(placements, len(self.axes))
        # Reductions and slices run from the last axis to the first, so that shards are cut from major to minor;
        # gathers run the other way.
        changes = [axis for axis in range(len(self.axes)) if self.placements[axis] != target[axis]]
        gathers = [axis for axis in changes if isinstance(self.placements[axis], Flat)]
        order = [axis for axis in reversed(changes) if axis not in gathers] + gathers
        if not order:
            return self._copied_to(out)
        current = self
        for position, axis in enumerate(order):
            last = position == len(order) - 1
            current = current._step(axis, target[axis], out if last else None, works if last else None)
        return current

    def _step(self, axis: int, target: BufferPlacement, out: DBuffer | None, works: list[dist.Work] | None) -> DBuffer:
        source = self.placements[axis]
        if isinstance(source, Flat) and isinstance(target, Replicate):
            return self.allgather(axis, out=out, works=works)
        if isinstance(source, Partial) and isinstance(target, Flat):
            return self.reduce_scatter(axis, target, out=out, works=works)
        if isinstance(source, Partial) and isinstance(target, Replicate):
            return self.allreduce(axis, out=out, works=works)
        if isinstance(source, Replicate) and isinstance(target, Flat):
            return self.scatter(axis, target, out=out)
        raise PlacementError(
            f"{self.name}: axis {self.axes[axis].name!r} cannot change from {source!r} to {target!r}; legal are Flat "
            "to Replicate, Partial to Flat or Replicate, and Replicate to Flat"
        )

    def allgather(
        self, axis: int | str, *, out: DBuffer | None = None, works: list[dist.Work] | None = None
    ) -> DBuffer:
        """Gather the shards of one ``Flat`` axis: afterwards every rank of the axis holds them all."""
        position, target = self._change(axis, Flat, Replicate())
        out = self._output(out, target)
        collectives.all_gather(out.local_buffer, self.local_buffer, self.axes[position], works)
        return out

    def reduce_scatter(
        self, axis: int | str, placement: Flat, *, out: DBuffer | None = None, works: list[dist.Work] | None = None
    ) -> DBuffer:
        """Reduce one ``Partial`` axis and keep this rank's shard. This buffer's content is undefined afterwards."""
        position, target = self._change(axis, Partial, placement)
        out, op = self._output(out, target), self._reduce_op(position)
        collectives.reduce_scatter(out.local_buffer, self.local_buffer, self.axes[position], op, works)
        return out

    def allreduce(
        self, axis: int | str, *, out: DBuffer | None = None, works: list[dist.Work] | None = None
    ) -> DBuffer:
        """Reduce one ``Partial`` axis: afterwards every rank of the axis holds the sum (or average)."""
        position, target = self._change(axis, Partial, Replicate())
        out = self._output(out, target)
        if out.local_buffer.data_ptr() != self.local_buffer.data_ptr():
            out.local_buffer.copy_(self.local_buffer)
        collectives.all_reduce(out.local_buffer, self.axes[position], self._reduce_op(position), works)
        return out

    def scatter(self, axis: int | str, placement: Flat, *, out: DBuffer | None = None) -> DBuffer:
        """Keep this rank's slice along one ``Replicate`` axis, without communication; a view where ``out`` is None."""
        _, target = self._change(axis, Replicate, placement)
        view = self.slice_view(target)
        return view if out is None else view._copied_to(self._output(out, target))

    def cast(self, dtype: torch.dtype, *, out: DBuffer | None = None) -> DBuffer:
        """Return the same content in another dtype; into ``out`` (same plan and placements) when given."""
        if out is None:
            out = DBuffer.from_plan(self.plan, self.mesh, self.placements, dtype, self.device, name=self.name)
        cast_copy(self.local_buffer, self._output(out, self.placements, dtype).local_buffer)
        return out

    def _change(
        self, axis: int | str, source: type[BufferPlacement], target: BufferPlacement
    ) -> tuple[int, tuple[BufferPlacement, ...]]:
        position = axis_index(self.mesh, axis)
        found = self.placements[position]
        if not isinstance(found, source):
            raise PlacementError(
                f"{self.name}: axis {self.axes[position].name!r} is {found}, but this operation needs "
                f"{source.__name__} there"
            )
        if Flat in (source, type(target)) and any(earlier < position for earlier in flat_axes(self.placements)):
            raise PlacementError(
                f"{self.name}: axis {self.axes[position].name!r} is cut more coarsely than another Flat axis of "
                f"{self.placements}, so its shards are not contiguous; gather the earlier axes first and scatter the "
                "later ones first"
            )
        return position, (*self.placements[:position], target, *self.placements[position + 1 :])

    def _reduce_op(self, position: int) -> str:
        placement = self.placements[position]
        assert isinstance(placement, Partial)
        return placement.reduce_op

    def _output(
        self, out: DBuffer | None, placements: tuple[BufferPlacement, ...], dtype: torch.dtype | None = None
    ) -> DBuffer:
        dtype = dtype or self.dtype
        if out is None:
            return DBuffer.from_plan(self.plan, self.mesh, placements, dtype, self.device, name=self.name)
        if out.plan is not self.plan and out.plan != self.plan:
            raise LayoutError(
                f"{self.name}: out= has another plan; both buffers must hold the same tensors at the same places"
            )
        if out.placements != placements or out.dtype != dtype:
            raise PlacementError(
                f"{self.name}: out= is {out.placements} in {out.dtype}, but the result is {placements} in {dtype}"
            )
        return out

    def _copied_to(self, out: DBuffer | None) -> DBuffer:
        if out is None:
            return self
        if out.local_buffer.data_ptr() != self.local_buffer.data_ptr():
            self._output(out, self.placements).local_buffer.copy_(self.local_buffer)
        return out
