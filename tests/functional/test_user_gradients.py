"""Gradients that the user makes, asks for or clips: as those of a plain model on the data of all ranks."""

import copy
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
    NonfiniteGradientError,
    Placements,
    StateError,
    check_gradients,
    clip_grad_norm_,
    fully_shard,
    no_sync,
)
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Block, Headed, Stack, inputs, make_mesh
from tests.harness.oracle import whole

STRATEGIES: dict[str, tuple[Placements, tuple[int, ...]]] = {
    "no_shard": (Placements.no_shard(), (2,)),
    "optim": (Placements.optim(), (2,)),
    "optim_grads": (Placements.optim_grads(), (2,)),
    "optim_grads_params": (Placements.optim_grads_params(), (3,)),
    "hsdp": (Placements.hsdp(), (2, 2)),
    "hfsdp": (Placements.hfsdp(), (2, 2)),
}
QUICK = ("no_shard", "optim_grads_params")
EACH = pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STRATEGIES]
)


def num_ranks(strategy: str) -> int:
    return math.prod(STRATEGIES[strategy][1])


def pair(strategy: str) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model, with a parameter that no forward uses, and the same one whole."""
    torch.manual_seed(0)
    oracle = Stack(Block(), Block(hidden=1))
    oracle.unused = nn.Parameter(torch.randn(3, 2))
    model = copy.deepcopy(oracle)
    placements, shape = STRATEGIES[strategy]
    mesh = make_mesh(shape if placements.num_axes > 1 else (dist.get_world_size(),))
    for part in (*model.layers, model):
        fully_shard(part, mesh, placements)
    return model, oracle


def off(model: nn.Module, oracle: nn.Module, *, of_weights: bool = False) -> float:
    """Return the largest difference of any gradient (or weight); infinite where only one of the two has a gradient."""
    worst = 0.0
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        if of_weights:
            worst = max(worst, float((whole(ours, theirs) - theirs.detach()).abs().max()))
        elif (ours.grad is None) != (theirs.grad is None):
            worst = math.inf
        elif theirs.grad is not None:
            worst = max(worst, float((whole(ours.grad, theirs) - theirs.grad).abs().max()))
    return worst


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return model(inputs(rank, step)).square().mean()


def mean_loss(model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor] = loss_of) -> torch.Tensor:
    return torch.stack([loss(model, rank) for rank in range(dist.get_world_size())]).mean()


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
def test_clipping_scales_the_very_tensors_that_were_assigned_and_adamw_clips_them_itself(strategy: str) -> None:
    model, oracle = pair(strategy)
    optimizer, reference = (
        AdamW(model.parameters(), lr=0.1, max_norm=0.5),
        torch.optim.AdamW(oracle.parameters(), lr=0.1),
    )
    for step in range(2):
        given = give(model)
        give(oracle)
        wanted = nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        assert float(clip_grad_norm_(model, 1.0)) == pytest.approx(float(wanted), rel=2e-6)
        assert off(model, oracle) < 2e-6
        for mine, parameter in zip(given, oracle.parameters(), strict=True):
            assert (whole(mine, parameter) - parameter.grad).abs().max() < 2e-6
        nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        optimizer.step()
        reference.step()
        assert off(model, oracle, of_weights=True) < 2e-6
        model.zero_grad()
        oracle.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        model.zero_grad()


@on_ranks(3)
def test_nan_in_an_assigned_gradient_is_noticed_and_named_on_all_ranks() -> None:
    strategy = "optim_grads_params"
    model, _ = pair(strategy)
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
def test_gradients_of_frozen_parameters_and_of_other_rows_count_in_norms_of_any_order() -> None:
    torch.manual_seed(0)
    oracle = Stack(Block(), Block())
    oracle.layers[0].requires_grad_(False)
    model = copy.deepcopy(oracle)
    for part in (*model.layers, model):
        fully_shard(part)
    found = []
    for order in (1.0, 2.0, 3.0, math.inf):
        give(model)
        give(oracle)
        replicas = model.layers[1].up.weight.grad
        assert isinstance(replicas, DTensor)
        model.layers[1].up.weight.grad = replicas.redistribute(placements=[Replicate()])
        wanted = nn.utils.clip_grad_norm_(oracle.parameters(), 1.0, norm_type=order)
        found.append(float(clip_grad_norm_(model, 1.0, norm_type=order) / wanted) - 1)
        found.append(off(model, oracle))
    assert [value for value in found if abs(value) > 2e-6] == []


@on_ranks(2)
def test_clipping_before_gradients_are_final_is_refused() -> None:
    model, _ = pair("optim_grads_params")
    with no_sync(model):
        loss_of(model, dist.get_rank()).backward()
    model.set_requires_gradient_sync(False)
    loss_of(model, dist.get_rank()).backward()
    with pytest.raises(StateError, match=r"clip_grad_norm_ before gradients are final; run the last microbatch"):
        clip_grad_norm_(model, 1.0)


def _spoil(parameter: torch.Tensor) -> None:
    assert isinstance(parameter.grad, DTensor)
    local = parameter.grad.to_local()
    if local.numel():
        local[0] = math.nan


@on_ranks(2)
def test_every_clipper_leaves_gradients_of_a_norm_that_is_nan_as_they_are() -> None:
    found = []
    for name in ("clip_grad_norm_", "AdamW", "SGD"):
        model, _ = pair("optim_grads_params")
        model.get_parameter("layers.0.up.bias").register_post_accumulate_grad_hook(_spoil)
        if name == "SGD":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = AdamW(model.parameters(), lr=0.1, max_norm=1.0 if name == "AdamW" else None)
        loss_of(model, dist.get_rank()).backward()
        if name != "AdamW":
            assert clip_grad_norm_(model, 1.0).isnan()
        optimizer.step()
        found.append([name for name, p in model.named_parameters() if not whole(p, p).isfinite().all()])
    assert found == [["layers.0.up.bias"]] * 3


def penalty(model: nn.Module) -> torch.Tensor:
    return sum(p.square().sum() for p in model.parameters() if p.ndim == 2)


def _off(one: torch.Tensor | None, other: torch.Tensor) -> float:
    return float((whole(one, other) - other).abs().max())


@EACH
@on_ranks(num_ranks)
def test_gradients_of_sharded_parameters_that_are_asked_for_are_the_means_over_ranks(strategy: str) -> None:
    model, oracle = pair(strategy)
    ours, theirs = list(model.parameters()), list(oracle.parameters())

    def loss(m: nn.Module, rank: int) -> torch.Tensor:
        return loss_of(m, rank) + 0.01 * (rank + 1) * penalty(m)

    wrong = []
    found = torch.autograd.grad(loss(model, dist.get_rank()), ours[::-1], allow_unused=True)
    wanted = torch.autograd.grad(mean_loss(oracle, loss), theirs[::-1], allow_unused=True)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if (one is None) != (other is None) or (other is not None and _off(one, other) > 2e-6):
            wrong.append(f"gradient {number}")
    if any(p.grad is not None for p in ours):
        wrong.append("autograd.grad accumulated")
    if any(p.grad_fn for p in model.parameters()):
        wrong.append("history")
    some = [1, 4, 6]
    loss_of(model, dist.get_rank()).backward(inputs=[ours[index] for index in some])
    mean_loss(oracle).backward(inputs=[theirs[index] for index in some])
    wrong += ["backward(inputs=)"] if off(model, oracle) > 2e-6 else []
    loss_of(model, dist.get_rank(), 1).backward(inputs=[ours[index] for index in some])
    mean_loss(oracle, lambda m, rank: loss_of(m, rank, 1)).backward(inputs=[theirs[index] for index in some])
    wrong += ["a second one"] if off(model, oracle) > 2e-6 else []
    model.zero_grad()
    oracle.zero_grad()
    loss_of(model, dist.get_rank()).backward()
    mean_loss(oracle).backward()
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if other.grad is not None and _off(one.grad, other.grad) > 2e-6:
            wrong.append(f"a plain backward afterwards, gradient {index}")
    assert wrong == []


def rooted() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    oracle = Headed(Block(), outputs=3)
    model = copy.deepcopy(oracle)
    fully_shard(model.layers[0])
    return fully_shard(model), oracle


@on_ranks(2)
def test_what_autograd_gives_for_gathered_weights_is_refused() -> None:
    model, oracle = rooted()
    sharded = model.head.weight
    loss = loss_of(model, dist.get_rank())
    assert not isinstance(model.head.weight, DTensor)
    with pytest.raises(StateError, match=r"parameter 'head\.weight' by its gathered weight.*Ask for the sharded param"):
        torch.autograd.grad(loss, [model.head.bias.new_zeros(1).requires_grad_(), model.head.weight], allow_unused=True)
    (found,) = torch.autograd.grad(loss_of(model, dist.get_rank()), [sharded])
    (wanted,) = torch.autograd.grad(mean_loss(oracle), [oracle.head.weight])
    # For inputs alone nothing is refused.
    x = inputs(dist.get_rank(), 0).requires_grad_()
    torch.autograd.grad(model(x).sum(), [x])
    loss_of(model, dist.get_rank()).backward()
    mean_loss(oracle).backward()
    found = [_off(found, wanted), off(model, oracle)]
    assert max(found) < 2e-6


@on_ranks(2)
def test_gradients_of_a_unit_with_a_hook_on_reduced_ones_cannot_be_asked_for() -> None:
    model, _ = rooted()
    sharded = model.head.weight
    model.set_all_reduce_hook(lambda gradient: gradient.mul_(2))
    with pytest.raises(StateError, match=r"torch\.autograd\.grad or backward\(inputs=\.\.\.\) .* set_all_reduce_hook"):
        torch.autograd.grad(loss_of(model, dist.get_rank()), [sharded])


def _raise(gradient: torch.Tensor) -> None:
    raise RuntimeError("a user's hook")


@on_ranks(2)
def test_a_question_that_raised_leaves_gathered_weights_refused() -> None:
    model, _ = rooted()
    sharded = list(model.parameters())
    with pytest.raises(PlacementError, match="create_graph=True"):
        torch.autograd.grad(loss_of(model, dist.get_rank()), sharded, create_graph=True)
    loss = loss_of(model, dist.get_rank())
    loss.register_hook(_raise)
    with pytest.raises(RuntimeError, match="a user's hook"):
        torch.autograd.grad(loss, sharded)
    loss = loss_of(model, dist.get_rank())
    with pytest.raises(StateError, match=r"parameter 'head\.weight' by its gathered weight"):
        torch.autograd.grad(loss, [model.head.weight])


@on_ranks(2)
def test_a_hook_on_gathered_weights_is_the_sharded_parameters() -> None:
    model, oracle = rooted()
    seen = []

    def square(parameter: torch.Tensor) -> None:
        seen.append(isinstance(parameter, DTensor))
        parameter.grad.square_()

    loss = loss_of(model, dist.get_rank())
    for one in (model, oracle):
        one.head.weight.register_post_accumulate_grad_hook(square)
    loss.backward()
    mean_loss(oracle).backward()
    difference = off(model, oracle)
    assert seen == [True, False]
    assert difference < 2e-6


@on_ranks(2)
def test_what_nobody_used_and_second_derivatives_are_refused() -> None:
    model, _ = pair("optim_grads_params")
    parameters = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\) whose gradient is asked for was not used on any rank"):
        torch.autograd.grad(loss_of(model, dist.get_rank()), parameters)
    zeros = torch.autograd.grad(loss_of(model, dist.get_rank()), parameters[:1], materialize_grads=True)
    with pytest.raises(PlacementError, match=r"with create_graph=True or is_grads_batched=True: forward used gathered"):
        torch.autograd.grad(loss_of(model, dist.get_rank()), parameters, create_graph=True)
    assert not whole(zeros[0], parameters[0]).any()


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


@pytest.mark.parametrize("strategy", nightly_but(["optim_grads_params"], STRATEGIES))
@on_ranks(num_ranks)
def test_a_penalty_on_sharded_parameters_may_be_multiplied_by_what_differs_from_rank_to_rank(strategy: str) -> None:
    found = {}
    for name, combine in PENALTIES.items():
        model, oracle = pair(strategy)

        def loss(m: nn.Module, rank: int, combine: Callable[..., torch.Tensor] = combine) -> torch.Tensor:
            return combine(loss_of(m, rank), m, rank)

        for _ in range(2):
            loss(model, dist.get_rank()).backward()
            mean_loss(oracle, loss).backward()
        found[name] = off(model, oracle)
    assert {name: value for name, value in found.items() if not value < 5e-6} == {}


@on_ranks(2)
def test_partial_averages_as_gradients_are_the_mean_over_ranks() -> None:
    found = []
    for optimizer in (Replicate(), Flat()):
        torch.manual_seed(0)
        oracle = Block()
        model = fully_shard(
            copy.deepcopy(oracle), placements=Placements((0,), (Replicate(),), (Partial("avg"),), (optimizer,))
        )
        for _ in range(2):
            model(inputs(dist.get_rank(), 0)).square().mean().backward()
            torch.stack([oracle(inputs(rank, 0)).square().mean() for rank in range(2)]).mean().backward()
        found.append(off(model, oracle))
    assert max(found) < 2e-6


def test_other_partial_gradients_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"legal are Partial\(\) and Partial\('avg'\)"):
        Placements((0,), (Replicate(),), (Partial("max"),), (Flat(),))


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.zeros(6, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.empty.sum()


@on_ranks(3, timeout=60)
def test_amsgrad_trains_beside_a_parameter_without_elements() -> None:
    torch.manual_seed(0)
    oracle = WithEmpty()
    model = fully_shard(copy.deepcopy(oracle))
    optimizers = [torch.optim.Adam(m.parameters(), amsgrad=True, foreach=False) for m in (model, oracle)]
    for step in range(3):
        loss_of(model, dist.get_rank(), step).backward()
        mean_loss(oracle, lambda m, rank, step=step: loss_of(m, rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(model.empty, DTensor)
    worst = float((whole(model.linear.weight, oracle.linear.weight) - oracle.linear.weight.detach()).abs().max())
    shape = model.empty.full_tensor().shape
    assert worst < 2e-6
    assert shape == (6, 0)


def test_clipping_parameters_instead_of_a_model_is_refused_by_name() -> None:
    parameters: Any = nn.Linear(2, 2).parameters()
    with pytest.raises(ConfigError, match=r"found a generator, wanted the model.*torch\.nn\.utils\.clip_grad_norm_"):
        clip_grad_norm_(parameters, 1.0)
