"""DBuffer on real process groups: the contents of each rank, the results of collectives, and errors."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer import (
    BufferPlacement,
    DBuffer,
    Element,
    Flat,
    Partial,
    Replicate,
    Row,
    Whole,
    memory_meter,
    observe_collectives,
)
from dbuffer.route import Route
from tests.harness import on_ranks, run_ranks

# A row that no number of ranks divides, a vector like a scalar, one row only, slices of a 3-D tensor, and an empty one.
SHAPES = [(5, 3), (1,), (1, 7), (3, 2, 5), (0, 4), (11,)]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def contents(buffer: DBuffer) -> list[torch.Tensor]:
    return [buffer.get_local_tensor(index).clone() for index in range(len(SHAPES))]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def partial_buffer(mesh: DeviceMesh, *placements: BufferPlacement) -> DBuffer:
    """Return a replicated buffer whose values differ on every rank, under placements that call them partial."""
    buffer = DBuffer(mesh, placements, SHAPES, torch.float32, "cpu")
    buffer.zero_()
    for index, tensor in enumerate(tensors(seed=dist.get_rank())):
        buffer.write_tensor(index, tensor)
    return buffer


def total_over(ranks: list[int], scale: float = 1.0) -> list[torch.Tensor]:
    parts = [tensors(seed=rank) for rank in ranks]
    return [torch.stack(same).sum(0) * scale for same in zip(*parts, strict=True)]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(found, wanted, strict=True)
    )


def false_on(num_ranks: int, facts: Callable[[], dict[str, bool]]) -> list[str]:
    ranks = run_ranks(num_ranks, facts)
    return [f"{name} on rank {rank}" for rank, found in enumerate(ranks) for name, holds in found.items() if not holds]


def facts_on_a_line() -> dict[str, bool]:
    mesh, rank, size = line(), dist.get_rank(), dist.get_world_size()
    wanted = tensors()
    flat = DBuffer.distribute_tensors(wanted, mesh, [Flat()])
    whole = flat.redistribute([Replicate()])
    facts = {
        "gathered": equal(contents(whole), wanted),
        "shards are equal": flat.local_buffer.numel() * size == flat.plan.numel == whole.local_buffer.numel(),
        "bytes": flat.nbytes == flat.local_buffer.numel() * 4,
        "pieces": equal(
            [piece.flatten() for piece in contents(flat)],
            [t.flatten()[list(flat.layout.held(i))] for i, t in enumerate(wanted)],
        ),
        "padding is zero": float(whole.local_buffer.sum())
        == pytest.approx(float(sum(t.sum() for t in wanted)), abs=1e-4),
        "sliced back": torch.equal(whole.scatter("dp", Flat()).local_buffer, flat.local_buffer),
        "slice shares memory": whole.scatter(0, Flat()).local_buffer.data_ptr()
        == whole.local_buffer[rank * flat.local_buffer.numel() :].data_ptr(),
        "no change, same buffer": flat.redistribute([Flat()]) is flat,
        "from local": torch.equal(
            DBuffer.from_local(flat.local_buffer, mesh, [Flat()], SHAPES).local_buffer, flat.local_buffer
        ),
    }
    summed = partial_buffer(mesh, Partial("sum"))
    averaged = partial_buffer(mesh, Partial("avg"))
    everyone = list(range(size))
    facts |= {
        "summed": close(contents(summed.redistribute([Replicate()])), total_over(everyone)),
        "averaged": close(contents(averaged.redistribute([Replicate()])), total_over(everyone, 1 / size)),
        "scattered sum": close(contents(summed.redistribute([Flat()]).allgather("dp")), total_over(everyone)),
        "scattered average": close(
            contents(averaged.reduce_scatter("dp", Flat()).redistribute([Replicate()])), total_over(everyone, 1 / size)
        ),
    }
    return facts


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_on_one_axis_every_rank_holds_its_part_and_gathers_and_reduces_the_whole(num_ranks: int) -> None:
    assert false_on(num_ranks, facts_on_a_line) == []


def in_place() -> dict[str, bool]:
    """Run collectives whose input is a slice of their output, or the other way round."""
    mesh, wanted = line(), tensors()
    everyone = list(range(dist.get_world_size()))
    whole = DBuffer(mesh, [Replicate()], SHAPES, torch.float32, "cpu").zero_()
    shard = whole.slice_view([Flat()])
    for index, tensor in enumerate(wanted):
        shard.write_tensor(index, tensor)
    pointer, allocations = whole.local_buffer.data_ptr(), memory_meter().num_allocations
    shard.redistribute([Replicate()], out=whole)
    facts = {"gathered": equal(contents(whole), wanted) and whole.local_buffer.data_ptr() == pointer}
    packed = partial_buffer(mesh, Partial("sum"))
    mine = packed.slice_view([Flat()])
    allocations = memory_meter().num_allocations
    packed.redistribute([Flat()], out=mine)
    wanted_shard = DBuffer.distribute_tensors(total_over(everyone), mesh, [Flat()])
    facts["reduced"] = torch.allclose(mine.local_buffer, wanted_shard.local_buffer, atol=1e-6)
    facts["nothing allocated"] = memory_meter().num_allocations == allocations + 1
    works: list[dist.Work] = []
    target = DBuffer(mesh, [Replicate()], SHAPES, torch.float32, "cpu")
    wanted_shard.redistribute([Replicate()], out=target, works=works)
    facts["one handle"] = len(works) == 1
    works[0].wait()
    facts["there after waiting"] = close(contents(target), total_over(everyone))
    return facts


def test_collectives_work_in_place_and_asynchronously() -> None:
    assert false_on(3, in_place) == []


F, P, R = Flat(), Partial("sum"), Replicate()


@pytest.mark.parametrize(
    ("before", "after", "is_view", "kind"),
    [
        ((R, F), (R, R), False, "all_gather"),
        ((P, P), (P, F), True, "reduce_scatter"),
        ((P, F), (R, F), True, "all_reduce"),
        ((P, F), (R, F), False, None),
        ((R, R), (R, F), True, None),
        ((F, F), (R, R), False, None),
        ((R, F), (R, F), True, None),
    ],
)
@on_ranks(4)
def test_a_redistribution_is_a_part_if_it_is_one_collective_in_place(
    before: tuple[BufferPlacement, ...], after: tuple[BufferPlacement, ...], is_view: bool, kind: str | None
) -> None:
    source = DBuffer(square(), before, SHAPES, torch.float32, "cpu")
    out = source.slice_view(after) if is_view else DBuffer(source.mesh, after, SHAPES, torch.float32, "cpu")
    part = source.part_to(out)
    assert (None if part is None else part.kind) == kind


@on_ranks(4)
def test_a_route_of_two_collectives_issues_them_itself() -> None:
    source = DBuffer.distribute_tensors(tensors(), square(), [F, F])
    out = DBuffer(source.mesh, [R, R], SHAPES, torch.float32, "cpu")
    route = Route(source, out)
    assert route.parts(None) == route.ready == []
    assert equal(contents(out), tensors())


def facts_on_a_square() -> dict[str, bool]:
    mesh, wanted = square(), tensors()
    both = DBuffer.distribute_tensors(wanted, mesh, [Flat(), Flat()])
    inner = DBuffer.distribute_tensors(wanted, mesh, [Replicate(), Flat()])
    outer_rank, inner_rank = mesh.get_coordinate() or []
    quarter = both.plan.numel // 4
    kinds: list[str] = []
    with observe_collectives(lambda call: kinds.append(f"{call.kind} {call.axis} {call.num_bytes // 4 // quarter}")):
        gathered = both.redistribute([Replicate(), Replicate()])
        reduced = partial_buffer(mesh, Partial(), Partial()).redistribute([Flat(), Flat()])
        hybrid = partial_buffer(mesh, Partial(), Partial()).redistribute([Replicate(), Flat()])
    full = DBuffer.distribute_tensors(wanted, mesh, [Replicate(), Replicate()]).local_buffer
    start = (2 * inner_rank + outer_rank) * quarter
    return {
        "gathered": equal(contents(gathered), wanted),
        "inner axis is the major one": torch.equal(both.local_buffer, full[start : start + quarter]),
        "an inner shard is contiguous": torch.equal(both.allgather("outer").local_buffer, inner.local_buffer),
        "reduced over both": close(contents(reduced.redistribute([Replicate()] * 2)), total_over([0, 1, 2, 3])),
        "hybrid": close(contents(hybrid.allgather("inner")), total_over([0, 1, 2, 3])),
        "cheapest order": kinds
        == [
            "all_gather outer 2",
            "all_gather inner 4",
            "reduce_scatter inner 4",
            "reduce_scatter outer 2",
            "reduce_scatter inner 4",
            "all_reduce outer 2",
        ],
    }


def test_on_two_axes_the_inner_one_is_major_and_collectives_take_the_cheapest_order() -> None:
    assert false_on(4, facts_on_a_square) == []


def facts_about_tensors() -> dict[str, bool]:
    mesh = line()
    by_element = DBuffer(mesh, [Flat()], [(3, 5)], torch.float32, "cpu", granularity=Element())
    by_row = DBuffer(mesh, [Flat()], [(2, 3, 5)], torch.float32, "cpu", granularity=Row())
    by_slice = DBuffer(mesh, [Flat()], [(4, 3, 5)], torch.float32, "cpu")
    uncut = DBuffer(mesh, [Flat()], [(4, 3)], torch.float32, "cpu", granularity=Whole())
    source = DBuffer.distribute_tensors(tensors(), mesh, [Flat()])
    narrow = source.cast(torch.bfloat16)
    integers = DBuffer.distribute_tensors([torch.arange(11)], mesh, [Flat()])
    bytes_ = DBuffer.distribute_tensors([torch.arange(21, dtype=torch.uint8).view(7, 3)], mesh, [Flat()])
    return {
        "by element": by_element.get_local_tensor(0).ndim == 1,
        "by row": by_row.get_local_tensor(0).shape[1:] == (5,),
        "by slice": by_slice.get_local_tensor(0).shape[1:] == (3, 5),
        "whole on the first rank": uncut.get_local_tensor(0).numel() == (12 if dist.get_rank() == 0 else 0),
        "cast": torch.equal(narrow.local_buffer, source.local_buffer.bfloat16()),
        "cast keeps place": narrow.plan is source.plan and narrow.placements == source.placements,
        "integers": integers.redistribute([Replicate()]).get_local_tensor(0).tolist() == list(range(11)),
        "bytes": bytes_.redistribute([Replicate()]).get_local_tensor(0).flatten().tolist() == list(range(21)),
        "meta": DBuffer(mesh, [Flat()], SHAPES, torch.float32, "meta").local_buffer.is_meta,
        "repr": "released" in repr(_released(source)) and "released" not in repr(narrow),
    }


def _released(buffer: DBuffer) -> DBuffer:
    buffer.release_storage()
    return buffer


def test_a_buffer_cuts_its_tensors_by_the_given_granularity_in_any_dtype() -> None:
    assert false_on(2, facts_about_tensors) == []


@on_ranks(2)
def test_a_released_buffer_refuses_every_use_and_comes_back_under_its_views() -> None:
    mesh = line()
    buffer = DBuffer.distribute_tensors(tensors(), mesh, [Replicate()])
    view = buffer.get_local_tensor(0)
    finer = buffer.slice_view([Flat()])
    buffer.release_storage()
    errors = []
    attempts: list[Callable[[], object]] = [
        lambda: buffer.local_buffer, lambda: buffer.get_local_tensor(0), lambda: buffer.get_dtensor(0),
        lambda: finer.local_buffer, lambda: buffer.cast(torch.bfloat16), lambda: buffer.zero_(),
    ]  # fmt: skip
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            errors.append(type(error).__name__)
    allocated = buffer.is_allocated
    buffer.reallocate_storage()
    for index, tensor in enumerate(tensors()):
        buffer.write_tensor(index, tensor)
    assert not allocated
    assert torch.equal(view, tensors()[0])
    assert errors == ["StorageError"] * 6


@on_ranks(3)
def test_the_plan_pads_these_ugly_shapes_by_less_than_half() -> None:
    data = sum(map(math.prod, SHAPES))
    numel = DBuffer(line(), [Flat()], SHAPES, torch.float32, "cpu").plan.numel
    assert data <= numel < 1.5 * data


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


def a_transposed_tensor() -> None:
    buffer(Replicate()).write_tensor(0, torch.ones(3, 5))


def inner_gather_first() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    DBuffer(mesh, [Flat(), Flat()], SHAPES, torch.float32, "cpu").allgather("inner")


# The refused call, and the class and parts of the error's message.
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
    "a transposed tensor": (a_transposed_tensor, ("LayoutError", "(5, 3)", "(3, 5)", "fix: write the whole tensor")),
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
