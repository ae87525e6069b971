"""Redistribute: gathers and reduce-scatters of a flat buffer, beside DTensors' and beside the bare collective.

The tensors of one transformer layer are gathered and reduced over gloo ranks: as one ``DBuffer``, as DTensors one after
the other, and as one flat tensor by the collective alone, in turn in one run. Rows are seconds and ratios.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DTensorPartial
from torch.distributed.tensor import Replicate as DTensorReplicate
from torch.distributed.tensor import Shard as DTensorShard

from benchmarks.engines import world_mesh
from benchmarks.harness import Row, Times, beside_peers, both, ranks_in_turn
from dbuffer import DBuffer, Flat, Partial, Replicate
from tests.harness import run_ranks

KINDS = ("gather", "reduce-scatter")


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


def move_rows(case: Mapping[str, str | int | float], ranks: Sequence[Times]) -> list[Row]:
    """Return seconds of each kind and way, and those of a ``DBuffer`` over the others'."""
    rows = []
    for kind in KINDS:
        for what, samples in both(ranks).items():
            ways = {name.removeprefix(f"{kind}: "): found for name, found in samples.items() if name.startswith(kind)}
            rows += beside_peers(Row("redistribute", case, f"{kind}, {what}", "s"), ways, "DBuffer", "way")
    return rows


def layer_shapes(width: int) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer layer of that width."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *[(width,)] * 4]


def move(shapes: Sequence[tuple[int, ...]], rounds: int) -> Times:
    """Return what every way to gather and to reduce takes on this rank, in turn."""
    mesh = world_mesh()
    return ranks_in_turn({**_gathers(shapes, mesh), **_reductions(shapes, mesh)}, rounds, warmup=3)


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
