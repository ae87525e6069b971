"""Optimizer: host time of one AdamW step over sharded parameters, torch's foreach one beside the flat one.

Parameters are tiny, so that what is measured is the work of the host: Python, dispatch and launches. One process; no
collectives. On the CPU the flat step's arithmetic is a dozen torch calls for each unit, where CUDA has one launch, so
the step is measured with and without it ("flat, launches left out").
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but untyped
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import Row, Samples, interleaved
from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from megatron_fsdp.optim.adamw import AdamW

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Layer(nn.Module):
    """The twelve parameters of a GPT layer, very small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last part returns."""
        for part in (*self.norms, *self.linears):
            x = part(x)
        return x


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the size of the model and the number of rounds."""
    parser.add_argument("--units", type=int, default=24, help="sharded layers of twelve parameters each")
    parser.add_argument("--width", type=int, default=8, help="of each layer")
    parser.add_argument("--rounds", type=int, default=21, help="measured steps of each optimizer")
    parser.add_argument("--weight-decay-groups", action="store_true", help="matrices decay, vectors do not")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure the steps, interleaved, and count the operators that each one calls."""
    starts_group = not dist.is_initialized()
    if starts_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    models = [_sharded_model(args) for _ in range(2)]
    try:
        return _measure(args, models)
    finally:
        if starts_group:
            dist.destroy_process_group()


def _measure(args: argparse.Namespace, models: Sequence[nn.Module]) -> list[Row]:
    groups = [_param_groups(model, args.weight_decay_groups) for model in models]
    stock = fully_shard_optimizer(torch.optim.AdamW(groups[0], lr=1e-3, foreach=True))
    flat = AdamW(groups[1], lr=1e-3)
    steps: dict[str, Callable[[], object]] = {
        "torch foreach": stock.step,
        "flat": flat.step,
        "flat, launches left out": lambda: _without_launches(flat.step),
    }
    # The host's own seconds: what other processes take does not count.
    seconds = interleaved(steps, rounds=args.rounds, clock=time.process_time)
    case: dict[str, str | int | float] = {
        "units": args.units,
        "parameters": 12,
        "groups": 2 if args.weight_decay_groups else 1,
    }
    rows = []
    for name, samples in seconds.items():
        rows.append(Row("optimizer", {**case, "step": name}, "host time", "s", samples))
        pairs = zip(samples.values, seconds["torch foreach"].values, strict=True)
        ratio = Samples(tuple(mine / theirs for mine, theirs in pairs))
        rows.append(Row("optimizer", {**case, "step": name}, "host time over torch's", "", ratio))
        calls = Samples((float(_count_calls(steps[name])),))
        rows.append(Row("optimizer", {**case, "step": name}, "operator calls", "", calls, is_exact=True))
    return rows


def _sharded_model(args: argparse.Namespace) -> nn.Module:
    """Shard a model, and run it forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(args.width) for _ in range(args.units)))
    for layer in model:
        fully_shard(layer, mp_policy=POLICY)
    fully_shard(model, mp_policy=POLICY)
    model(torch.randn(2, args.width)).square().mean().backward()
    return model


def _param_groups(model: nn.Module, are_two: bool) -> Any:
    if not are_two:
        return model.parameters()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def _without_launches(step: Callable[[], object]) -> None:
    with mock.patch("megatron_fsdp.optim.adamw_update.adamw", _launch_nothing):
        step()


def _launch_nothing(*_: object, **__: object) -> None:
    """Stand in for a launch; a mock's own bookkeeping would cost as much as the step."""


class _Counter(TorchDispatchMode):
    """Counts the operators that are called while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def _count_calls(step: Callable[[], object]) -> int:
    counter = _Counter()
    with counter:
        step()
    return counter.num_calls
