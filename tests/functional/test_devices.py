"""The same training on a CPU and on a GPU: slots, wide products, a resumed run and a captured step on one rank.

Each test also runs on a CPU if it can, so that on a GPU only the device is new.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import memory_meter
from dbuffer.slot_pool import can_exchange_memory
from megatron_fsdp import AdamW, MixedPrecisionPolicy, explain, load_checkpoint, save_checkpoint
from tests.harness import run_ranks
from tests.harness.models import Block, Stack, inputs
from tests.harness.twins import sharded

WIDTH = 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = MixedPrecisionPolicy(torch.bfloat16, main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


def on(device: str, function: Callable[..., Any], *args: object) -> Any:
    (result,) = run_ranks(1, function, device, *args, backend="nccl" if device == "cuda" else "gloo", timeout=300)
    return result


def data(device: str, step: int) -> torch.Tensor:
    return inputs(0, step, 16, WIDTH).to(device)


def build(device: str, sizing: str | None = None, **options: Any) -> tuple[Any, AdamW]:
    """Return a model in bf16 over FP32 weights, and an optimizer."""
    torch.manual_seed(0)
    model = sharded(Stack(*(Block(WIDTH, hidden) for hidden in (96, 40, 200, 96))).to(device), mp_policy=BF16)
    if sizing is not None and can_exchange_memory():
        model.set_slot_pool(sizing)
    return model, AdamW(model.parameters(), lr=1e-2, **options)


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 5) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(data(device, step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def with_and_without_slots(device: str) -> tuple[list[float], list[float], int]:
    found = []
    for sizing in (None, "largest"):
        model, optimizer = build(device, sizing)
        found.append(losses_of(model, optimizer, device))
        memory_meter().reset_peak()
        model(data(device, 0)).float().sum().backward()
    return found[0], found[1], memory_meter().num_allocations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.skipif(not can_exchange_memory(), reason="this PyTorch's storages cannot exchange their memory")
def test_slots_change_no_bit_and_need_no_allocator(device: str) -> None:
    without, with_slots, allocations = on(device, with_and_without_slots)
    assert with_slots == without
    assert without[-1] < without[0]
    assert allocations == 0


def error_of_gradients(device: str) -> tuple[float, float]:
    """Return the errors of wide and of rounded gradients, against those of the same bf16 weights in FP32 arithmetic."""
    errors = []
    for fuses in ("wide", True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 48, bias=False)).to(device)
        weight = model[0].weight.detach().bfloat16().float().requires_grad_()
        sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, fuse_weight_gradients=fuses))
        x = data(device, 0).bfloat16()
        weights = torch.linspace(-1, 1, 16 * 48, device=device).view(16, 48).bfloat16()
        (model(x).float() * weights.float()).sum().backward()
        (nn.functional.linear(x.float(), weight) * weights.float()).sum().backward()
        errors.append(float((model[0].weight.grad.full_tensor().float() - weight.grad).abs().max()))
    return errors[0], errors[1]


@pytest.mark.parametrize("device", DEVICES)
def test_wide_products_are_not_rounded_to_bf16(device: str) -> None:
    wide, rounded = on(device, error_of_gradients)
    assert rounded > 1e-3
    assert wide < rounded / 100


def resumed(device: str, folder: str) -> tuple[list[float], list[float]]:
    model, optimizer = build(device)
    losses_of(model, optimizer, device, steps=2)
    save_checkpoint(model, optimizer, folder)
    wanted = losses_of(model, optimizer, device, steps=3)
    other, optimizer = build(device)
    load_checkpoint(other, optimizer, folder)
    return losses_of(other, optimizer, device, steps=3), wanted


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_goes_on_to_the_bit(device: str, tmp_path: Path) -> None:
    found, wanted = on(device, resumed, str(tmp_path / "checkpoint"))
    assert found == wanted


def left_behind(device: str) -> tuple[int, int, int]:
    """Return the bytes that a model leaves when it is deleted, after another model has warmed up caches (cuBLAS)."""
    kept = []
    for _ in range(3):
        model, optimizer = build(device)
        losses_of(model, optimizer, device, steps=2)
        predicted = explain(model).persistent_bytes
        del model, optimizer
        if device == "cuda":
            torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() if device == "cuda" else memory_meter().current_bytes)
    return kept[1], kept[2], predicted


@pytest.mark.parametrize("device", DEVICES)
def test_a_deleted_model_leaves_no_memory(device: str) -> None:
    before, after, predicted = on(device, left_behind)
    assert after <= before
    assert predicted > 0


def replayed(device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the weights after three steps, taken one by one and replayed from a graph, from the same start."""
    model, optimizer = build(device, "largest", capturable=True, max_norm=1.0)
    x = data(device, 0)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)

    def tensors() -> list[torch.Tensor]:
        state = (value for values in optimizer.state.values() for value in values.values())
        return [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *state)]

    start = [tensor.detach().clone() for tensor in tensors()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def from_the_start(take: Callable[[], None]) -> list[torch.Tensor]:
        with torch.no_grad():
            for tensor, value in zip(tensors(), start, strict=True):
                tensor.copy_(value)
        for _ in range(3):
            take()
        return [tensor.detach().cpu() for tensor in tensors()]

    by_replay = from_the_start(graph.replay)
    return by_replay, from_the_start(step)


@pytest.mark.gpu
def test_a_captured_step_replays_to_the_bit() -> None:
    by_replay, by_steps = on("cuda", replayed)
    assert all(torch.equal(a, b) for a, b in zip(by_replay, by_steps, strict=True))
