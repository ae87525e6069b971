"""Optimizer: host time of an AdamW step (torch's and the flat one), compared with torch's over FSDP2's parameters.

Parameters are tiny, so the bench measures the work of the host: Python, dispatch and launches. There is one process and
no collective. On the CPU the flat step makes a dozen torch calls per unit, on CUDA one launch, so the step is measured
with and without these calls ("flat, launches left out").
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but untyped
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engines import Precision, fsdp2, world_mesh
from benchmarks.harness import Row, Samples, in_turn, ratio
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.optim.adamw.adamw import AdamW

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FOREACH, FUSED, DTENSORS = "FSDP2, foreach", "FSDP2, fused", "DTensors, foreach"
# The peer of each step.
PEERS = {
    FOREACH: FOREACH,
    FUSED: FUSED,
    "stock, foreach": FOREACH,
    "stock, fused": FUSED,
    DTENSORS: DTENSORS,
    "flat": DTENSORS,
    "flat, launches left out": DTENSORS,
}


class OnDTensors(torch.optim.AdamW):
    """An optimizer that the engine does not know to be element-wise, so it steps each DTensor separately."""


class Layer(nn.Module):
    """The twelve parameters of a GPT layer, very small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send the input through all parts in order."""
        for part in (*self.norms, *self.linears):
            x = part(x)
        return x


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the size of the model and the number of rounds."""
    parser.add_argument("--units", type=int, default=24, help="sharded layers of twelve parameters each")
    parser.add_argument("--width", type=int, default=16, help="of each layer; fused steps fill vectors of 64 bytes")
    parser.add_argument("--rounds", type=int, default=21, help="measured steps of each optimizer")
    parser.add_argument("--weight-decay-groups", action="store_true", help="matrices decay, vectors do not")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure the steps, interleaved, and count the operators that each one calls."""
    starts_group = not dist.is_initialized()
    if starts_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return _measure(args, {name: _training(name, args) for name in PEERS})
    finally:
        if starts_group:
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class _Training:
    """A sharded model, and its optimizer's step."""

    model: nn.Module
    width: int
    optimizer: Optimizer
    step: Callable[[], object]

    def backward(self) -> None:
        self.model(torch.randn(2, self.width, dtype=torch.bfloat16)).square().mean().backward()

    def timed(self) -> tuple[float, float]:
        """Run a training step; return the seconds of the optimizer's step, without and with zero_grad.

        Both are processor time of this process; other processes do not count.
        """
        self.backward()
        start = time.process_time()
        self.step()
        between = time.process_time()
        self.optimizer.zero_grad()
        return between - start, time.process_time() - start


def _measure(args: argparse.Namespace, trainings: Mapping[str, _Training]) -> list[Row]:
    found = in_turn(trainings, _Training.timed, args.rounds)
    case: dict[str, str | int | float] = {
        "units": args.units,
        "parameters": 12,
        "width": args.width,
        "groups": 2 if args.weight_decay_groups else 1,
    }
    rows = []
    for name, peer in PEERS.items():
        own = {**case, "step": name, "peer": peer}
        for position, metric in enumerate(("host time", "host time with zero_grad")):
            mine, theirs = (Samples(tuple(each[position] for each in found[one])) for one in (name, peer))
            rows.append(Row("optimizer", own, metric, "s", mine))
            rows.append(Row("optimizer", own, f"{metric} over peer's", "", ratio(mine, theirs)))
        calls = Samples((float(_count_calls(trainings[name])),))
        rows.append(Row("optimizer", own, "operator calls", "", calls))
    return rows


def _training(name: str, args: argparse.Namespace) -> _Training:
    """Shard a model, and make its optimizer."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Layer(args.width) for _ in range(args.units)))
    if name in (FOREACH, FUSED):
        fsdp2(model, list(model.children()), world_mesh("cpu"), Precision(torch.bfloat16, torch.float32))
    else:
        for module in (*model.children(), model):
            fully_shard(module, mp_policy=POLICY)
    groups = _param_groups(model, args.weight_decay_groups)
    if name.startswith("flat"):
        flat = AdamW(groups, lr=1e-3)
        step: Callable[[], object] = flat.step
        if name != "flat":
            step = lambda: _without_launches(flat.step)  # noqa: E731  # one of two, as it stands
        return _Training(model, args.width, flat, step)
    kind = OnDTensors if name == DTENSORS else torch.optim.AdamW
    stock = kind(groups, lr=1e-3, **{name.rpartition(" ")[2]: True})  # type: ignore[arg-type]  # foreach or fused
    return _Training(model, args.width, stock, stock.step)


def _param_groups(model: nn.Module, are_two: bool) -> Any:
    if not are_two:
        return model.parameters()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def _without_launches(step: Callable[[], object]) -> None:
    with mock.patch("megatron_fsdp.optim.adamw.update.adamw", _launch_nothing):
        step()


def _launch_nothing(*_: object, **__: object) -> None:
    """Replace a launch. A mock's bookkeeping would take as long as the step."""


class _Counter(TorchDispatchMode):
    """Counts the operators that are called while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def _count_calls(training: _Training) -> int:
    training.backward()
    counter = _Counter()
    with counter:
        training.step()
    return counter.num_calls
