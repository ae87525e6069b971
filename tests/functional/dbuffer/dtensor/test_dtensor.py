"""Sharded tensors as DTensors on several ranks: whole again after every transformation, and right about themselves."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dbuffer import DBuffer, Element, Flat, LayoutError, Partial, PlacementError
from tests.harness import on_ranks, run_ranks

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


def whole_again(transform: Callable[[DTensor], torch.Tensor], wanted: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    return all(
        torch.equal(whole(transform(face)), wanted(value)) for face, value in zip(faces(), values(), strict=True)
    )


def half_in_place(face: DTensor) -> torch.Tensor:
    return torch.zeros_like(face).copy_(face).mul_(0.5)


TRANSFORMS: dict[str, tuple[Callable[[DTensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "nothing": (lambda face: face, lambda value: value),
    "detach": (lambda face: face.detach(), lambda value: value),
    "copy_ and mul_ in place": (half_in_place, lambda value: value * 0.5),
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


def transform(name: str) -> bool:
    return whole_again(*TRANSFORMS[name])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_full_tensor_is_right_after(name: str) -> None:
    assert run_ranks(3, transform, name, timeout=20) == [True] * 3


def facts_about_faces() -> dict[str, object]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = values()
    buffer = DBuffer.distribute_tensors(wanted, mesh, [Flat()])
    local = [buffer.get_dtensor(index) for index in range(len(SHAPES))]
    face, value = local[0], wanted[0]
    resharded = distribute_tensor(value, mesh, face.placements)
    norms = [float(whole(torch.linalg.vector_norm(one))) for one in local if one.numel()]
    facts: dict[str, object] = {
        "global shape": [tuple(one.shape) for one in local] == SHAPES,
        "stride": face.stride() == value.stride(),
        "shares memory": face.to_local().data_ptr() == buffer.get_local_tensor(0).data_ptr(),
        "norm": all(
            norm == pytest.approx(float(torch.linalg.vector_norm(one)), rel=1e-6)
            for norm, one in zip(norms, wanted, strict=False)
        ),
        "redistributed": torch.equal(face.redistribute(mesh, [Replicate()]).to_local(), value),
        "canonical": torch.equal(resharded.full_tensor(), value),
        "copied from canonical": torch.equal(whole(torch.zeros_like(face).copy_(face)), value),
        "other dimension": torch.equal(face.redistribute(mesh, [Shard(1)]).full_tensor(), value),
        "written through": False,
        "rows": len(face.to_local()),
    }
    with torch.no_grad():
        face.fill_(2.0)
    facts["written through"] = bool((buffer.get_local_tensor(0) == 2.0).all())
    return facts


@pytest.fixture(scope="module")
def face_facts() -> list[dict[str, object]]:
    return run_ranks(3, facts_about_faces)


@pytest.mark.parametrize(
    "fact",
    [
        "global shape",
        "stride",
        "shares memory",
        "norm",
        "redistributed",
        "canonical",
        "copied from canonical",
        "other dimension",
        "written through",
    ],
)
def test_a_face_is_right_about(face_facts: list[dict[str, object]], fact: str) -> None:
    assert [facts[fact] for facts in face_facts] == [True] * 3


def test_the_rows_of_all_ranks_are_all_rows(face_facts: list[dict[str, object]]) -> None:
    assert sum(int(str(facts["rows"])) for facts in face_facts) == SHAPES[0][0]


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


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    messages = []
    cut = DBuffer(mesh, [Flat()], [(2, 3)], torch.float32, "cpu", granularity=Element())
    partial = DBuffer(mesh, [Partial()], [(2, 3)], torch.float32, "cpu")
    for buffer, kind in ((partial, PlacementError), (cut, LayoutError)):
        try:
            for index in range(len(buffer.plan.shapes)):
                buffer.get_dtensor(index)
        except kind as error:
            messages.append(str(error))
    return messages


def test_partial_sums_have_no_face() -> None:
    assert "Partial must be reduced first" in run_ranks(2, refusals)[0][0]
