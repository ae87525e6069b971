"""Redistribute: gathers and reduce-scatters of a flat buffer, beside DTensors' and beside the bare collective.

The tensors of one transformer layer are gathered and reduced over gloo ranks: as one ``DBuffer``, as DTensors one after
the other, and as one flat tensor by the collective alone, in turn in one run. Rows are seconds and ratios.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DTensorPartial
from torch.distributed.tensor import Replicate as DTensorReplicate
from torch.distributed.tensor import Shard as DTensorShard

from benchmarks.engines import world_mesh
from benchmarks.harness import Row, Samples, ratio
from dbuffer import DBuffer, Flat, Partial, Replicate
from tests.harness import run_ranks

WAYS = ("DBuffer", "DTensor", "bare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the layer and the number of rounds."""
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512], help="of the layer")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=21, help="measured calls")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure each width."""
    rows = []
    for width in args.widths:
        ranks = run_ranks(args.ranks, move, layer_shapes(width), args.rounds, timeout=900.0)
        rows += move_rows({"width": width, "ranks": args.ranks}, ranks)
    return rows


def layer_shapes(width: int) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer layer of that width."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *[(width,)] * 4]


def move(shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the wall and processor seconds of every way to gather and to reduce, in turn."""
    mesh = world_mesh()
    calls = {**_gathers(shapes, mesh), **_reductions(shapes, mesh)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(-3, rounds):
        for name in list(calls) if number % 2 else list(calls)[::-1]:
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            calls[name]()
            spent = time.perf_counter() - wall, time.process_time() - processor
            if number >= 0:
                times[name].append(spent)
    return times


def _gathers(shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    sharded = DBuffer(mesh, (Flat(),), shapes, torch.float32, torch.device("cpu"))
    whole = DBuffer(mesh, (Replicate(),), shapes, torch.float32, torch.device("cpu"))
    tensors = [_dtensor(shape, mesh) for shape in shapes]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def dtensors() -> None:
        for tensor in tensors:
            tensor.redistribute(mesh, (DTensorReplicate(),)).to_local()

    shard, output = torch.zeros_like(sharded.local_buffer), torch.zeros_like(whole.local_buffer)
    return {
        "gather: DBuffer": functools.partial(sharded.allgather, 0, out=whole),
        "gather: DTensor": dtensors,
        "gather: bare": functools.partial(gather, output, shard),
    }


def _reductions(shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    partial = DBuffer(mesh, (Partial("sum"),), shapes, torch.float32, torch.device("cpu"))
    reduced = DBuffer(mesh, (Flat(),), shapes, torch.float32, torch.device("cpu"))
    partial.zero_()
    tensors = [DTensor.from_local(torch.zeros(shape), mesh, (DTensorPartial(),), run_check=False) for shape in shapes]
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def dtensors() -> None:
        for tensor in tensors:
            tensor.redistribute(mesh, (DTensorShard(0),)).to_local()

    output, full = torch.zeros_like(reduced.local_buffer), torch.zeros_like(partial.local_buffer)
    return {
        "reduce-scatter: DBuffer": functools.partial(partial.redistribute, (Flat(),), out=reduced),
        "reduce-scatter: DTensor": dtensors,
        "reduce-scatter: bare": functools.partial(scatter, output, full),
    }


def _dtensor(shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    size = mesh.size()
    local = torch.zeros(math.ceil(shape[0] / size), *shape[1:])
    return DTensor.from_local(local, mesh, (DTensorShard(0),), run_check=False)


def move_rows(
    case: Mapping[str, str | int | float], ranks: Sequence[Mapping[str, Sequence[tuple[float, float]]]]
) -> list[Row]:
    """Return wall time of the slowest rank and processor time of all for each way, and DBuffer's over the others'."""
    rows = []
    combined = {
        "wall time": _combined(ranks, lambda spent: max(wall for wall, _ in spent)),
        "processor time": _combined(ranks, lambda spent: sum(processor for _, processor in spent)),
    }
    for what, times in combined.items():
        for kind in ("gather", "reduce-scatter"):
            for way in WAYS:
                named = {**case, "way": way}
                rows.append(Row("redistribute", named, f"{kind}, {what}", "s", times[f"{kind}: {way}"]))
            mine = times[f"{kind}: DBuffer"]
            for peer in WAYS[1:]:
                values = ratio(mine, times[f"{kind}: {peer}"])
                rows.append(Row("redistribute", {**case, "peer": peer}, f"{kind}, {what} over peer's", "", values))
    return rows


def _combined(
    ranks: Sequence[Mapping[str, Sequence[tuple[float, float]]]],
    combine: Callable[[Sequence[tuple[float, float]]], float],
) -> dict[str, Samples]:
    return {
        name: Samples(tuple(combine(spent) for spent in zip(*(rank[name] for rank in ranks), strict=True)))
        for name in ranks[0]
    }
