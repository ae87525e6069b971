"""Flat parameters and FlatOptimizer take the steps of element-wise optimizers over the sharded parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from megatron_fsdp import (
    AdamW,
    CheckpointError,
    ConfigError,
    FlatOptimizer,
    MixedPrecisionPolicy,
    StateError,
    clip_grad_norm_,
    flat_parameters,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp.optim.flat_parameters import FlatParameter
from tests.functional.adamw_comparison import differing_state, two_groups
from tests.functional.checkpoint_cases import message_of
from tests.functional.split_weights import SPLIT
from tests.functional.test_adamw import POLICIES
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, inputs, make_mesh, make_model
from tests.harness.oracle import differing, shard_model, train, whole_state


class Lion(Optimizer):
    """Moves every element by the sign of a moving average (Chen et al., 2023); somebody's own optimizer."""

    def __init__(
        self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    update = (average * beta1 + parameter.grad * (1 - beta1)).sign()
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                    average.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)


KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "Lion": (Lion, {}),
}


def groups_for(kind: str, model: Model) -> list[dict[str, Any]]:
    """Split parameters as users do, with what every kind understands."""
    return [{key: value for key, value in group.items() if key != "betas"} for group in two_groups(model)]


def flat(kind: str, model: Model) -> Optimizer:
    return FlatOptimizer(KINDS[kind][0], groups_for(kind, model), lr=0.01, **KINDS[kind][1])


def stock(kind: str, model: Model) -> Optimizer:
    return fully_shard_optimizer(KINDS[kind][0](groups_for(kind, model), lr=0.01, **KINDS[kind][1]))  # type: ignore[call-arg]


def trained(make: Callable[[str, Model], Optimizer], kind: str, strategy: str, mesh: Any) -> tuple[Model, Optimizer]:
    model = shard_model(make_model(), make_mesh(mesh), strategy)
    optimizer = make(kind, model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(3):
        train(model, optimizer, range(step, step + 1), [dist.get_rank()])
        schedule.step()
    return model, optimizer


def compare(kind: str, strategy: str, mesh: tuple[int, ...]) -> list[str]:
    """Train with both; then let each go on with the other's state."""
    (mine, optimizer), (theirs, oracle) = (trained(make, kind, strategy, mesh) for make in (flat, stock))
    wrong = differing(whole_state(mine), whole_state(theirs)) + differing_state(optimizer, oracle)
    states = optimizer.state_dict(), oracle.state_dict()
    again = flat(kind, mine), stock(kind, theirs)
    for other, state in zip(again, reversed(states), strict=True):
        other.load_state_dict(state)
    wrong += differing_state(*again)
    for model, other in zip((mine, theirs), again, strict=True):
        train(model, other, range(3, 5), [dist.get_rank()])
    return wrong + differing(whole_state(mine), whole_state(theirs)) + differing_state(*again)


@pytest.mark.parametrize("kind", nightly_but(["Adam", "Lion"], KINDS))
def test_weights_state_and_state_dicts_equal_those_over_the_sharded_parameters_to_the_bit(kind: str) -> None:
    assert run_ranks(3, compare, kind, "optim_grads_params", (3,)) == [[]] * 3


LAYOUTS = [("optim_grads", (2,)), ("optim", (3,)), ("no_shard", (2,)), ("hsdp", (2, 2)), ("hfsdp", (2, 2))]


@pytest.mark.parametrize(("strategy", "mesh"), nightly_but([("optim", (3,)), ("hsdp", (2, 2))], LAYOUTS))
def test_every_strategy_takes_the_same_steps(strategy: str, mesh: tuple[int, ...]) -> None:
    num_ranks = torch.Size(mesh).numel()
    assert run_ranks(num_ranks, compare, "SGD", strategy, mesh) == [[]] * num_ranks


def narrow_gradients() -> tuple[list[str], str]:
    """Train with bf16 gradients, which torch.optim sees in fp32; they cannot be the .grad of flat parameters."""
    found = []
    for make in (flat, stock):
        model = shard_model(make_model(), make_mesh((2,)), policy=POLICIES["bf16 gradients"])
        train(model, make("SGD", model), range(3), [dist.get_rank()])
        found.append(whole_state(model))
    return differing(found[0], found[1]), message_of(ConfigError, lambda: flat_parameters(model))


def test_gradients_of_another_dtype_are_cast_for_a_step() -> None:
    for wrong, message in run_ranks(2, narrow_gradients):
        assert wrong == []
        assert "gradients rest in torch.bfloat16, main weights in torch.float32" in message


# ---------------------------------------------------------------------- flat parameters by themselves


def bare(strategy: str) -> tuple[list[str], int, int]:
    """Step flat parameters by torch's SGD with clipping, zero_grad from either side, and microbatches."""
    found, counts = [], []
    for is_flat in (True, False):
        model = shard_model(
            make_model(), make_mesh((3,)), strategy, MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        )
        groups: Any = groups_for("SGD", model)
        if is_flat:
            groups = [{**group, "params": flat_parameters(group["params"])} for group in groups]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        counts.append(sum(len(group["params"]) for group in groups))
        for step in range(4):
            tokens = inputs(dist.get_rank(), step, 3, 5).abs().mul(7).long().clamp(max=22)
            for _ in range(2):
                model(tokens).square().mean().backward()
            clip_grad_norm_(model, 0.3)
            optimizer.step()
            (model if step % 2 else optimizer).zero_grad(set_to_none=step < 2)
        found.append(whole_state(model))
    return differing(found[0], found[1]), counts[0], counts[1]


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_an_optimizer_over_flat_parameters_takes_the_same_steps_and_is_noticed(strategy: str) -> None:
    for wrong, num_flat, num_sharded in run_ranks(3, bare, strategy):
        assert wrong == []
        assert num_flat < num_sharded


def gradients_seen() -> tuple[list[bool], int]:
    model = shard_model(make_model(), make_mesh((2,)))
    parameters = [p for p in flat_parameters(model) if isinstance(p, FlatParameter)]
    seen = [all(parameter.grad is None for parameter in parameters)]
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), range(1), [dist.get_rank()])
    model(torch.zeros(1, 5, dtype=torch.long)).square().mean().backward()
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.fill_(3)
    seen.append(all(bool((p.grad == 3).all()) for p in model.parameters() if p.grad is not None))
    model.head.weight.grad = torch.full_like(model.head.weight, 5.0)
    owner = next(p for p in parameters if any(m.parameter is model.head.weight for m in p.members))
    member = next(m for m in owner.members if m.parameter is model.head.weight)
    assert owner.grad is not None
    seen.append(bool((owner.grad[member.start : member.stop] == 5).all()))
    owner.grad = None
    seen.append(model.head.weight.grad is None)
    model.zero_grad()
    seen.append(all(parameter.grad is None for parameter in parameters))
    return seen, member.stop - member.start


def test_a_gradient_is_one_memory_seen_from_both_sides() -> None:
    found = run_ranks(2, gradients_seen)
    assert [seen for seen, _ in found] == [[True] * 5] * 2
    assert sum(numel for _, numel in found) == make_model().head.weight.numel()


def with_a_gap(kind: str) -> str:
    model = shard_model(make_model(), make_mesh((2,)))
    optimizer = FlatOptimizer(torch.optim.SGD, model, lr=0.1)
    before = whole_state(model)
    model(torch.zeros(1, 5, dtype=torch.long)).square().mean().backward()
    if kind == "none":
        model.norm.weight.grad = None
    else:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is not model.norm.weight)
        model.zero_grad()
        model(torch.zeros(1, 5, dtype=torch.long)).square().mean().backward()
    message = message_of(StateError, optimizer.step)
    assert differing(whole_state(model), before) == []
    return message


@pytest.mark.parametrize("kind", ["none", "frozen"])
def test_a_parameter_without_gradient_beside_others_is_named_and_nothing_is_stepped(kind: str) -> None:
    for message in run_ranks(2, with_a_gap, kind):
        assert "parameter 'norm.weight' has no gradient" in message


def split_weights_refused() -> list[str]:
    model = shard_model(make_model(), make_mesh((2,)), policy=SPLIT)
    makers: tuple[Callable[[], object], ...] = (
        lambda: flat_parameters(model),
        lambda: FlatOptimizer(torch.optim.SGD, model, lr=0.1),
    )
    return [message_of(ConfigError, make) for make in makers]


def test_split_weights_are_refused() -> None:
    for messages in run_ranks(2, split_weights_refused):
        assert all("use megatron_fsdp.AdamW" in message for message in messages)


class Whole(torch.optim.SGD):
    """Keeps something of another shape than the parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = torch.zeros(parameter.numel() + 1)


def of_other_shape() -> str:
    model = shard_model(make_model(), make_mesh((2,)))
    optimizer = FlatOptimizer(Whole, model, lr=0.1)
    model(torch.zeros(1, 5, dtype=torch.long)).square().mean().backward()
    return message_of(ConfigError, optimizer.step)


def test_state_of_another_shape_than_the_parameters_is_refused() -> None:
    assert all("does not treat every element alike" in message for message in run_ranks(2, of_other_shape))


# ---------------------------------------------------------------------- state dicts and checkpoints


def counters_apart() -> str:
    """Load state in which neighbours have taken different numbers of steps."""
    model = shard_model(make_model(), make_mesh((2,)))
    optimizer = FlatOptimizer(torch.optim.Adam, model, lr=0.1)
    train(model, optimizer, range(2), [dist.get_rank()])
    state = optimizer.state_dict()
    state["state"][1]["step"] = torch.tensor(9.0)
    return message_of(ConfigError, lambda: optimizer.load_state_dict(state))


def test_state_that_neighbours_cannot_share_is_refused() -> None:
    assert all("step = " in message for message in run_ranks(2, counters_apart))


def through_pytorch() -> list[str]:
    model, optimizer = trained(flat, "NAdam", "optim_grads_params", (3,))
    state = get_optimizer_state_dict(model, optimizer)
    fresh = flat("NAdam", model)
    set_optimizer_state_dict(model, fresh, state)
    return differing_state(fresh, optimizer)


def test_pytorchs_state_dict_functions_read_and_write_it() -> None:
    assert run_ranks(3, through_pytorch) == [[]] * 3


def save(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = trained(flat, "SGD", "optim_grads_params", (3,))
    save_checkpoint(model, optimizer, path)
    return whole_state(model), momenta(model, optimizer)


def load(path: str, make: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = shard_model(make_model(1), make_mesh((2,)))
    optimizer = {"flat": flat, "stock": stock}[make]("SGD", model)
    load_checkpoint(model, optimizer, path)
    return whole_state(model), momenta(model, optimizer)


def load_other(path: str) -> str:
    model = shard_model(make_model(1), make_mesh((2,)))
    return message_of(CheckpointError, lambda: load_checkpoint(model, flat("Adagrad", model), path))


def momenta(model: Model, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: values["momentum_buffer"].full_tensor() for p, values in optimizer.state.items()}


def test_a_checkpoint_loads_on_another_number_of_ranks_flat_or_not_but_not_into_another_kind(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    weights, buffers = run_ranks(3, save, path)[0]
    for make in ("flat", "stock"):
        for found, found_buffers in run_ranks(2, load, path, make):
            assert differing(found, weights) == []
            assert differing(found_buffers, buffers) == []
    assert all("of SGD, which Adagrad has not" in message for message in run_ranks(2, load_other, path))


def test_the_flat_adamw_is_no_kind_to_flatten_again() -> None:
    model = make_model()
    assert FlatOptimizer(AdamW, model, lr=0.1).kind_name == "AdamW"
