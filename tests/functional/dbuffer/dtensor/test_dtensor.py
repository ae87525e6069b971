"""Sharded tensors as DTensors on several ranks: whole again after every transformation, and right about themselves."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dbuffer import DBuffer, Element, Flat, LayoutError, Partial, PlacementError
from tests.harness import on_ranks

SHAPES = [(13, 3), (1,), (1, 7), (3, 2, 5), (11,), (0, 4)]


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def faces() -> list[DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    buffer = DBuffer.distribute_tensors(values(), mesh, [Flat()])
    return [buffer.get_dtensor(index) for index in range(len(SHAPES))]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


TRANSFORMS: dict[str, tuple[Callable[[DTensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "nothing": (lambda face: face, lambda value: value),
    "detach": (lambda face: face.detach(), lambda value: value),
    "copy_ and mul_ in place": (lambda face: torch.zeros_like(face).copy_(face).mul_(0.5), lambda value: value * 0.5),
    "zeros_like": (torch.zeros_like, torch.zeros_like),
    "deepcopy": (copy.deepcopy, lambda value: value),
    "cpu": (lambda face: face.cpu(), lambda value: value),
    "clone": (lambda face: face.clone(), lambda value: value),
    "a cast": (lambda face: face.to(torch.float64), lambda value: value.double()),
    "a product with a number": (lambda face: face * 0.5, lambda value: value * 0.5),
    "a sum of two": (lambda face: face + face, lambda value: value + value),
    "a foreach product": (lambda face: torch._foreach_mul([face], 0.5)[0], lambda value: value * 0.5),
    "an interpolation": (lambda face: torch.lerp(face, torch.zeros_like(face), 0.5), lambda value: value * 0.5),
}


@on_ranks(3)
def test_the_full_tensor_is_right_after_every_transformation() -> None:
    for name, (transform, wanted) in TRANSFORMS.items():
        for face, value in zip(faces(), values(), strict=True):
            assert torch.equal(whole(transform(face)), wanted(value)), name


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
    hybrid = DBuffer.distribute_tensors(values(), mesh, [Replicate(), Flat()])
    both = DBuffer.distribute_tensors(values(), mesh, [Flat(), Flat()])
    indices = range(len(SHAPES))
    assert all(torch.equal(hybrid.get_dtensor(index).full_tensor(), values()[index]) for index in indices)
    assert all(torch.equal(both.get_dtensor(index).full_tensor(), values()[index]) for index in indices)
    assert hybrid.get_dtensor(0).device_mesh is mesh
    assert both.get_dtensor(0).device_mesh.ndim == 1


@on_ranks(2)
def test_partial_sums_and_rows_that_are_cut_have_no_face() -> None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DBuffer(mesh, [Partial()], [(2, 3)], torch.float32, "cpu")
    with pytest.raises(PlacementError, match="Partial must be reduced first"):
        partial.get_dtensor(0)
    cut = DBuffer(mesh, [Flat()], [(2, 3)], torch.float32, "cpu", granularity=Element())
    with pytest.raises(LayoutError):
        cut.get_dtensor(0)
