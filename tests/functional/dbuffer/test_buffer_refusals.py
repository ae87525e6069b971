"""What DBuffer refuses, on real process groups: each message says what was found, what was wanted, and where."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer import DBuffer, Flat, Partial, Replicate
from tests.harness import run_ranks

SHAPES = [(5, 3), (1,), (1, 7), (3, 2, 5), (0, 4), (11,)]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def partial_from_replicate() -> None:
    DBuffer(line(), [Replicate()], SHAPES, torch.float32, "cpu").redistribute([Partial()])


def partial_from_flat() -> None:
    DBuffer(line(), [Flat()], SHAPES, torch.float32, "cpu").redistribute([Partial()])


def gather_of_what_is_whole() -> None:
    DBuffer(line(), [Replicate()], SHAPES, torch.float32, "cpu").allgather("dp")


def reduction_of_what_is_flat() -> None:
    DBuffer(line(), [Flat()], SHAPES, torch.float32, "cpu").allreduce(0)


def unknown_axis() -> None:
    DBuffer(line(), [Flat()], SHAPES, torch.float32, "cpu").allgather("tp")


def too_many_placements() -> None:
    DBuffer(line(), [Flat(), Flat()], SHAPES, torch.float32, "cpu")


def other_plan() -> None:
    buffer = DBuffer(line(), [Flat()], SHAPES, torch.float32, "cpu")
    buffer.allgather("dp", out=DBuffer(buffer.mesh, [Replicate()], SHAPES[:2], torch.float32, "cpu"))


def other_dtype() -> None:
    buffer = DBuffer(line(), [Flat()], SHAPES, torch.float32, "cpu")
    buffer.allgather("dp", out=DBuffer.from_plan(buffer.plan, buffer.mesh, [Replicate()], torch.bfloat16, "cpu"))


def short_local() -> None:
    DBuffer.from_local(torch.zeros(3), line(), [Flat()], SHAPES)


def mixed_dtypes() -> None:
    DBuffer.distribute_tensors([torch.zeros(3), torch.zeros(3, dtype=torch.int64)], line(), [Flat()])


def whole_as_partial() -> None:
    DBuffer.distribute_tensors([torch.zeros(3)], line(), [Partial()])


def coarser_slice() -> None:
    DBuffer(line(), [Flat()], SHAPES, torch.float32, "cpu").slice_view([Replicate()])


def other_device() -> None:
    DBuffer(line(), [Flat()], SHAPES, torch.float32, "cuda")


def plan_for_fewer_shards() -> None:
    mesh = init_device_mesh("cpu", (1, 2))
    small = DBuffer(init_device_mesh("cpu", (2,)), [Flat()], SHAPES, torch.float32, "cpu").plan
    odd = type(small)(small.shapes, small.granularities, 1, small.offsets, small.numel)
    DBuffer.from_plan(odd, mesh, [Replicate(), Flat()], torch.float32, "cpu")


def inner_gather_first() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    DBuffer(mesh, [Flat(), Flat()], SHAPES, torch.float32, "cpu").allgather("inner")


REFUSALS: dict[Callable[[], None], tuple[str, ...]] = {
    partial_from_replicate: ("PlacementError", "'dp'", "cannot change from Replicate() to Partial"),
    partial_from_flat: ("PlacementError", "'dp'", "cannot change from Flat() to Partial"),
    gather_of_what_is_whole: ("PlacementError", "'dp'", "needs Flat there"),
    reduction_of_what_is_flat: ("PlacementError", "'dp'", "needs Partial there"),
    unknown_axis: ("MeshError", "'tp'", "('dp',)"),
    too_many_placements: ("PlacementError", "found 2 placements", "1 axes"),
    other_plan: ("LayoutError", "out= has another plan"),
    other_dtype: ("PlacementError", "torch.bfloat16", "torch.float32"),
    short_local: ("LayoutError", "(3,)", "2 shards"),
    mixed_dtypes: ("LayoutError", "torch.float32", "torch.int64", "one buffer holds one dtype"),
    whole_as_partial: ("PlacementError", "use Replicate or Flat"),
    coarser_slice: ("PlacementError", "not within its part", "gather first"),
    other_device: ("MeshError", "cuda", "'cpu'", "move the module"),
    plan_for_fewer_shards: ("PlacementError", "1 shards", "2 parts"),
    inner_gather_first: ("PlacementError", "'inner'", "gather the earlier axes first"),
}


def refuse_all() -> dict[str, str]:
    met = {}
    for refusal in REFUSALS:
        try:
            refusal()
        except Exception as error:
            met[refusal.__name__] = f"{type(error).__name__}: {error}"
        else:
            met[refusal.__name__] = "nothing was raised"
    return met


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    """The error that each mistake met on rank 1."""
    return run_ranks(2, refuse_all)[1]


@pytest.mark.parametrize("mistake", REFUSALS, ids=lambda mistake: mistake.__name__)
def test_a_refusal_says_what_was_found_and_wanted_for(refused: dict[str, str], mistake: Callable[[], None]) -> None:
    message, (kind, *words) = refused[mistake.__name__], REFUSALS[mistake]
    assert message.startswith(kind), message
    assert [word for word in words if word not in message] == [], message
