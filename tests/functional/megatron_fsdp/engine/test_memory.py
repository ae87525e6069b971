"""The engine's memory during training, by its own accounting; all of it is released at the end."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import StorageError, memory_meter
from megatron_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ParameterGroup,
    StateError,
    fully_shard,
    fully_shard_optimizer,
)
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, CheckpointedStack, ShuffledStack, Stack, inputs, loss_of_rank
from tests.harness.oracle import units_of
from tests.harness.storage_guard import guard_released_storage
from tests.harness.twins import sharded

HIDDEN_SIZES = (97, 13, 131, 101, 127, 111)
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def sharded_stack(
    policy: MixedPrecisionPolicy | None = None, kind: type[Stack] = Stack, strategy: str | None = None
) -> Stack:
    return sharded(kind(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES)), strategy, mp_policy=policy)


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    return [group for unit in units_of(model) for group in unit.parameter_groups]


@dataclass(frozen=True)
class Setting:
    policy: MixedPrecisionPolicy | None = None
    microbatches: int = 1
    stack: type[Stack] = Stack
    # Bytes of packed gradients, in units of gathered weights.
    packed: float = 1.0


SETTINGS = {
    "fp32": Setting(),
    "two microbatches": Setting(microbatches=2),
    "bf16, reduced in bf16": Setting(MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)),
    "bf16, reduced in fp32": Setting(MIXED, packed=2.0),
    "activation checkpointing": Setting(stack=CheckpointedStack),
    "another order of layers each time": Setting(stack=ShuffledStack),
}


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_a_step_has_at_most_two_gathered_units_and_one_packed_gradient(
    name: str,
) -> None:
    setting = SETTINGS[name]
    model = sharded_stack(setting.policy, setting.stack)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    largest = max(group.gathered.nbytes for group in groups_of(model))
    meter, forward, backward, rests = memory_meter(), 0.0, 0.0, set()
    for step in range(6):
        num_allocations = 0
        for microbatch in range(setting.microbatches):
            rest = meter.current_bytes
            meter.reset_peak()
            loss = loss_of_rank(model, 2 * step + microbatch)
            forward = max(forward, (meter.peak_bytes - rest) / largest if step else 0.0)
            loss.backward()
            backward = max(backward, (meter.peak_bytes - rest) / largest if step else 0.0)
            num_allocations += meter.num_allocations
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step:
            rests.add(meter.current_bytes)
            # Each gathered buffer twice, but the last one's once; each packed buffer once.
            assert num_allocations == (3 * len(HIDDEN_SIZES) - 1) * setting.microbatches
    assert 1.0 <= forward <= 2.0
    assert 2.0 <= backward <= 2.0 + setting.packed
    assert len(rests) == 1


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("policy", [None, MIXED], ids=["fp32", "bf16"])
@on_ranks(3)
def test_gradient_memory_exists_from_backward_to_zero_grad_or_while_referenced(
    policy: MixedPrecisionPolicy | None, is_kept: bool
) -> None:
    meter = memory_meter()
    before = meter.current_bytes
    model = sharded_stack(policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    shards = 4 * sum(group.main_weight.layout.numel for group in groups_of(model))
    phases = [meter.current_bytes]
    for step in range(3):
        loss_of_rank(model, step).backward()
        phases = [*phases[:1], meter.current_bytes]
        optimizer.step()
        phases.append(meter.current_bytes)
        kept = [next(model.parameters()).grad] if is_kept else []
        optimizer.zero_grad()
        phases.append(meter.current_bytes)
        kept.clear()
    made, trained, stepped, zeroed = ((phase - before) / shards for phase in phases)
    assert (made, trained, stepped) == (1.0, 2.0, 2.0)
    assert (1.0 < zeroed < 2.0) if is_kept else zeroed == 1.0


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


KEPT = [
    *((strategy, "") for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
    ("optim_grads", "slots"),
    ("optim_grads_params", "slots"),
    ("optim_grads_params", "offloaded"),
]


@pytest.mark.parametrize("is_late", [False, True], ids=["zero_grad before forward", "zero_grad before backward"])
@pytest.mark.parametrize(("strategy", "memory"), KEPT)
@on_ranks(2)
def test_gradients_that_are_kept_have_their_values_after_the_next_backward(
    strategy: str, memory: str, is_late: bool
) -> None:
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if memory == "offloaded" else {}
    model = sharded(Stack(Block(), Block()), strategy, **options)
    if memory == "slots":
        model.set_slot_pool("largest")
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(5):
        if not is_late:
            optimizer.zero_grad()
        loss = loss_of_rank(model, step)
        if is_late:
            optimizer.zero_grad()
        loss.backward()
        assert all(torch.equal(rows_of(one), values) for one, values in kept)
        gradients = [p.grad if step % 2 else rows_of(p.grad).view(-1) for p in optimizer.param_groups[0]["params"]]
        kept = [(gradient, rows_of(gradient).clone()) for gradient in gradients]
        del gradients
        optimizer.step()
    assert any(float(values.abs().sum()) for _, values in kept)


class WithLoss(nn.Module):
    """A unit that keeps a loss as an attribute instead of returning it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss = self.block(x).square().mean()
        return torch.zeros(())


@on_ranks(2)
def test_a_backward_past_all_outputs_does_not_overwrite_gradients_that_are_kept() -> None:
    torch.manual_seed(5)
    model: Any = WithLoss()
    fully_shard(model, reshard_after_forward=False)

    def forward() -> None:
        model(inputs(dist.get_rank(), 0))

    forward()
    model.loss.backward()
    forward()
    kept = [(parameter.grad, rows_of(parameter.grad).clone()) for parameter in model.parameters()]
    model.zero_grad()
    with pytest.raises(
        StateError, match=r"unit 'WithLoss': a backward came to its weights .* call zero_grad\(\) before"
    ):
        model.loss.backward()
    assert all(torch.equal(rows_of(one), values) for one, values in kept)
    model.zero_grad()
    forward()
    model.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@on_ranks(2)
def test_gradients_are_saved_without_the_buffer_and_parameters_load_safely() -> None:
    model = sharded_stack()
    loss_of_rank(model, 0).backward()
    parameter = min(model.parameters(), key=torch.Tensor.numel)
    gradient = parameter.grad
    for tensor in (parameter, gradient):
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True).to_local(), tensor.to_local())
    assert file.getbuffer().nbytes < max(group.main_weight.nbytes for group in groups_of(model))
    copied = copy.deepcopy(parameter)
    copied.grad = None
    assert parameter.grad is gradient


@on_ranks(2)
def test_released_weights_raise_through_any_view_and_return_as_the_same_objects() -> None:
    model = sharded(Stack(Block(), Block()))
    block = model.layers[0]
    block.unshard()
    captured = block.up.weight
    values, part, group = captured.detach().clone(), captured[1:, :2], block.parameter_groups[0]
    block.reshard()
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("gathered weights", lambda: group.gathered.local_buffer),
        ("gathered weights", lambda: group.gathered.get_local_tensor(0)),
        ("gathered weights", lambda: part + 1),
        ("parameter 'up.weight'", lambda: captured.sum()),
        ("parameter 'up.weight'", lambda: captured.data.zero_()),
        ("parameter 'up.weight'", lambda: captured.t()),
        ("parameter 'up.weight'", lambda: nn.functional.linear(torch.ones(2, WIDTH), captured)),
    ]
    for what, attempt in attempts:
        with guard_released_storage(), pytest.raises(StorageError, match=f"^unit 'layers.0': {what}"):
            attempt()
    block.unshard()
    with guard_released_storage():
        assert (captured == values).all()
    assert block.up.weight is captured
