"""Sharded tensors as DTensors on several ranks: whole values after every transformation, and right metadata."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dbuffer import BufferPlacement, DBuffer, Element, Flat, LayoutError, Partial, PlacementError
from dbuffer.events import CollectiveCall, observe_collectives
from tests.harness import on_ranks

SHAPES = [(13, 3), (1,), (1, 7), (3, 2, 5), (11,), (0, 4)]


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


@on_ranks(3)
def test_a_face_has_its_tensors_shape_values_and_memory() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = values()
    buffer = DBuffer.distribute_tensors(wanted, mesh, [Flat()])
    local = [buffer.get_dtensor(index) for index in range(len(SHAPES))]
    face, value = local[0], wanted[0]
    assert [tuple(one.shape) for one in local] == SHAPES
    assert face.stride() == value.stride()
    assert face.to_local().data_ptr() == buffer.get_local_tensor(0).data_ptr()
    for one, whole_one in zip(local, wanted, strict=True):
        if one.numel():
            norm = float(whole(torch.linalg.vector_norm(one)))
            assert norm == pytest.approx(float(torch.linalg.vector_norm(whole_one)), rel=1e-6)
    assert torch.equal(face.redistribute(mesh, [Replicate()]).to_local(), value)
    assert torch.equal(distribute_tensor(value, mesh, face.placements).full_tensor(), value)
    assert torch.equal(whole(torch.zeros_like(face).copy_(face)), value)
    assert torch.equal(face.redistribute(mesh, [Shard(1)]).full_tensor(), value)
    with torch.no_grad():
        face.fill_(2.0)
    assert (buffer.get_local_tensor(0) == 2.0).all()
    num_rows = torch.tensor(len(face.to_local()))
    dist.all_reduce(num_rows)
    assert num_rows == len(value)


@on_ranks(4)
def test_faces_on_two_axes_are_whole_again_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    cases: list[tuple[list[BufferPlacement], int]] = [([Replicate(), Flat()], 2), ([Flat(), Flat()], 1)]
    for placements, ndim in cases:
        buffer = DBuffer.distribute_tensors(values(), mesh, placements)
        for index, value in enumerate(values()):
            assert torch.equal(buffer.get_dtensor(index).full_tensor(), value)
        assert buffer.get_dtensor(0).device_mesh.ndim == ndim


@on_ranks(2)
def test_partial_sums_and_rows_that_are_cut_have_no_face() -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DBuffer(mesh, [Partial()], [(2, 3)], torch.float32, "cpu")
    with pytest.raises(PlacementError, match="reduce Partial first"):
        partial.get_dtensor(0)
    cut = DBuffer(mesh, [Flat()], [(2, 3)], torch.float32, "cpu", granularity=Element())
    with pytest.raises(LayoutError):
        cut.get_dtensor(0)


@on_ranks(4)
def test_full_tensor_moves_each_tensor_once_however_it_is_cut() -> None:
    mesh = init_device_mesh("cpu", (4,))
    wanted = values()
    buffer = DBuffer.distribute_tensors(wanted, mesh, [Flat()])
    for index, tensor in enumerate(wanted):
        calls: list[CollectiveCall] = []
        with observe_collectives(calls.append):
            assert torch.equal(whole(buffer.get_dtensor(index)), tensor)
        assert sum(call.num_bytes for call in calls) in (0, tensor.nbytes)
        assert tensor.numel() < 4 or calls, "a tensor on several ranks is gathered"
