"""A deleted model frees all its memory, and a model can be used after an exception."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from dbuffer import memory_meter
from megatron_fsdp import FsdpModule, StateError, fully_shard_optimizer, register_fsdp_forward_method
from tests.harness import on_ranks
from tests.harness.models import Block, RaisesInBackward, Stack, loss_of_rank
from tests.harness.oracle import sharded


class Failing(Block):
    mode = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "forward":
            raise ArithmeticError("on purpose, in forward")
        x = super().forward(x)
        if self.mode == "backward":
            x = RaisesInBackward.apply(x)
        return x


def failing_stack() -> Stack:
    return Stack(Block(), Block(), Failing(), Block(), Block())


@contextlib.contextmanager
def failing(model: nn.Module, mode: str) -> Iterator[None]:
    failing = [module for module in model.modules() if isinstance(module, Failing)]
    for module in failing:
        module.mode = mode
    yield
    for module in failing:
        module.mode = ""


def run_to_failure(model: nn.Module, mode: str, step: int = 0) -> None:
    with failing(model, mode), pytest.raises(ArithmeticError, match="on purpose"):
        loss_of_rank(model, step).backward()


def train_a_step(model: nn.Module, step: int = 0) -> None:
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    loss_of_rank(model, step).backward()
    optimizer.step()


def gather_a_unit(model: nn.Module) -> None:
    next(module for module in model.modules() if isinstance(module, FsdpModule) and module.parameter_groups).unshard()


# The life of a model before it is deleted; the returned value lives on.
LIVES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "a forward": lambda model: loss_of_rank(model, 0).item(),
    "a forward without gradients": lambda model: torch.no_grad()(loss_of_rank)(model, 0).item(),
    "a training step": train_a_step,
    "an exception in forward": lambda model: run_to_failure(model, "forward"),
    "an exception in backward": lambda model: run_to_failure(model, "backward"),
    "an unshard": gather_a_unit,
    "a backward whose loss is kept": lambda model: ((loss := loss_of_rank(model, 0)).backward(), loss),
}


@pytest.mark.parametrize("life", LIVES)
@on_ranks(2)
def test_deleting_a_model_frees_its_buffers_without_the_garbage_collector_after(life: str) -> None:
    gc.collect()
    gc.disable()
    try:
        before = memory_meter().current_bytes
        model = sharded(failing_stack())
        assert memory_meter().current_bytes > before
        kept = LIVES[life](model)
        del model
        assert memory_meter().current_bytes == before
        del kept
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["forward", "backward"])
@on_ranks(2)
def test_a_step_after_an_exception_leaves_nothing_allocated_from_an_exception_in(mode: str) -> None:
    model = sharded(failing_stack())
    held = [memory_meter().current_bytes]
    for step in range(3):
        run_to_failure(model, mode, step)
        model.zero_grad()
        loss_of_rank(model, step).backward()
        model.zero_grad()
        held.append(memory_meter().current_bytes)
    assert held == [held[0]] * 4


class Encoding(Stack):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return Stack.forward(self, x)


@on_ranks(2)
def test_a_forward_method_that_could_not_begin_leaves_no_call_open() -> None:
    model = sharded(Encoding(Block(), nn.Linear(7, 7)), units=lambda model: model.layers[:1])
    register_fsdp_forward_method(model, "encode")
    weight = model.layers[1].weight
    model.layers[1]._parameters["weight"] = nn.Parameter(torch.ones(7, 7))
    with pytest.raises(StateError, match="was replaced"):
        model.encode(torch.ones(2, 7))
    model.layers[1]._parameters["weight"] = weight
    held = memory_meter().current_bytes
    with torch.no_grad():
        model.layers[0](torch.ones(2, 7))
    assert memory_meter().current_bytes == held
    model.set_forward_order()
