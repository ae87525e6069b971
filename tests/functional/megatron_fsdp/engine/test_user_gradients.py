"""Gradients that the user makes, requests or clips equal those of a plain model on the data of all ranks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from dbuffer import Flat, PlacementError
from megatron_fsdp import (
    AdamW,
    ConfigError,
    MixedPrecisionPolicy,
    NonfiniteGradientError,
    Placements,
    StateError,
    check_gradients,
    clip_grad_norm_,
    fully_shard,
)
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Block, Headed, Made, Stack, inputs, squared
from tests.harness.oracle import whole
from tests.harness.twins import Loss, Twins

RANKS = {"no_shard": 2, "optim": 2, "optim_grads": 2, "optim_grads_params": 3, "hsdp": 4, "hfsdp": 4}
EACH = pytest.mark.parametrize("strategy", nightly_but(["optim", "optim_grads_params", "hsdp"], RANKS))


def num_ranks(strategy: str) -> int:
    return RANKS[strategy]


def build() -> nn.Module:
    """Return a model with a parameter that no forward uses."""
    model = Stack(Block(), Block(hidden=1))
    model.unused = nn.Parameter(torch.randn(3, 2))
    return model


def mine(model: nn.Module, step: int = 0) -> torch.Tensor:
    return squared(model, dist.get_rank(), step)


def mean_loss(model: nn.Module, loss: Loss = squared, step: int = 0) -> torch.Tensor:
    return torch.stack([loss(model, rank, step) for rank in range(dist.get_world_size())]).mean()


def give(model: nn.Module, value: float = 1.0) -> list[torch.Tensor]:
    given = []
    for parameter in model.parameters():
        rows = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape)
        parameter.grad = torch.ones_like(parameter).detach().mul_(value)
        local = parameter.grad
        if isinstance(local, DTensor):
            replicas = [Replicate()] * local.device_mesh.ndim
            local.mul_(DTensor.from_local(rows, local.device_mesh, replicas, run_check=False))
        else:
            local.mul_(rows)
        given.append(parameter.grad)
    return given


@EACH
@on_ranks(num_ranks)
def test_clipping_scales_assigned_gradients_in_place_and_adamw_clips_them_itself(strategy: str) -> None:
    twins = Twins(build, strategy)
    model, oracle = twins
    optimizer = AdamW(model.parameters(), lr=0.1, max_norm=0.5)
    reference = torch.optim.AdamW(oracle.parameters(), lr=0.1)
    for step in range(2):
        given = give(model)
        give(oracle)
        wanted = nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        assert float(clip_grad_norm_(model, 1.0)) == pytest.approx(float(wanted), rel=2e-6)
        assert twins.gradients_apart() < 2e-6
        for one, parameter in zip(given, oracle.parameters(), strict=True):
            assert (whole(one, parameter) - parameter.grad).abs().max() < 2e-6
        nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        optimizer.step()
        reference.step()
        assert twins.weights_apart() < 2e-6
        twins.zero_grad()
        mine(model, step).backward()
        model.zero_grad()


@on_ranks(3)
def test_nan_in_an_assigned_gradient_is_noticed_and_named_on_all_ranks() -> None:
    model = Twins(build).model
    weight = model.get_parameter("layers.0.norm.weight")
    weight.grad = torch.full_like(weight, math.nan).detach()
    norm = clip_grad_norm_(model, 1.0)
    may_step = check_gradients(model, norm, "skip")
    with pytest.raises(NonfiniteGradientError, match=r"NaN in the gradient of parameter 'layers.0.norm.weight'"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    weight.grad = None
    assert norm.isnan()
    assert not may_step
    assert clip_grad_norm_(model, 1.0, error_if_nonfinite=True).item() == 0.0


@on_ranks(3)
def test_norms_of_any_order_count_gradients_of_frozen_parameters_and_other_rows() -> None:
    twins = Twins(lambda: Stack(Block().requires_grad_(False), Block()))
    model, oracle = twins
    found = []
    for order in (1.0, 2.0, 3.0, math.inf):
        give(model)
        give(oracle)
        replicas = model.layers[1].up.weight.grad
        assert isinstance(replicas, DTensor)
        model.layers[1].up.weight.grad = replicas.redistribute(placements=[Replicate()])
        wanted = nn.utils.clip_grad_norm_(oracle.parameters(), 1.0, norm_type=order)
        found.append(float(clip_grad_norm_(model, 1.0, norm_type=order) / wanted) - 1)
        found.append(twins.gradients_apart())
    assert [value for value in found if abs(value) > 2e-6] == []


def _spoil(parameter: torch.Tensor) -> None:
    assert isinstance(parameter.grad, DTensor)
    local = parameter.grad.to_local()
    if local.numel():
        local[0] = math.nan


@on_ranks(2)
def test_every_clipper_leaves_gradients_of_a_norm_that_is_nan_as_they_are() -> None:
    found = []
    for name in ("clip_grad_norm_", "AdamW", "SGD"):
        model = Twins(build).model
        model.get_parameter("layers.0.up.bias").register_post_accumulate_grad_hook(_spoil)
        if name == "SGD":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = AdamW(model.parameters(), lr=0.1, max_norm=1.0 if name == "AdamW" else None)
        mine(model).backward()
        if name != "AdamW":
            assert clip_grad_norm_(model, 1.0).isnan()
        optimizer.step()
        found.append([name for name, p in model.named_parameters() if not whole(p, p).isfinite().all()])
    assert found == [["layers.0.up.bias"]] * 3


def penalty(model: nn.Module) -> torch.Tensor:
    total: Any = sum(p.square().sum() for p in model.parameters() if p.ndim == 2)
    return total


def _off(one: torch.Tensor | None, other: torch.Tensor) -> float:
    return float((whole(one, other) - other).abs().max())


def rooted() -> Twins:
    return Twins(lambda: Headed(Block(), outputs=3))


@on_ranks(2)
def test_gradients_of_parameters_that_autograd_is_asked_for_by_name_are_refused() -> None:
    twins = rooted()
    model = twins.model
    sharded = list(model.parameters())
    for ask in (
        lambda loss: torch.autograd.grad(loss, sharded),
        lambda loss: torch.autograd.grad(loss, [sharded[0], model.head.weight], allow_unused=True),
        lambda loss: torch.autograd.grad(
            loss, [model.head.bias.new_zeros(1).requires_grad_(), model.head.weight], allow_unused=True
        ),
        lambda loss: loss.backward(inputs=sharded[-1:]),
        lambda loss: torch.autograd.backward(loss, inputs=sharded[-1:]),
    ):
        loss = mine(model)
        assert not isinstance(model.head.weight, DTensor)
        with pytest.raises(StateError, match=r"unit .* parameter .* asked for its gradient.*fix: call backward"):
            ask(loss)
    # autograd.grad for inputs only, or of a loss of sharded parameters themselves, is allowed.
    x = inputs(dist.get_rank(), 0).requires_grad_()
    torch.autograd.grad(model(x).sum(), [x])
    (found,) = torch.autograd.grad(sharded[0].square().sum(), [sharded[0]])
    assert _off(found, 2 * whole(sharded[0], found)) == 0.0
    twins.backward()
    assert twins.gradients_apart() < 2e-6


@on_ranks(2)
def test_a_hook_on_gathered_weights_is_the_sharded_parameters() -> None:
    twins = rooted()
    seen = []

    def square(parameter: torch.Tensor) -> None:
        seen.append(isinstance(parameter, DTensor))
        parameter.grad.square_()

    loss = mine(twins.model)
    for one in twins:
        one.head.weight.register_post_accumulate_grad_hook(square)
    loss.backward()
    mean_loss(twins.plain).backward()
    assert seen == [True, False]
    assert twins.gradients_apart() < 2e-6


PENALTIES: dict[str, Callable[[torch.Tensor, nn.Module, int], torch.Tensor]] = {
    "a tensor": lambda loss, m, rank: loss * 2.0 + penalty(m) * torch.tensor(0.03),
    "a tensor of the rank": lambda loss, m, rank: loss + torch.tensor(0.01 * (rank + 1)) * penalty(m),
    "a number of the rank": lambda loss, m, rank: loss + penalty(m) * (0.01 * (rank + 1)),
    "the loss": lambda loss, m, rank: loss * (1 + 0.01 * penalty(m)),
    "its own square": lambda loss, m, rank: (loss + 0.01 * penalty(m)).square(),
    "norms": lambda loss, m, rank: loss + sum(p.norm() for p in m.parameters()) * torch.tensor(0.01 * rank),
    "a matrix product": lambda loss, m, rank: loss + (_first(m) @ _first(m).T).square().sum() * (0.01 * rank),
    "whole weights": lambda loss, m, rank: loss + _plain(_first(m)).mul(inputs(rank, 7, 13, 7)).square().sum(),
    "rows": lambda loss, m, rank: loss + sum((p * torch.tensor(0.3)).square().sum() for p in m.parameters()),
    "rows, by a tensor of the rank": lambda loss, m, rank: (
        loss + sum((p * torch.tensor(0.1 * (rank + 1))).square().sum() for p in m.parameters())
    ),
}


def _first(model: nn.Module) -> torch.Tensor:
    return model.get_parameter("layers.0.up.weight")


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@pytest.mark.parametrize("strategy", nightly_but(["optim_grads_params"], RANKS))
@on_ranks(num_ranks)
def test_a_penalty_on_sharded_parameters_may_have_another_factor_on_each_rank(strategy: str) -> None:
    found, twins = {}, Twins(build, strategy)
    for name, combine in PENALTIES.items():

        def loss(m: nn.Module, rank: int, step: int, combine: Callable[..., torch.Tensor] = combine) -> torch.Tensor:
            return combine(squared(m, rank, step), m, rank)

        for _ in range(2):
            loss(twins.model, dist.get_rank(), 0).backward()
            mean_loss(twins.plain, loss).backward()
        for model in twins:  # in a second backward
            sum(p.abs().mean() + p.norm() + (p - 0.1).square().sum() for p in model.parameters()).mul(0.1).backward()
        found[name] = twins.gradients_apart()
        twins.zero_grad()
    assert {name: value for name, value in found.items() if not value < 5e-6} == {}


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("is_manual", [False, True])
@on_ranks(2)
def test_a_hook_that_one_backward_would_call_twice_is_refused_by_name(is_manual: bool, strategy: str) -> None:
    twins, calls = Twins(build, strategy), [0, 0]
    twins.model.set_manual_backward_finalization(is_manual)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        if is_manual:
            twins.model.finalize_backward()

    for number, model in enumerate(twins):

        def halve(parameter: torch.Tensor, number: int = number) -> None:
            assert parameter.grad is not None
            calls[number] += 1
            parameter.grad = parameter.grad / 2

        model.layers[0].up.weight.register_post_accumulate_grad_hook(halve)

    def step() -> None:
        backward(squared(twins.model, dist.get_rank(), 0))
        mean_loss(twins.plain, squared).backward()
        assert twins.gradients_apart() < 1e-6
        twins.zero_grad()

    step()
    # A backward of the penalty alone calls the hook once.
    backward(penalty(twins.model))
    penalty(twins.plain).backward()
    assert twins.gradients_apart() < 1e-6
    assert calls == [2, 2]
    twins.zero_grad()
    with pytest.raises(StateError, match=r"parameter '.*' has a post-accumulate-grad hook.* reached it twice.* fix: "):
        backward(squared(twins.model, dist.get_rank(), 0) + penalty(twins.model))
    twins.zero_grad()
    step()


@on_ranks(2)
def test_partial_averages_as_gradients_are_the_mean_over_ranks() -> None:
    found = []
    for optimizer in (Replicate(), Flat()):
        placements = Placements((0,), (Replicate(),), (Partial("avg"),), (optimizer,))
        twins = Twins(Block, shard=fully_shard, placements=placements)
        for _ in range(2):
            twins.backward()
        found.append(twins.gradients_apart())
    assert max(found) < 2e-6


def test_other_partial_gradients_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"give Partial\(\) or Partial\('avg'\)"):
        Placements((0,), (Replicate(),), (Partial("max"),), (Flat(),))


@on_ranks(3)
def test_amsgrad_trains_together_with_an_empty_parameter() -> None:
    twins = Twins(
        lambda: Made(
            lambda m, x: m.linear(x) + m.empty.sum(),
            linear=nn.Linear(WIDTH, WIDTH), empty=nn.Parameter(torch.zeros(6, 0)),
        )
    )  # fmt: skip
    optimizers = twins.optimizers(torch.optim.Adam, amsgrad=True, foreach=False)
    for step in range(3):
        twins.backward(step)
        twins.step(optimizers)
    assert isinstance(twins.model.empty, DTensor)
    assert twins.weights_apart() < 2e-6
    assert twins.model.empty.full_tensor().shape == (6, 0)


def test_clipping_parameters_instead_of_a_model_is_refused_by_name() -> None:
    parameters: Any = nn.Linear(2, 2).parameters()
    with pytest.raises(ConfigError, match=r"found a generator, wanted the model.*torch\.nn\.utils\.clip_grad_norm_"):
        clip_grad_norm_(parameters, 1.0)


@on_ranks(2)
def test_a_gradient_may_have_the_dtype_of_the_gathered_weight_that_it_is_assigned_to() -> None:
    model: Any = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, reshard_after_forward=False, mp_policy=policy)
    kept = dict(model.named_parameters())
    mine(model)
    for weight in model.parameters():
        assert weight.dtype is torch.bfloat16
        weight.grad = torch.full_like(weight, 0.5)
    for name, parameter in kept.items():
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert torch.equal(whole(parameter.grad, parameter), torch.full(parameter.shape, 0.5)), name


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def replace(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = 2 * parameter.grad


@pytest.mark.parametrize("change", [drop, replace])
@EACH
@on_ranks(num_ranks)
def test_a_gradient_that_is_kept_while_others_stay_has_its_values_after_a_clip_a_step_and_a_backward(
    strategy: str, change: Callable[[torch.Tensor], None]
) -> None:
    twins = Twins(strategy=strategy)
    optimizers = [
        kind(model.parameters(), lr=0.1) for kind, model in zip((AdamW, torch.optim.AdamW), twins, strict=True)
    ]
    clips: list[Any] = [clip_grad_norm_, lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm)]
    twins.backward(0)
    kept = [model.layers[0].up.weight.grad for model in twins]
    wanted = kept[1].clone()
    for model, clip, optimizer in zip(twins, clips, optimizers, strict=True):
        change(model.layers[0].up.weight)
        clip(model, 0.1)
        optimizer.step()
    twins.backward(1)
    assert torch.allclose(whole(kept[0], wanted), wanted)
    assert twins.gradients_apart() < 1e-6
    assert twins.weights_apart() < 1e-6
    # The memory of the other gradients goes with them.
    kept.clear()
    twins.zero_grad()
    (group,) = twins.model.layers[0]._fsdp_unit.groups
    assert not group.main_grad.storage.is_allocated
