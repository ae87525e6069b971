"""DBuffer: tensors in one flat buffer on a device mesh, and the collectives that change its placements.

The plan says where each tensor lies in the buffer; one placement per mesh axis says which ranks hold which data.
Collectives change the placements, but never a tensor's position in the buffer. A tensor is therefore a view of the
buffer under every placement that holds all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dbuffer.collectives.all_gather import all_gather
from dbuffer.collectives.all_reduce import all_reduce
from dbuffer.collectives.parts import Part, copy
from dbuffer.collectives.reduce_scatter import reduce_scatter
from dbuffer.dtensor.from_buffer import buffer_dtensor
from dbuffer.errors import LayoutError, MeshError, PlacementError
from dbuffer.layout import Layout, first_dimension_granularity, make_layout
from dbuffer.mesh import axis_index, mesh_axes
from dbuffer.placements import BufferPlacement, Flat, Partial, Replicate, flat_axes, validate_placements
from dbuffer.planner.granularity import Granularity
from dbuffer.planner.plan import Plan
from dbuffer.planner.regions import plan as make_plan
from dbuffer.storage import FlatStorage
from dbuffer_kernels import cast_copy


class DBuffer:
    """A flat buffer on a device mesh that holds tensors of given shapes; collectives change its placements.

    Attributes:
        mesh, axes: the device mesh, and its axes as seen from this rank. placements: one per axis.
        plan: where each tensor lies in the buffer.
        layout: the range of the buffer that this rank holds under its placements.
        dtype: element type of the buffer. device: where this rank's part is stored.
        storage: the memory of the part; a sliced buffer has the storage of the buffer it was sliced from.
        name: the buffer's name in errors.
    """

    storage: FlatStorage
    _base: torch.Tensor | None

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[BufferPlacement],
        tensor_shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        granularity: Granularity | Sequence[Granularity] | None = None,
    ) -> None:
        """Make a buffer with undefined content.

        Args:
            mesh: the device mesh; axis 0 is the outermost.
            placements: ``Replicate``, ``Partial(op)`` or ``Flat`` for each axis of the mesh.
            tensor_shapes: global shapes; tensor ``index`` of ``get_local_tensor`` has ``tensor_shapes[index]``.
            dtype: element type of the buffer.
            device: where this rank's part is stored.
            granularity: where shards may be cut, one for all or one per tensor. None: between slices of dimension 0.

        Raises:
            PlacementError, LayoutError, MeshError: an argument is invalid; the message names it.
        """
        axes = mesh_axes(mesh)
        if granularity is None:
            granularity = [first_dimension_granularity(shape) for shape in tensor_shapes]
        num_shards = math.prod(axis.size for axis in axes)
        plan = make_plan(tensor_shapes, num_shards, granularity=granularity, itemsize=dtype.itemsize)
        self._set_up(plan, mesh, placements, "DBuffer")
        self._allocate(dtype, torch.device(device))

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        mesh: DeviceMesh,
        placements: Sequence[BufferPlacement],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        name: str = "DBuffer",
        pin_memory: bool = False,
    ) -> DBuffer:
        """Make a buffer, with undefined content, from an existing plan.

        Args:
            plan: its number of shards must be a multiple of the product of the sizes of the ``Flat`` axes.
            device: the mesh's device; or "meta"; or "cpu", where collectives need a mesh backend that supports the CPU.
            name: the buffer's name in errors. pin_memory: pin CPU memory, for copies from and to a GPU.
        """
        buffer = cls.__new__(cls)
        buffer._set_up(plan, mesh, placements, name)
        buffer._allocate(dtype, torch.device(device), pin_memory)
        return buffer

    def _set_up(self, plan: Plan, mesh: DeviceMesh, placements: Sequence[BufferPlacement], name: str) -> None:
        self.plan = plan
        self.mesh = mesh
        self.axes = mesh_axes(mesh)
        self.name = name
        self.placements = validate_placements(placements, len(self.axes))
        self.layout = make_layout(plan, self.placements, self.axes, name)

    def _allocate(self, dtype: torch.dtype, device: torch.device, pin_memory: bool = False) -> None:
        if device.type not in (self.mesh.device_type, "cpu", "meta"):
            raise MeshError(
                f"the buffer is on {device} but the mesh is on {self.mesh.device_type!r}. fix: "
                f"move the module: module.to({self.mesh.device_type!r}), or init_device_mesh({device.type!r}, ...)"
            )
        self.dtype = dtype
        self.device = device
        self._base = None
        self.storage = FlatStorage(self.layout.numel, dtype, device, name=self.name, pin_memory=pin_memory)

    def _view(self, layout: Layout, base: torch.Tensor) -> DBuffer:
        view = DBuffer.__new__(DBuffer)
        view.mesh, view.axes, view.plan, view.name = self.mesh, self.axes, self.plan, self.name
        view.layout, view.placements, view.dtype, view.device = layout, layout.placements, self.dtype, self.device
        view.storage, view._base = self.storage, base
        return view

    @classmethod
    def from_local(
        cls,
        local_buffer: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[BufferPlacement],
        tensor_shapes: Sequence[Sequence[int]],
        *,
        granularity: Granularity | Sequence[Granularity] | None = None,
    ) -> DBuffer:
        """Make a buffer with a copy of ``local_buffer``, a 1-D tensor with this rank's part of the buffer.

        Raises:
            LayoutError: ``local_buffer`` does not have the length that the plan gives this rank.
        """
        buffer = cls(mesh, placements, tensor_shapes, local_buffer.dtype, local_buffer.device, granularity=granularity)
        wanted = buffer.local_buffer.numel()
        if local_buffer.shape != (wanted,):
            raise LayoutError(
                f"local_buffer has shape {tuple(local_buffer.shape)}, but this rank's part of the plan is ({wanted},): "
                f"{buffer.plan.num_shards} shards of {buffer.plan.shard_numel} elements. fix: pass a 1-D tensor of "
                f"{wanted} elements"
            )
        buffer.local_buffer.copy_(local_buffer)
        return buffer

    @classmethod
    def distribute_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        placements: Sequence[BufferPlacement],
        *,
        granularity: Granularity | Sequence[Granularity] | None = None,
    ) -> DBuffer:
        """Make a buffer from full tensors with equal values on all ranks. Each rank copies its part; nothing is sent.

        Raises:
            LayoutError: the list is empty, or the tensors have different dtypes.
            PlacementError: a placement is ``Partial`` (full tensors are not partial sums).
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise LayoutError(
                f"one buffer holds one dtype, found {sorted(map(str, dtypes))}. fix: one buffer per dtype"
            )
        if any(isinstance(placement, Partial) for placement in placements):
            raise PlacementError(
                f"whole tensors cannot be distributed as {tuple(placements)}. fix: use Replicate or Flat"
            )
        shapes = [tuple(tensor.shape) for tensor in tensors]
        buffer = cls(mesh, placements, shapes, tensors[0].dtype, tensors[0].device, granularity=granularity)
        buffer.zero_()
        for index, tensor in enumerate(tensors):
            buffer.write_tensor(index, tensor)
        return buffer

    @property
    def nbytes(self) -> int:
        """Size of this rank's part in bytes, while it is allocated."""
        return self.layout.numel * self.dtype.itemsize

    # ---------------------------------------------------------------- memory, which can be released and reallocated

    @property
    def local_buffer(self) -> torch.Tensor:
        """This rank's part as a 1-D tensor.

        Raises:
            StorageError: the storage is released.
        """
        storage = self.storage
        whole = storage._tensor if storage.is_allocated else storage.tensor  # saves a call per access
        return whole if self._base is None else self._base

    @property
    def is_allocated(self) -> bool:
        """True if the memory is allocated."""
        return self.storage.is_allocated

    def release_storage(self) -> None:
        """Free the memory. Tensors and views keep their identity, but must not be used until reallocation."""
        self.storage.release()

    def reallocate_storage(self) -> None:
        """Allocate the memory again under the same views, with undefined content."""
        self.storage.reallocate()

    # ---------------------------------------------------------------- the tensors in it

    def rename(self, name: str) -> None:
        """Change the name of this buffer and its storage in errors."""
        self.name = name
        self.storage.name = name

    def zero_(self) -> DBuffer:
        """Fill this rank's part, padding included, with zeros."""
        self.local_buffer.zero_()
        return self

    def get_local_tensor(self, index: int) -> torch.Tensor:
        """Return this rank's part of tensor ``index`` as a view of the buffer.

        Returns:
            The whole tensor if this rank holds all of it. Otherwise the shape depends on where shards are cut:
            (rows, ...) between slices of the first dimension, (rows, last dimension) between rows inside a slice, and
            1-D inside a row.
        Raises:
            StorageError: the storage is released.
        """
        return self.layout.tensor(index, self.local_buffer)

    def write_tensor(self, index: int, tensor: torch.Tensor) -> None:
        """Copy this rank's part of tensor ``index`` from the full ``tensor``, which may have any dtype and device.

        Raises:
            LayoutError: the tensor has another shape.
        """
        if tuple(tensor.shape) != self.plan.shapes[index]:
            raise LayoutError(
                f"{self.name}: tensor {index} has shape {self.plan.shapes[index]}, found {tuple(tensor.shape)}. fix: "
                "write the whole tensor, in its own shape"
            )
        held = self.layout.held(index)
        if held:
            self.layout.piece(index, self.local_buffer).copy_(tensor.detach().reshape(-1)[held.start : held.stop])

    def get_dtensor(self, index: int, *, is_view: bool = False) -> DTensor:
        """Return tensor ``index`` as a DTensor of its global shape that shares this buffer's memory.

        If several axes are ``Flat``, the DTensor lives on the flattened mesh, otherwise on the buffer's mesh.

        Args:
            is_view: share this buffer's storage too, so that the memory may be released and reallocated under the
                DTensor. Otherwise the DTensor has a storage of its own over the memory, which must not be released.
        Raises:
            StorageError: the storage is released.
            PlacementError: an axis is ``Partial``.
            LayoutError: the granularity allows cuts inside slices of the first dimension, which no DTensor placement
                can describe.
        """
        return buffer_dtensor(self.get_local_tensor(index), self.layout, index, self.mesh, self.name, is_view=is_view)

    def slice_view(self, placements: Sequence[BufferPlacement]) -> DBuffer:
        """Return the part of this rank's data that it keeps under finer placements, as a buffer that shares memory.

        Raises:
            PlacementError: the requested part is not inside this rank's part.
        """
        target = make_layout(self.plan, validate_placements(placements, len(self.axes)), self.axes, self.name)
        mine = self.layout
        if not mine.start <= target.start <= target.stop <= mine.stop:
            raise PlacementError(
                f"{self.name}: under {target.placements} this rank owns elements [{target.start}, {target.stop}) of "
                f"the flat buffer, which are not within its part [{mine.start}, {mine.stop}) under {self.placements}; "
                f"fix: gather first, then redistribute({target.placements})"
            )
        return self._view(target, self.local_buffer.narrow(0, target.start - mine.start, target.numel))

    # ---------------------------------------------------------------- other placements

    def redistribute(
        self,
        placements: Sequence[BufferPlacement],
        *,
        out: DBuffer | None = None,
        works: list[dist.Work] | None = None,
    ) -> DBuffer:
        """Return the same content under other placements, by gathers, reductions and slices along one axis at a time.

        Args:
            placements: one per axis. A ``Partial`` axis may stay so or be reduced; no axis may become ``Partial``.
            out: the buffer to write to; None makes a new one.
            works: when given, the last collective is asynchronous and its handle is appended here.
        Raises:
            PlacementError: the change is undefined (``Replicate`` to ``Partial``), or its shards would not be
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

    def part_to(self, out: DBuffer) -> Part | None:
        """Return ``redistribute(out.placements, out=out)`` as one collective, for the caller to issue.

        Returns:
            None if the redistribution is not exactly one collective in place: it takes several, or none, or a copy.
        Raises:
            PlacementError, LayoutError: as ``redistribute``.
        """
        changes = [axis for axis in range(len(self.axes)) if self.placements[axis] != out.placements[axis]]
        if len(changes) != 1:
            return None
        axis, before, after = self.axes[changes[0]], self.placements[changes[0]], out.placements[changes[0]]
        _, placements = self._change(changes[0], type(before), after)
        mine, target = self.local_buffer, self._output(out, placements).local_buffer
        if isinstance(before, Flat) and isinstance(after, Replicate):
            return Part("all_gather", axis, target, mine)
        if isinstance(before, Partial) and isinstance(after, Flat):
            return Part("reduce_scatter", axis, mine, target, before.reduce_op)
        if isinstance(before, Partial) and mine.data_ptr() == target.data_ptr():
            return Part("all_reduce", axis, mine, mine, before.reduce_op)
        return None

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
            f"{self.name}: axis {self.axes[axis].name!r} cannot change from {source!r} to {target!r}. fix: change Flat "
            "to Replicate, Partial to Flat or Replicate, or Replicate to Flat; redistribute() takes several steps"
        )

    def allgather(
        self, axis: int | str, *, out: DBuffer | None = None, works: list[dist.Work] | None = None
    ) -> DBuffer:
        """All-gather the shards of one ``Flat`` axis: afterwards every rank of the axis holds all of them."""
        position, target = self._change(axis, Flat, Replicate())
        out = self._output(out, target)
        all_gather(out.local_buffer, self.local_buffer, self.axes[position], works)
        return out

    def reduce_scatter(
        self, axis: int | str, placement: Flat, *, out: DBuffer | None = None, works: list[dist.Work] | None = None
    ) -> DBuffer:
        """Reduce-scatter one ``Partial`` axis: this rank keeps its shard. This buffer's content becomes undefined."""
        position, target = self._change(axis, Partial, placement)
        out, op = self._output(out, target), self._reduce_op(position)
        reduce_scatter(out.local_buffer, self.local_buffer, self.axes[position], op, works)
        return out

    def allreduce(
        self, axis: int | str, *, out: DBuffer | None = None, works: list[dist.Work] | None = None
    ) -> DBuffer:
        """All-reduce one ``Partial`` axis: afterwards every rank of the axis holds the sum or average."""
        position, target = self._change(axis, Partial, Replicate())
        out = self._output(out, target)
        copy(out.local_buffer, self.local_buffer)
        all_reduce(out.local_buffer, self.axes[position], self._reduce_op(position), works)
        return out

    def scatter(self, axis: int | str, placement: Flat, *, out: DBuffer | None = None) -> DBuffer:
        """Keep this rank's slice along one ``Replicate`` axis, without communication. Returns a view if no ``out``."""
        _, target = self._change(axis, Replicate, placement)
        view = self.slice_view(target)
        return view if out is None else view._copied_to(self._output(out, target))

    def cast(self, dtype: torch.dtype, *, out: DBuffer | None = None) -> DBuffer:
        """Return the same content in another dtype, in ``out`` (same plan and placements) if given."""
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
                f"{source.__name__} there. fix: redistribute() it first"
            )
        if Flat in (source, type(target)) and any(earlier < position for earlier in flat_axes(self.placements)):
            raise PlacementError(
                f"{self.name}: axis {self.axes[position].name!r} is cut more coarsely than another Flat axis of "
                f"{self.placements}, so its shards are not contiguous. fix: gather the earlier axes first, and scatter "
                "the later ones first"
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
                f"{self.name}: out= has another plan; both buffers must hold the same tensors at the same places. "
                "fix: make it with DBuffer.from_plan(buffer.plan, ...)"
            )
        if out.placements != placements or out.dtype != dtype:
            raise PlacementError(
                f"{self.name}: out= is {out.placements} in {out.dtype}, but the result is {placements} in {dtype}. "
                "fix: pass a buffer with these, or leave out="
            )
        return out

    def _copied_to(self, out: DBuffer | None) -> DBuffer:
        if out is None:
            return self
        if out.local_buffer.data_ptr() != self.local_buffer.data_ptr():
            self._output(out, self.placements).local_buffer.copy_(self.local_buffer)
        return out

    def __repr__(self) -> str:
        return (
            f"DBuffer({self.name!r}, {len(self.plan.shapes)} tensors, {self.plan.numel} elements of "
            f"{self.dtype}, {self.placements}, {self.nbytes} bytes here{'' if self.is_allocated else ', released'})"
        )
