"""What the engine holds while it trains, by its own accounting, and that it gives everything back."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import StorageError, memory_meter
from megatron_fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    ParameterGroup,
    fully_shard_optimizer,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.models import WIDTH, Block, CheckpointedStack, ShuffledStack, Stack, inputs
from tests.harness.oracle import shard_each
from tests.harness.storage_guard import guard_released_storage
from tests.harness.twins import sharded

HIDDEN_SIZES = (97, 13, 131, 101, 127, 111)


def sharded_stack(policy: MixedPrecisionPolicy | None = None, kind: type[Stack] = Stack) -> Stack:
    model = kind(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES))
    return sharded(model, mp_policy=policy)


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    return [group for module in model.modules() if isinstance(module, FsdpModule) for group in module.parameter_groups]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(dist.get_rank(), step).requires_grad_()).float().square().mean()


@dataclass(frozen=True)
class StepMemory:
    """One training step, in bytes above what the model holds at rest, and in units of B, the largest unit's weights."""

    forward: float
    backward: float
    rest_bytes: int
    num_allocations: int


@dataclass(frozen=True)
class Setting:
    policy: MixedPrecisionPolicy | None = None
    microbatches: int = 1
    stack: type[Stack] = Stack


SETTINGS = {
    "fp32": Setting(),
    "two microbatches": Setting(microbatches=2),
    "bf16, reduced in bf16": Setting(MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)),
    "bf16, reduced in fp32": Setting(MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "activation checkpointing": Setting(stack=CheckpointedStack),
    "another order of layers each time": Setting(stack=ShuffledStack),
}


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks(2)
def test_a_step_holds_two_gathered_units_and_a_packed_gradient_at_most_and_allocates_no_more_each_time(
    name: str,
) -> None:
    packed = 2.0 if name == "bf16, reduced in fp32" else 1.0
    setting = SETTINGS[name]
    model = sharded_stack(setting.policy, setting.stack)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    largest = max(group.gathered.nbytes for group in groups_of(model))
    meter, steps = memory_meter(), []
    for step in range(6):
        forward = backward = 0.0
        num_allocations = 0
        for microbatch in range(setting.microbatches):
            rest = meter.current_bytes
            meter.reset_peak()
            loss = loss_of(model, 2 * step + microbatch)
            forward = max(forward, (meter.peak_bytes - rest) / largest)
            loss.backward()
            backward = max(backward, (meter.peak_bytes - rest) / largest)
            num_allocations += meter.num_allocations
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        steps.append(StepMemory(forward, backward, meter.current_bytes, num_allocations))
    steps = steps[1:]
    assert 1.0 <= max(step.forward for step in steps) <= 2.0
    assert 2.0 <= max(step.backward for step in steps) <= 2.0 + packed
    assert len({step.rest_bytes for step in steps}) == 1
    # Each gathered buffer twice, but the last one's once; each packed buffer once.
    wanted = (3 * len(HIDDEN_SIZES) - 1) * SETTINGS[name].microbatches
    assert [step.num_allocations for step in steps] == [wanted] * 5


@dataclass(frozen=True)
class Phases:
    """Bytes of this rank's engine, over those of its shards in FP32: made, after backward, after step and zero_grad."""

    made: float
    trained: float
    stepped: float
    zeroed: float


def bytes_in_each_phase(policy: MixedPrecisionPolicy | None, is_kept: object) -> Phases:
    """Return what a model holds beside optimizer state; with ``is_kept`` while somebody has one of its gradients."""
    meter = memory_meter()
    before = meter.current_bytes
    model = sharded_stack(policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    shards = 4 * sum(group.main_weight.layout.numel for group in groups_of(model))
    made = meter.current_bytes - before
    for step in range(3):
        loss_of(model, step).backward()
        trained = meter.current_bytes - before
        optimizer.step()
        stepped = meter.current_bytes - before
        kept = [next(model.parameters()).grad] if is_kept else []
        optimizer.zero_grad()
        zeroed = meter.current_bytes - before
        kept.clear()
    return Phases(made / shards, trained / shards, stepped / shards, zeroed / shards)


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_a_rank_holds_main_weights_at_rest_and_gradients_from_backward_to_zero_grad(
    policy: MixedPrecisionPolicy | None,
) -> None:
    for phases in run_ranks(3, bytes_in_each_phase, policy, False):
        assert phases == Phases(1.0, 2.0, 2.0, 1.0)


def test_memory_of_a_gradient_that_somebody_has_stays() -> None:
    for phases in run_ranks(2, bytes_in_each_phase, None, True):
        assert (phases.stepped, 1.0 < phases.zeroed < 2.0) == (2.0, True)


def _rows(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_gradients_that_are_kept_have_their_values_after_the_next_backward(strategy: str) -> None:
    model = sharded(Stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES)), strategy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    found = []
    before: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        found.append(all(torch.equal(_rows(one), other) for one, other in zip(kept, before, strict=True)))
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        kept = [gradient if step % 2 else _rows(gradient).view(-1) for gradient in gradients if gradient is not None]
        del gradients
        before = [_rows(gradient).clone() for gradient in kept]
        optimizer.step()
    found.append(any(float(values.abs().sum()) for values in before))
    assert found == [True] * 6


@on_ranks(2)
def test_gradients_are_saved_without_the_buffer_and_parameters_load_safely() -> None:
    model = sharded_stack()
    loss_of(model, 0).backward()
    parameter = min(model.parameters(), key=torch.Tensor.numel)
    group = max(groups_of(model), key=lambda group: group.main_weight.nbytes)
    gradient = parameter.grad
    assert gradient is not None
    sizes, alike = [], []
    for tensor in (gradient, parameter):
        file = io.BytesIO()
        torch.save(tensor, file)
        sizes.append(file.tell())
        file.seek(0)
        alike.append(torch.equal(torch.load(file, weights_only=True).to_local(), tensor.to_local()))
    copied = copy.deepcopy(parameter)
    copied.grad = None
    assert parameter.grad is gradient
    assert (sizes[0] < group.main_weight.nbytes, *alike) == (True, True, True)


@on_ranks(2)
def test_released_weights_raise_whatever_they_are_reached_through() -> None:
    model = Stack(Block(), Block())
    shard_each(model)
    block = model.layers[0]
    block.unshard()
    captured = block.up.weight
    part = captured[1:, :2]
    group = block.parameter_groups[0]
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


@on_ranks(2)
def test_a_weight_kept_from_one_unshard_is_the_same_object_with_the_same_values_after_the_next() -> None:
    model = Stack(Block(), Block())
    shard_each(model)
    block = model.layers[0]
    block.unshard()
    captured = block.up.weight
    values = captured.detach().clone()
    block.reshard()
    block.unshard()
    with guard_released_storage():
        assert (captured == values).all()
    assert block.up.weight is captured
