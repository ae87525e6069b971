"""Weights: cost of whole weights on every rank for an inference engine, compared with other ways to get them.

Gloo ranks gather all weights of one model in turn, with ``weight_stream`` in buckets, with ``full_tensor()`` of each
parameter (of this project's model and of FSDP2's), and with FSDP2's ``get_model_state_dict(full_state_dict=True)``.
Weights are stored in FP32, and the receiver reads each tensor in bf16. Rows are seconds of the slowest rank, gathered
bytes per rank over the bytes of the bf16 weights, and peak memory above the memory before the call.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_fsdp
from benchmarks.allocations import phases_of
from benchmarks.engines import Precision, fsdp2, make_model, ours, world_mesh
from benchmarks.harness import Row, Samples, beside_peers, in_turn
from benchmarks.models import Shape
from dbuffer.events import CollectiveCall, observe_collectives
from tests.harness import run_ranks

Way = Callable[[], object]
# One rank's results by way (seconds of each round, gathered bytes, peak bytes), and the bytes of the weights in bf16.
Measured = tuple[dict[str, tuple[float, ...]], dict[str, tuple[int, int]], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for model, ranks and buckets."""
    parser.add_argument("--layers", type=int, default=6, help="of the model; the default has 40 million parameters")
    parser.add_argument("--width", type=int, default=576, help="of the model")
    parser.add_argument("--vocabulary", type=int, default=8192, help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="gloo ranks")
    parser.add_argument("--bucket-bytes", type=int, default=8 << 20, help="of the stream")
    parser.add_argument("--rounds", type=int, default=5, help="of each way")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure each number of ranks."""
    shape = Shape(args.layers, args.width, args.vocabulary, batch=1, length=2, head_width=min(64, args.width))
    rows = []
    for num_ranks in args.ranks:
        found = run_ranks(num_ranks, gather_in_turn, shape, args.bucket_bytes, args.rounds, timeout=1800.0)
        rows += weight_rows({"ranks": num_ranks, "bucket bytes": args.bucket_bytes}, found)
    return rows


def gather_in_turn(shape: Shape, bucket_bytes: int, rounds: int) -> Measured:
    """Return the time, the gathered bytes and the peak memory of each way on this rank."""
    ways = _ways(shape, bucket_bytes)

    def spend(way: Way) -> float:
        dist.barrier()
        start = time.perf_counter()
        way()
        return time.perf_counter() - start

    seconds = in_turn(ways, spend, rounds, warmup=1)
    costs = {}
    for name, way in ways.items():
        counter = _Gathered()
        with observe_collectives(counter.hear), counter:
            way()
        dist.barrier()
        phases = dict(phases_of(functools.partial(_in_phase, way)))
        costs[name] = counter.num_bytes, phases["gather"].peak - phases["gather"].start
        dist.barrier()
    weights = 2 * sum(parameter.numel() for parameter in make_model(shape, "meta").parameters())
    return {name: tuple(times) for name, times in seconds.items()}, costs, weights


def _in_phase(way: Way, begin: Callable[[str], None]) -> None:
    begin("gather")
    way()


def _ways(shape: Shape, bucket_bytes: int) -> dict[str, Way]:
    models = {}
    for engine, shard in (("ours", ours), ("FSDP2", fsdp2)):
        model = make_model(shape, "cpu")
        shard(model, list(model.layers), world_mesh(), Precision())
        models[engine] = model

    def stream() -> None:
        for bucket in megatron_fsdp.weight_stream(models["ours"], bucket_bytes=bucket_bytes).buckets():
            _receive(bucket.data)

    def state_dict() -> None:
        whole: dict[str, Any] = get_model_state_dict(models["FSDP2"], options=StateDictOptions(full_state_dict=True))
        for value in whole.values():
            _receive(value.bfloat16())

    return {
        "ours": stream,
        "ours, full_tensor": lambda: _one_by_one(models["ours"]),
        "FSDP2, full_tensor": lambda: _one_by_one(models["FSDP2"]),
        "FSDP2, full state dict": state_dict,
    }


@torch.no_grad()
def _one_by_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        _receive(parameter.full_tensor().bfloat16())


def _receive(tensor: torch.Tensor) -> None:
    """Read a tensor once, as an inference engine does."""
    tensor.view(-1).view(torch.uint8).max()


class _Gathered(TorchDispatchMode):
    """Sums the unsharded bytes of all gathers: those reported by the engine's events, and DTensor's functional ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.num_bytes = 0

    def hear(self, call: CollectiveCall) -> None:
        """Count a gather of this project."""
        self.num_bytes += call.num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "_c10d_functional::all_gather" in func._schema.name:
            gathered = result if isinstance(result, (list, tuple)) else [result]
            self.num_bytes += sum(each.nbytes for each in gathered)
        return result


def weight_rows(case: Mapping[str, str | int | float], ranks: Sequence[Measured]) -> list[Row]:
    """Return, by way, the seconds of the slowest rank, and the largest bytes and memory of a rank."""
    weights = ranks[0][2]
    case = {**case, "weight bytes": weights}
    rounds = {name: zip(*(one[0][name] for one in ranks), strict=True) for name in ranks[0][0]}
    seconds = {name: Samples(tuple(max(each) for each in found)) for name, found in rounds.items()}
    rows = beside_peers(Row("weights", case, "wall time", "s"), seconds, key="way")
    for position, (what, unit) in enumerate((("bytes gathered over the weights", ""), ("peak memory", "B"))):
        scale = weights if position == 0 else 1
        values = {name: Samples((max(one[1][name][position] for one in ranks) / scale,)) for name in ranks[0][1]}
        rows += beside_peers(Row("weights", case, what, unit), values, key="way")
    return rows
