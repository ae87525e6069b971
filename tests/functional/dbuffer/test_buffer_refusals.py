"""What DBuffer refuses, on real process groups: each message says what was found, what was wanted, and where."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer import BufferPlacement, DBuffer, Flat, Partial, Replicate
from tests.harness import on_ranks

SHAPES = [(5, 3), (1,), (1, 7), (3, 2, 5), (0, 4), (11,)]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def buffer(*placements: BufferPlacement, device: str = "cpu") -> DBuffer:
    return DBuffer(line(), placements, SHAPES, torch.float32, device)


def other_plan() -> None:
    flat = buffer(Flat())
    flat.allgather("dp", out=DBuffer(flat.mesh, [Replicate()], SHAPES[:2], torch.float32, "cpu"))


def other_dtype() -> None:
    flat = buffer(Flat())
    flat.allgather("dp", out=DBuffer.from_plan(flat.plan, flat.mesh, [Replicate()], torch.bfloat16, "cpu"))


def mixed_dtypes() -> None:
    DBuffer.distribute_tensors([torch.zeros(3), torch.zeros(3, dtype=torch.int64)], line(), [Flat()])


def plan_for_fewer_shards() -> None:
    mesh, small = init_device_mesh("cpu", (1, 2)), buffer(Flat()).plan
    odd = type(small)(small.shapes, small.granularities, 1, small.offsets, small.numel)
    DBuffer.from_plan(odd, mesh, [Replicate(), Flat()], torch.float32, "cpu")


def inner_gather_first() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    DBuffer(mesh, [Flat(), Flat()], SHAPES, torch.float32, "cpu").allgather("inner")


# What is done, and what the refusal has in it, its class first.
REFUSALS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "partial from replicate": (
        lambda: buffer(Replicate()).redistribute([Partial()]),
        ("PlacementError", "'dp'", "cannot change from Replicate() to Partial"),
    ),
    "partial from flat": (
        lambda: buffer(Flat()).redistribute([Partial()]),
        ("PlacementError", "'dp'", "cannot change from Flat() to Partial"),
    ),
    "gather of what is whole": (
        lambda: buffer(Replicate()).allgather("dp"), ("PlacementError", "'dp'", "needs Flat there")
    ),
    "reduction of what is flat": (
        lambda: buffer(Flat()).allreduce(0), ("PlacementError", "'dp'", "needs Partial there")
    ),
    "unknown axis": (lambda: buffer(Flat()).allgather("tp"), ("MeshError", "'tp'", "('dp',)")),
    "too many placements": (lambda: buffer(Flat(), Flat()), ("PlacementError", "found 2 placements", "1 axes")),
    "other plan": (other_plan, ("LayoutError", "out= has another plan")),
    "other dtype": (other_dtype, ("PlacementError", "torch.bfloat16", "torch.float32")),
    "short local": (
        lambda: DBuffer.from_local(torch.zeros(3), line(), [Flat()], SHAPES), ("LayoutError", "(3,)", "2 shards")
    ),
    "mixed dtypes": (mixed_dtypes, ("LayoutError", "torch.float32", "torch.int64", "one buffer holds one dtype")),
    "whole as partial": (
        lambda: DBuffer.distribute_tensors([torch.zeros(3)], line(), [Partial()]),
        ("PlacementError", "use Replicate or Flat"),
    ),
    "coarser slice": (
        lambda: buffer(Flat()).slice_view([Replicate()]), ("PlacementError", "not within its part", "gather first")
    ),
    "other device": (lambda: buffer(Flat(), device="cuda"), ("MeshError", "cuda", "'cpu'", "move the module")),
    "plan for fewer shards": (plan_for_fewer_shards, ("PlacementError", "1 shards", "2 parts")),
    "inner gather first": (inner_gather_first, ("PlacementError", "'inner'", "gather the earlier axes first")),
}  # fmt: skip


@on_ranks(2)
def test_a_refusal_says_what_was_found_and_wanted() -> None:
    for name, (mistake, (kind, *words)) in REFUSALS.items():
        with pytest.raises(Exception) as refused:
            mistake()
        message = str(refused.value)
        assert type(refused.value).__name__ == kind, (name, message)
        assert [word for word in words if word not in message] == [], (name, message)
