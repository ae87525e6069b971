"""Whatever happens to parameters, gradients and state between steps, the flat AdamW goes on as torch's does."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.optim.adamw import AdamW
from tests.functional.adamw_comparison import differing_state, torch_adamw, two_groups
from tests.harness import on_ranks
from tests.harness.models import draw_tokens, loss_of, make_model, world_mesh
from tests.harness.oracle import differing, shard_model, whole, whole_state

State: TypeAlias = dict[str, Any]
Make: TypeAlias = Callable[..., torch.optim.Optimizer]


def drop_some_gradients(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        if (index + step) % 3 == 0:
            parameter.grad = None


def replace_some_gradients(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.grad is not None and (index + step) % 2:
                parameter.grad = torch.zeros_like(parameter).add_(0.1 * index)


def assign_gradients_without_a_backward(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            wanted = parameter.requires_grad and index != step
            parameter.grad = torch.zeros_like(parameter).add_(0.1 * index) if wanted else None


def freeze_and_unfreeze(model: nn.Module, step: int) -> None:
    model.head.weight.requires_grad_(step % 2 == 0)
    model.head.weight.grad = model.head.weight.grad if step % 2 == 0 else None


def change_hyperparameters(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.05 * step
    optimizer.param_groups[1]["betas"] = (0.5, 0.9 - 0.1 * step)
    optimizer.param_groups[1]["eps"] = 10.0**-step


def add_a_group(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        late = optimizer.param_groups[0]["params"].pop(0)
        optimizer.add_param_group({"params": [late], "lr": 0.03, "maximize": True})


def forget_some_state(optimizer: torch.optim.Optimizer, step: int) -> None:
    first = optimizer.param_groups[0]["params"][step]
    optimizer.state.pop(first, None)


def replace_some_state(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        first, second = optimizer.param_groups[0]["params"][:2]
        values = optimizer.state[first]
        values["exp_avg"] = torch.zeros_like(values["exp_avg"]).add_(1.0)
        values["step"] = torch.tensor(7.0)
        moments = {name: torch.zeros_like(second).add_(0.5) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[second] = {"step": torch.tensor(3.0)} | moments


GRADIENT_CHANGES: dict[str, Callable[[nn.Module, int], None]] = {
    "lose some gradients": drop_some_gradients,
    "get other gradients": replace_some_gradients,
    "have gradients without a backward": assign_gradients_without_a_backward,
    "are frozen and unfrozen": freeze_and_unfreeze,
}
OPTIMIZER_CHANGES: dict[str, Callable[[torch.optim.Optimizer, int], None]] = {
    "get other hyperparameters": change_hyperparameters,
    "move to a new param group": add_a_group,
    "lose their state": forget_some_state,
    "get other state": replace_some_state,
}


def step_through(name: str, make: Make) -> tuple[State, torch.optim.Optimizer]:
    model = shard_model(make_model(), world_mesh())
    optimizer = make(two_groups(model), lr=0.01)
    for step in range(4):
        tokens = draw_tokens(dist.get_rank(), step)
        loss_of(model(tokens), tokens).backward()
        if name in GRADIENT_CHANGES:
            GRADIENT_CHANGES[name](model, step)
        else:
            OPTIMIZER_CHANGES[name](optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model), optimizer


@pytest.mark.parametrize("name", GRADIENT_CHANGES | OPTIMIZER_CHANGES)
@on_ranks(2)
def test_steps_equal_those_of_torch_to_the_bit_when_parameters(name: str) -> None:
    (weights, optimizer), (wanted, oracle) = step_through(name, AdamW), step_through(name, torch_adamw)
    assert differing(weights, wanted) + differing_state(optimizer, oracle) == []


@on_ranks(2)
def test_step_counters_beside_the_weights_give_the_same_steps() -> None:
    results = []
    for is_capturable in (True, False):
        model = shard_model(make_model(), world_mesh())
        optimizer = AdamW(two_groups(model), lr=0.01, capturable=is_capturable)
        for step in range(4):
            tokens = draw_tokens(dist.get_rank(), step)
            loss_of(model(tokens), tokens).backward()
            drop_some_gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole_state(model) | {
            f"{key} {name}": whole(value, value)
            for key, values in optimizer.state_dict()["state"].items() for name, value in values.items()
        })  # fmt: skip
    assert differing(results[0], results[1], 1e-6) == []
