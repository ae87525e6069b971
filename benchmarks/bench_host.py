"""Host: processor time per step that sharding adds to a plain model, beside PyTorch FSDP2, in worlds of any size.

The model is so small that only overhead is left: ``--layers`` units of ``--parameters`` vectors each, and a root with
three; collectives do nothing (benchmarks/null_group.py). A step is forward, backward and zero_grad. What a step of the
unsharded model takes in the same round is subtracted; rows are microseconds per step, their ratio to FSDP2's, and
where this project's go, by hook.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.engines import ENGINES, Precision, world_mesh
from benchmarks.harness import Row, Samples, interleaved, ratio
from benchmarks.null_group import null_world
from megatron_fsdp.runtime.backward import Backward, InFlight
from megatron_fsdp.runtime.gradients import GradientBuffer
from megatron_fsdp.runtime.schedule import Schedule

WIDTH = 1024

# Where the engine is entered from outside, and the parts of it that do the work of several of these.
HOOKS: Mapping[str, tuple[type, str]] = {
    "pre-forward": (Schedule, "before_forward"),
    "post-forward": (Schedule, "after_forward"),
    "pre-backward": (Backward, "before_backward"),
    "gradient arrival": (GradientBuffer, "receive"),
    "reduce": (Backward, "_reduce"),
    "unshard": (Schedule, "unshard"),
    "gather ahead": (Schedule, "gather_ahead"),
    "reshard": (Schedule, "reshard"),
    "fold": (InFlight, "drain"),
    "end of backward": (Backward, "finish"),
}


class Layer(nn.Module):
    """Vectors that scale the input one after the other."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        for index in range(num_parameters):
            self.register_parameter(f"scale{index}", nn.Parameter(torch.ones(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled input."""
        for scale in self._parameters.values():
            assert scale is not None
            x = x * scale
        return x


class Model(Layer):
    """Layers within a root that has three parameters of its own."""

    def __init__(self, num_layers: int, num_parameters: int) -> None:
        super().__init__(3)
        self.layers = nn.ModuleList(Layer(num_parameters) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last layer returns."""
        x = super().forward(x)
        for layer in self.layers:
            x = layer(x)
        return x


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the model and of the world, and the number of rounds."""
    parser.add_argument("--layers", type=int, default=24, help="sharded layers beside the root")
    parser.add_argument("--parameters", type=int, nargs="+", default=[9, 36], help="of a layer")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 1024], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=41, help="measured steps of each engine")


def run(args: argparse.Namespace) -> list[Row]:
    """Measure every number of parameters in every world."""
    rows = []
    # Gathered memory holds anything, and arithmetic on denormal numbers would take longer than the engines.
    torch.set_flush_denormal(True)
    try:
        for num_ranks in args.worlds:
            with null_world(num_ranks):
                for num_parameters in args.parameters:
                    case = {"layers": args.layers, "parameters": num_parameters, "ranks": num_ranks}
                    rows += measure(case, args.rounds)
    finally:
        torch.set_flush_denormal(False)
    return rows


def measure(case: Mapping[str, int], rounds: int, device: str = "cpu") -> list[Row]:
    """Return the rows of one model in the world that there is."""
    mesh = world_mesh(device)
    steps = {}
    for name, shard in ENGINES.items():
        model = Model(case["layers"], case["parameters"]).to(device)
        steps[name] = functools.partial(step, shard(model, list(model.layers), mesh, Precision()), device)
    # The host's own seconds: what other processes take does not count.
    seconds = interleaved(steps, rounds=rounds, warmup=5, clock=time.process_time)
    added = {name: added_microseconds(seconds[name], seconds["plain"]) for name in steps if name != "plain"}
    rows = [
        Row("host", {**case, "engine": name}, "host time added to a step", "us", samples)
        for name, samples in added.items()
    ]
    rows.append(Row("host", case, "host time over FSDP2's", "", ratio(added["ours"], added["FSDP2"])))
    return rows + hook_rows(case, steps["ours"], max(rounds // 2, 1))


def step(model: nn.Module, device: str = "cpu") -> None:
    """Run the model forward and backward, and drop the gradients."""
    model(torch.ones(1, WIDTH, device=device)).sum().backward()
    model.zero_grad()


def added_microseconds(seconds: Samples, plain: Samples) -> Samples:
    """Return, round by round, the microseconds that a step takes beyond the plain model's."""
    pairs = zip(seconds.values, plain.values, strict=True)
    return Samples(tuple(1e6 * (value - without) for value, without in pairs))


def hook_rows(case: Mapping[str, int], run_step: Callable[[], None], rounds: int) -> list[Row]:
    """Return the time within each of the engine's hooks, without that of hooks inside it."""
    collected: dict[str, list[float]] = {name: [] for name in HOOKS}
    for _ in range(rounds):
        with timed(HOOKS) as spent:
            run_step()
        for name, value in spent.items():
            collected[name].append(1e6 * value)
    return [
        Row("host", {**case, "engine": "ours", "hook": name}, "time in hook", "us", Samples(tuple(values)))
        for name, values in collected.items()
    ]


@contextmanager
def timed(
    methods: Mapping[str, tuple[type, str]], clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, float]]:
    """Time methods of classes while the block runs; seconds by name, each without what the others take inside it."""
    spent = dict.fromkeys(methods, 0.0)
    inner = [0.0]

    def wrapper(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                took = clock() - start
                spent[name] += took - inner.pop()
                inner[-1] += took

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in methods.items():
            stack.enter_context(mock.patch.object(owner, attribute, wrapper(name, getattr(owner, attribute))))
        yield spent
