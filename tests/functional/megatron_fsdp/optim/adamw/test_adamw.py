"""The flat AdamW takes the steps of ``torch.optim.AdamW``, on any strategy, and shows the same state."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor

from megatron_fsdp import (
    ConfigError,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
)
from megatron_fsdp.optim.adamw.adamw import AdamW
from tests.functional.adamw_comparison import differing_state, groups_of, torch_adamw, two_groups
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import (
    WIDTH,
    Made,
    Model,
    draw_tokens,
    inputs,
    loss_of,
)
from tests.harness.oracle import differing, sharded_model, train, whole, whole_state

BF16, FP32 = torch.bfloat16, torch.float32
State: TypeAlias = dict[str, Any]
Make: TypeAlias = Callable[..., torch.optim.Optimizer]

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16 compute": MixedPrecisionPolicy(BF16, FP32),
    "bf16 gradients": MixedPrecisionPolicy(BF16, main_grads_dtype=BF16),
}
LAYOUTS = [
    ("optim_grads_params", (1,)), ("optim_grads_params", (3,)), ("optim_grads", (2,)), ("optim", (3,)),
    ("no_shard", (2,)), ("hsdp", (2, 2)), ("hfsdp", (2, 2)),
]  # fmt: skip


def run_with(make: Make, strategy: str, mesh: tuple[int, ...], policy: str) -> tuple[Model, torch.optim.Optimizer]:
    """Train with two param groups and a schedule that changes both rates in every step."""
    model = sharded_model(strategy, mesh=mesh, mp_policy=POLICIES[policy])
    optimizer = make(two_groups(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(4):
        train(model, optimizer, range(step, step + 1), [dist.get_rank()])
        schedule.step()
    return model, optimizer


@pytest.mark.parametrize(("strategy", "mesh"), nightly_but([LAYOUTS[1], LAYOUTS[4]], LAYOUTS), ids=str)
@on_ranks(lambda mesh: torch.Size(mesh).numel())
def test_weights_and_state_equal_those_of_torch_to_the_bit_in_every_precision(
    strategy: str, mesh: tuple[int, ...]
) -> None:
    wrong = {}
    for policy in POLICIES:
        model, optimizer = run_with(AdamW, strategy, mesh, policy)
        other, oracle = run_with(torch_adamw, strategy, mesh, policy)
        wrong[policy] = differing(whole_state(model), whole_state(other)) + differing_state(optimizer, oracle)
    assert wrong == {name: [] for name in POLICIES}


@pytest.mark.parametrize("weights", [FP32, BF16], ids=str)
@pytest.mark.parametrize("moments", [FP32, BF16], ids=str)
@on_ranks(2)
def test_16_bit_weights_and_moments_are_rounded_once_a_step(weights: torch.dtype, moments: torch.dtype) -> None:
    torch.manual_seed(0)
    model: Any = Made(lambda m, x: m.weight * x, weight=nn.Parameter(torch.randn(5, WIDTH).to(weights)))
    weight = model.weight.detach().double()
    exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.1, moments_dtype=moments)
    for step in range(1, 4):
        x = [inputs(rank, step, 5, WIDTH).to(weights) for rank in range(dist.get_world_size())]
        model(x[dist.get_rank()]).sum().backward()
        gradient = whole(model.weight.grad, model.weight).double()
        optimizer.step()
        optimizer.zero_grad()
        exp_avg = 0.9 * exp_avg + 0.1 * gradient
        exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * gradient.square()
        size = exp_avg / (1 - 0.9**step) / ((exp_avg_sq / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = (weight * (1 - 0.05 * 0.1) - 0.05 * size).to(weights).double()
        exp_avg, exp_avg_sq = exp_avg.to(moments).double(), exp_avg_sq.to(moments).double()
    state = optimizer.state[model.weight]
    pairs = [(model.weight, weight), (state["exp_avg"], exp_avg), (state["exp_avg_sq"], exp_avg_sq)]
    results = [
        (found.dtype, float(((whole(found, found) - wanted) / wanted.abs().clamp(min=1e-3)).abs().max()))
        for found, wanted in pairs
    ]
    assert [dtype for dtype, _ in results] == [weights, moments, moments]
    for dtype, error in results:
        # A value close to a tie may round either way, because the oracle does not compute in fp32.
        assert error <= (2**-7 if BF16 in (dtype, weights, moments) else 1e-5)


@pytest.mark.parametrize("strategy", ["optim_grads", "optim", "no_shard"])
@on_ranks(2)
def test_sharded_compute_weights_are_current_right_after_a_step(strategy: str) -> None:
    model = sharded_model(strategy, mp_policy=POLICIES["bf16 compute"])
    before = whole_state(model)
    train(model, AdamW(two_groups(model), lr=0.1), range(1), [dist.get_rank()])
    assert len(differing(whole_state(model), before, 0.01)) > 10
    is_stale = [
        not torch.equal(
            group.model_weight.slice_view(group.main_weight.placements).local_buffer,
            group.main_weight.local_buffer.bfloat16(),
        )
        for group in groups_of(model)
        if group.requires_grad
    ]
    assert is_stale == [False] * len(is_stale)
    assert len(is_stale) == 3


@on_ranks(2)
def test_the_norm_is_that_of_the_optimizers_own_parameters() -> None:
    model = sharded_model()
    tokens = draw_tokens(dist.get_rank())
    loss_of(model(tokens), tokens).backward()
    optimizer = AdamW([p for p in model.parameters() if p.ndim > 1], lr=0.1, max_norm=float("inf"))
    optimizer.step()
    assert optimizer.grad_norm is not None
    wanted = sum(float(whole(p.grad, p).square().sum()) for p in model.parameters() if p.ndim > 1) ** 0.5
    found = optimizer.grad_norm.item()
    assert found == pytest.approx(wanted, rel=1e-6)


def drop_some_gradients(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        if (index + step) % 3 == 0:
            parameter.grad = None


@torch.no_grad()
def replace_some_gradients(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and (index + step) % 2:
            parameter.grad = torch.zeros_like(parameter).add_(0.1 * index)


@torch.no_grad()
def assign_gradients_without_a_backward(model: nn.Module, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        wanted = parameter.requires_grad and index != step
        parameter.grad = torch.zeros_like(parameter).add_(0.1 * index) if wanted else None


def freeze_and_unfreeze(model: nn.Module, step: int) -> None:
    model.head.weight.requires_grad_(step % 2 == 0)
    model.head.weight.grad = model.head.weight.grad if step % 2 == 0 else None


def change_hyperparameters(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.05 * step
    optimizer.param_groups[1] |= {"betas": (0.5, 0.9 - 0.1 * step), "eps": 10.0**-step}


def add_a_group(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        late = optimizer.param_groups[0]["params"].pop(0)
        optimizer.add_param_group({"params": [late], "lr": 0.03, "maximize": True})


def replace_some_state(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        first, second = optimizer.param_groups[0]["params"][:2]
        values = optimizer.state[first]
        values |= {"exp_avg": torch.zeros_like(values["exp_avg"]).add_(1.0), "step": torch.tensor(7.0)}
        moments = {name: torch.zeros_like(second).add_(0.5) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[second] = {"step": torch.tensor(3.0)} | moments


def exchange(what: str, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Exchange the state of the experts of two blocks, which have the same places in their units."""
    if step != 2:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    one, other = (index for index, parameter in enumerate(parameters) if parameter.ndim == 3)
    state: Any = optimizer.state
    keys: Any = parameters[one], parameters[other]
    document = optimizer.state_dict()
    if what == "first moments":
        first, second = (state[key] for key in keys)
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
        return
    state, keys = (state, keys) if what == "records" else (document["state"], (one, other))
    state[keys[0]], state[keys[1]] = state[keys[1]], state[keys[0]]
    if what == "entries of a state dict":
        optimizer.load_state_dict(document)


GRADIENT_CHANGES: dict[str, Callable[[nn.Module, int], None]] = {
    "lose some gradients": drop_some_gradients,
    "get other gradients": replace_some_gradients,
    "have gradients without a backward": assign_gradients_without_a_backward,
    "are frozen and unfrozen": freeze_and_unfreeze,
}
OPTIMIZER_CHANGES: dict[str, Callable[[torch.optim.Optimizer, int], object]] = {
    "get other hyperparameters": change_hyperparameters,
    "move to a new param group": add_a_group,
    "lose their state": lambda optimizer, step: optimizer.state.pop(optimizer.param_groups[0]["params"][step], None),
    "get other state": replace_some_state,
    **{
        f"exchange {what}": functools.partial(exchange, what)
        for what in ("records", "first moments", "entries of a state dict")
    },
}


def step_through(name: str, make: Make) -> tuple[State, torch.optim.Optimizer]:
    model = sharded_model()
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


FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def torch_adamw_state(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.AdamW(parameters, foreach=False, **options))


MAKERS: dict[str, Make] = {"ours": AdamW, "torch's": torch_adamw_state}
WAYS = [("ours", "torch's"), ("torch's", "ours"), ("ours", "ours")]


def sharded(make: Make, seed: int = 0, strategy: str = "optim_grads_params") -> tuple[Model, torch.optim.Optimizer]:
    """Return a sharded model and an optimizer over its trainable parameters."""
    model = sharded_model(strategy, seed)
    return model, make([p for p in model.parameters() if p.requires_grad], lr=0.01)


def mine() -> list[int]:
    return [dist.get_rank()]


def moments_of(model: Model, optimizer: torch.optim.Optimizer) -> State:
    """Return the optimizer's state as whole tensors; every rank calls it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}: {key}": value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def give_state_dict(model: Model, optimizer: Any, other: Model, taker: Any) -> None:
    other.load_state_dict(model.state_dict())
    # PyTorch's load_state_dict keeps the given tensors, so both optimizers would write into them.
    document = optimizer.state_dict()
    taker.load_state_dict(document if isinstance(taker, AdamW) else copy.deepcopy(document))


def give_full_state_of_rank_0(model: Model, optimizer: Any, other: Model, taker: Any) -> None:
    weights = get_model_state_dict(model, options=FULL_ON_RANK_0)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL_ON_RANK_0))
    set_model_state_dict(other, weights, options=FROM_RANK_0)
    set_optimizer_state_dict(other, taker, state, options=FROM_RANK_0)


def give_what_torch_cut(model: Model, optimizer: Any, other: Model, taker: Any) -> None:
    other.load_state_dict(model.state_dict())
    # A state dict holds the optimizer's own dictionaries.
    document = copy.deepcopy(optimizer.state_dict())
    for values in document["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            value = values[key]
            values[key] = distribute_tensor(value.full_tensor(), value.device_mesh, [*value.placements])
    taker.load_state_dict(document)


GIVERS = {"state dict": give_state_dict, "full, rank 0": give_full_state_of_rank_0, "cut": give_what_torch_cut}
QUICK = [
    ("ours", "ours", "hfsdp", 4, "state dict"),
    ("torch's", "ours", "optim_grads_params", 3, "state dict"),
    ("ours", "torch's", "optim", 2, "state dict"),
    ("ours", "torch's", "optim_grads_params", 3, "full, rank 0"),
    ("torch's", "ours", "optim_grads_params", 3, "full, rank 0"),
    ("ours", "ours", "optim_grads_params", 3, "cut"),
]
LAYOUTS_STATE = [("optim_grads_params", 3), ("optim", 2), ("hfsdp", 4)]
RESUMED = [(*way, *layout, "state dict") for way in WAYS for layout in LAYOUTS_STATE] + QUICK[3:]


@pytest.mark.parametrize(("saver", "loader", "strategy", "num_ranks", "by"), nightly_but(QUICK, RESUMED))
@on_ranks(lambda num_ranks: num_ranks)
def test_state_resumes_bit_for_bit(saver: str, loader: str, strategy: str, num_ranks: int, by: str) -> None:
    model, optimizer = sharded(MAKERS[saver], 0, strategy)
    train(model, optimizer, range(2), mine())
    other, other_optimizer = sharded(MAKERS[loader], 5, strategy)
    if by == "state dict":
        # The loading optimizer already has state.
        train(other, other_optimizer, range(3), mine())
    GIVERS[by](model, optimizer, other, other_optimizer)
    right_after = differing(moments_of(other, other_optimizer), moments_of(model, optimizer))
    train(model, optimizer, range(2, 4), mine())
    train(other, other_optimizer, range(2, 4), mine())
    assert right_after == []
    assert differing(whole_state(other), whole_state(model)) == []


@on_ranks(2)
def test_the_state_of_other_optimizers_is_refused_before_anything_changes() -> None:
    for other, words in (
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "['momentum_buffer']; wanted ['step', 'exp_avg', 'exp_avg_sq']",
        ),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), "amsgrad=True"),
    ):
        model, optimizer = sharded(AdamW)
        train(model, optimizer, range(1), mine())
        before = moments_of(model, optimizer)
        donor, donor_optimizer = sharded(lambda p, lr, other=other: other(p))
        train(donor, donor_optimizer, range(1), mine())
        with pytest.raises(ConfigError, match=re.escape(words)):
            optimizer.load_state_dict(donor_optimizer.state_dict())
        assert differing(moments_of(model, optimizer), before) == []
        train(model, optimizer, range(1), mine())
