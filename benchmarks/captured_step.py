"""A training step in a CUDA graph: compare the bits and the time of its replays with those of ordinary steps.

Runs on one rank, so that all values are real. Without a GPU an ordinary step stands for the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import megatron_fsdp
from benchmarks.engines import LEARNING_RATE, Precision, make_model, ours, world_mesh
from benchmarks.harness import Row, Samples, interleaved, ratio
from benchmarks.models import Shape
from benchmarks.null_group import null_world
from dbuffer.slot_pool import can_exchange_memory

__all__ = ["captured_rows"]

NUM_STEPS = 3


def captured_rows(shape: Shape, precision: Precision, device: str, rounds: int) -> list[Row]:
    """Return how many values differ between replays and ordinary steps, and the times of both."""
    with null_world(1):
        model = make_model(replace(shape, batch=1), device)
        ours(model, list(model.layers), world_mesh(device), precision)
        if can_exchange_memory() and isinstance(model, megatron_fsdp.FSDPModule):
            model.set_slot_pool("largest")
        optimizer = megatron_fsdp.AdamW(model.parameters(), lr=LEARNING_RATE, capturable=True, max_norm=1.0)
        tokens = torch.zeros(1, shape.length + 1, dtype=torch.long, device=device)

        def step() -> None:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        replay = _capture(step, device)
        state = _state(model, optimizer)
        start = [tensor.detach().clone() for tensor in state]
        ends = []
        for take in (replay, step):
            with torch.no_grad():
                for tensor, value in zip(state, start, strict=True):
                    tensor.copy_(value)
            for _ in range(NUM_STEPS):
                take()
            ends.append([tensor.detach().clone() for tensor in state])
        differing = sum(int((one != other).sum()) for one, other in zip(*ends, strict=True))
        calls: Mapping[str, Callable[[], object]] = {"replay": replay, "step": step}
        wait = torch.cuda.synchronize if device == "cuda" else None
        seconds = interleaved(calls, rounds=rounds, synchronize=wait)
    rows = [Row("captured step", {"run": name}, "time", "s", samples) for name, samples in seconds.items()]
    found = Samples((float(differing),))
    return [
        *rows,
        Row("captured step", {"steps": NUM_STEPS}, "values that differ after replays", "", found),
        Row("captured step", {}, "replay over step", "", ratio(seconds["replay"], seconds["step"])),
    ]


def _capture(step: Callable[[], None], device: str) -> Callable[[], object]:
    """Warm up, capture one step in a CUDA graph, and return the function that replays it."""
    if device != "cuda":
        step()
        return step
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(NUM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that a step changes: this rank's weights, moments and counters."""
    moments = (value for values in optimizer.state.values() for value in values.values())
    every = (*model.parameters(), *moments)
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in every]
