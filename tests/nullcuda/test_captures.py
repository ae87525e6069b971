"""Whole steps captured into CUDA graphs: CUDA refuses no call, and every stream joins."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import AdamW, MixedPrecisionPolicy
from tests.functional.test_gpu_ranks import build, data, loss_of
from tests.harness import run_ranks
from tests.harness.models import Block
from tests.harness.twins import sharded
from tests.nullcuda import accesses, machine, races
from tests.nullcuda.test_settings import stream_names

Optimizer = Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]


def flat(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return AdamW(parameters, lr=1e-2, capturable=True, max_norm=1.0)


def fused(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, capturable=True, fused=True)


def foreach(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, capturable=True, foreach=True)


OPTIMIZERS: dict[str, Optimizer] = {"flat": flat, "fused": fused, "foreach": foreach}
SUMS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def model_of(slots: str | None, sums: str, strategy: str) -> Any:
    machine.become_rank_0_of(8)
    shape, names = ((2, 4), ("outer", "inner")) if strategy == "hsdp" else ((8,), ("inner",))
    policy = MixedPrecisionPolicy(torch.bfloat16, SUMS[sums])
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    model: Any = sharded(build(Block).to("cuda"), strategy, mesh=mesh, mp_policy=policy)
    if slots:
        model.set_slot_pool(slots)
    return model


def captured_twice(slots: str | None, sums: str, strategy: str, name: str) -> races.Findings:
    """Capture a step, take one as usual, capture another, and replay both."""
    model = model_of(slots, sums, strategy)
    optimizer = OPTIMIZERS[name](model.parameters())
    x = data(0, 0, 0).to("cuda")

    def step() -> None:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    on_side_stream(step)
    with machine.logged(), accesses.recorded() as record:
        graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        for graph in graphs:
            with torch.cuda.graph(graph):
                step()
            step()
        for graph in graphs:
            graph.replay()
    return races.check(machine.calls(), record, stream_names())


def on_side_stream(function: Callable[[], object]) -> None:
    """Call a function three times, as CUDA's guide to captures asks for."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(aside)


VARIANTS = [
    *((slots, sums, "optim_grads_params", "flat") for slots in (None, "largest", "by_size") for sums in SUMS),
    (None, "fp32", "hsdp", "flat"),
    (None, "fp32", "optim", "flat"),
    (None, "fp32", "optim_grads_params", "fused"),
    (None, "fp32", "optim_grads_params", "foreach"),
]


@pytest.mark.parametrize(("slots", "sums", "strategy", "optimizer"), VARIANTS)
def test_whole_steps_are_captured_twice(slots: str | None, sums: str, strategy: str, optimizer: str) -> None:
    (found,) = run_ranks(1, captured_twice, slots, sums, strategy, optimizer, fresh=True, timeout=120)
    assert found.illegal == []
    assert found.unjoined == []
    assert found.num_accesses > 50


def deleted_in_a_later_capture() -> list[str]:
    """Capture an evaluation, and delete its model while something else is captured."""
    models = [model_of(None, "fp32", "optim_grads_params")]
    x = data(0, 0, 0).to("cuda")

    @torch.no_grad()
    def evaluate() -> None:
        models[0](x)

    on_side_stream(evaluate)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with machine.logged():
        with torch.cuda.graph(graph):
            evaluate()
        with torch.cuda.graph(other):
            x.add_(1)
            models.clear()
            gc.collect()
    return [call.text for call in machine.calls() if call.kind == "illegal"]


def test_a_model_is_deleted_inside_a_later_capture() -> None:
    (illegal,) = run_ranks(1, deleted_in_a_later_capture, fresh=True, timeout=120)
    assert illegal == []
