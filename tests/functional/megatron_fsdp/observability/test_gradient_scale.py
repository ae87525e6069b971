"""check_gradient_scale measures the right factors, does not change the model, and names wrong gradients."""

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp import (
    AdamW,
    ConfigError,
    CPUOffloadPolicy,
    GradientScale,
    GradientScaleError,
    MixedPrecisionPolicy,
    Placements,
    StateError,
    check_gradient_scale,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
)
from tests.functional.expert_parallel import rows, shard_experts
from tests.functional.megatron_fsdp.build.test_tensor_parallel import feedforward
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, RaisesInBackward, Stack, draw_tokens, inputs, loss_of
from tests.harness.oracle import sharded, sharded_model, whole, whole_state
from tests.harness.twins import Twins

POLICIES = {
    "fp32": None,
    "bf16, fp32 sums": MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_params_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, main_params_dtype=torch.float32),
}
LAYOUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "zero 3": ("optim_grads_params", (3,)), "zero 2": ("optim_grads", (2,)), "zero 1": ("optim", (2,)),
    "replicas": ("no_shard", (2,)), "one rank": ("optim_grads_params", (1,)), "hsdp": ("hsdp", (2, 2)),
    "hfsdp": ("hfsdp", (2, 2)),
}  # fmt: skip
QUICK = [("zero 3", "fp32"), ("zero 1", "bf16, fp32 sums"), ("one rank", "fp32"), ("hfsdp", "bf16 sums")]


def token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return loss_of(model(tokens), tokens)


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("layout", "policy"), nightly_but(QUICK, [(layout, policy) for layout in LAYOUTS for policy in POLICIES])
)
@on_ranks(lambda layout: math.prod(LAYOUTS[layout][1]))
def test_every_parameter_has_the_factor_of_a_mean_over_ranks(layout: str, policy: str) -> None:
    num_ranks = math.prod(LAYOUTS[layout][1])
    limit = 2e-6 if policy != "bf16 sums" else 4e-3
    strategy, shape = LAYOUTS[layout]
    model = sharded_model(strategy, mesh=shape, mp_policy=POLICIES[policy])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    tokens = draw_tokens(dist.get_rank())
    token_loss(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = whole_state(model)
    report = check_gradient_scale(model, token_loss, draw_tokens(dist.get_rank(), 1))
    after = whole_state(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(report.parameters) == 16
    for each in report.parameters:
        assert each.factor == pytest.approx(1 / num_ranks, rel=limit)
        assert each.accumulated == pytest.approx(2, rel=limit)


EXPERTS = [(2, "optim_grads_params"), (4, "optim_grads"), (2, "optim")]


@pytest.mark.parametrize(("num_experts", "strategy"), nightly_but(EXPERTS[:2], EXPERTS))
@on_ranks(4)
def test_experts_on_fewer_ranks_have_the_factor_of_all_ranks(num_experts: int, strategy: str) -> None:
    model, _ = shard_experts(num_experts, strategy)
    report = check_gradient_scale(model, squares, rows(dist.get_rank()))
    experts = [each for each in report.parameters if "expert" in each.name]
    assert all(each.place.endswith(f"of {4 // num_experts}") for each in experts)
    assert len(experts) == 6 < len(report.parameters)
    assert all(each.factor == pytest.approx(0.25, rel=1e-6) for each in report.parameters)


def of_tensor_parallel(strategy: str) -> GradientScale:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Stack(feedforward(), feedforward())
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh["dp"], getattr(Placements, strategy)("dp"))
    fully_shard(model, mesh["dp"], getattr(Placements, strategy)("dp"))
    return check_gradient_scale(model, squares, rows(mesh.get_local_rank("dp")))


@pytest.mark.parametrize("strategy", nightly_but(["optim_grads_params"], ["optim_grads_params", "no_shard"]))
def test_tensor_parallel_weights_have_the_factor_of_the_data_ranks(strategy: str) -> None:
    first, *others = run_ranks(4, of_tensor_parallel, strategy)
    assert all(each.factor == pytest.approx(0.5, rel=1e-6) for each in first.parameters)
    # Each rank measures whole weights, so all ranks report the same.
    assert all(other == first for other in others)


class Noisy(nn.Module):
    """A linear layer with dropout, running statistics and a weight that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.rare = nn.Linear(5, 5)
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.linear(x)), 0.5)
        return self.rare(hidden) if dist.get_rank() else hidden


@on_ranks(2)
def test_random_numbers_statistics_hooks_and_unused_weights_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    model = Noisy()
    fully_shard(model)
    calls: list[str] = []
    optimizer = AdamW(model.parameters(), lr=0.1)
    model.linear.weight.register_post_accumulate_grad_hook(lambda _: calls.append("hook"))
    torch.manual_seed(5 + dist.get_rank())
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    state = torch.get_rng_state()
    report = check_gradient_scale(model, squares, rows(dist.get_rank()))
    is_same = torch.equal(state, torch.get_rng_state())
    is_same &= all(torch.equal(value, statistics[name]) for name, value in model.named_buffers())
    is_same &= not calls and all(parameter.grad is None for parameter in model.parameters()) and not optimizer.state
    squares(model, rows(dist.get_rank())).backward()
    assert is_same
    assert calls == ["hook"]
    factors = {each.name: each.factor for each in report.parameters}
    assert math.isnan(factors.pop("never.weight"))
    assert math.isnan(factors.pop("never.bias"))
    assert all(factor == pytest.approx(0.5, rel=1e-6) for factor in factors.values())


def sum_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def stack(**options: Any) -> Stack:
    torch.manual_seed(0)
    return sharded(Stack(Block(), Block(hidden=3)), **options)


@on_ranks(2)
def test_summed_gradients_pass_only_if_declared_and_are_named_otherwise() -> None:
    model = stack()
    for module in (*model.layers, model):
        module.set_gradient_divide_factor(1.0)
    x = rows(dist.get_rank())
    report = check_gradient_scale(model, sum_loss, x, expected=1.0)
    with pytest.raises(GradientScaleError) as error:
        check_gradient_scale(model, sum_loss, x)
    text = str(error.value)
    assert all(each.factor == pytest.approx(1, rel=1e-6) for each in report.parameters)
    assert "parameter 'layers.0.norm.weight' (unit 'layers.0', over axis 0 of 2)" in text
    assert "is 1 x the sum of all ranks' gradients, expected 0.5: 2 x as large" in text


@on_ranks(2)
def test_only_parameters_that_are_wrong_are_named() -> None:
    model = stack()

    def hook(gradient: torch.Tensor) -> None:
        gradient[: len(gradient) // 2] *= 1.5

    model.layers[1].set_all_reduce_hook(hook)
    with pytest.raises(GradientScaleError) as error:
        check_gradient_scale(model, squares, rows(dist.get_rank()))
    text = str(error.value)
    assert "layers.1" in text
    assert "layers.0" not in text


def refused(which: str) -> str:
    model = stack()
    x = rows(dist.get_rank())
    context: Any = contextlib.nullcontext()
    if which == "pending":
        with no_sync(model):
            squares(model, x).backward()
    elif which == "gradients":
        squares(model, x).backward()
    elif which == "no_sync":
        context = no_sync(model)
    elif which == "frozen":
        model.requires_grad_(False)
    model_or_plain = nn.Linear(7, 7) if which == "plain" else model
    with context, pytest.raises((StateError, ConfigError)) as error:
        check_gradient_scale(model_or_plain, squares, x)
    if which != "pending":
        return str(error.value)
    # The accumulated gradient is still there, and accumulation goes on.
    squares(model, x).backward()
    gradient = model.layers[0].up.weight.grad.full_tensor()
    model.zero_grad()
    squares(model, x).backward()
    assert torch.allclose(gradient, 2 * model.layers[0].up.weight.grad.full_tensor(), atol=1e-6)
    return str(error.value)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("pending", "gradient accumulation is under way. fix: call zero_grad() first"),
        ("gradients", "parameter 'layers.0.norm.weight' has a gradient already. fix: call zero_grad() first"),
        ("no_sync", "fix: call this outside, between steps"),
        ("plain", "no module of the model is sharded. fix: call fully_shard first"),
        ("frozen", "no sharded parameter of the model requires a gradient"),
    ],
)
def test_models_and_settings_that_cannot_be_measured_are_refused(which: str, words: str) -> None:
    assert all(words in text for text in run_ranks(2, refused, which))


@pytest.mark.parametrize("is_whole", [True, False])
@on_ranks(2)
def test_parameters_that_were_unfrozen_since_the_last_forward_are_measured(is_whole: bool) -> None:
    model: Any = Stack(Block(), Block())
    frozen = [*model.parameters()] if is_whole else [model.layers[0].up.weight]
    for parameter in frozen:
        parameter.requires_grad_(False)
    sharded(model)
    if not is_whole:
        squares(model, rows(dist.get_rank())).backward()
        model.zero_grad()
    model.requires_grad_(True)
    found = check_gradient_scale(model, squares, rows(dist.get_rank())).parameters
    assert [each.factor for each in found] == pytest.approx([0.5] * 12)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_gradients_that_are_kept_from_before_keep_their_values(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    twins.backward()
    kept, wanted = ([parameter.grad for parameter in model.parameters()] for model in twins)
    twins.model.zero_grad()
    check_gradient_scale(twins.model, squares, inputs(dist.get_rank(), 1))
    assert all(torch.allclose(whole(mine, right), right) for mine, right in zip(kept, wanted, strict=True))


@pytest.mark.parametrize("is_in_backward", [False, True])
@on_ranks(2)
def test_a_loss_that_raises_leaves_no_gradients(is_in_backward: bool) -> None:
    model = stack()
    x = rows(dist.get_rank())

    def broken(inner: Any, batch: torch.Tensor) -> torch.Tensor:
        if is_in_backward:
            hidden = inner.layers[1].register_forward_pre_hook(lambda _, args: RaisesInBackward.apply(args[0]))
            try:
                return squares(inner, batch)
            finally:
                hidden.remove()
        squares(inner, batch).backward()
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        check_gradient_scale(model, broken, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    text = str(check_gradient_scale(model, squares, x))
    assert "unit 'layers.0', 6 parameters over axis 0 of 2: factor 0.5" in text


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("nan", "there is NaN or infinity in its gradient"),
        ("nothing", "no parameter has a gradient to measure"),
    ],
)
@on_ranks(2)
def test_a_loss_that_shows_no_gradients_fails_the_check(which: str, words: str) -> None:
    x = rows(dist.get_rank())
    model = stack()
    scale = {"nan": math.nan, "nothing": 0.0}.get(which, 1.0)
    with pytest.raises(GradientScaleError) as error:
        check_gradient_scale(model, lambda inner, batch: scale * squares(inner, batch), x)
    assert all(parameter.grad is None for parameter in model.parameters())
    text = str(error.value)
    assert words in text


POLICIES_OF_GROUPS: dict[str, dict[str, Any]] = {
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "pairs": {"reshard_after_forward": 2},
    "split": {
        "mp_policy": MixedPrecisionPolicy(
            torch.bfloat16,
            torch.bfloat16,
            main_params_dtype=torch.float32,
            main_grads_dtype=torch.bfloat16,
            split_main_params=True,
            cast_forward_inputs=True,
        )
    },
    "packed": {"mp_policy": MixedPrecisionPolicy(gather_dtype="int8_block")},
    "fp16": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16, cast_forward_inputs=True)},
}


@pytest.mark.parametrize("name", nightly_but(["split"], list(POLICIES_OF_GROUPS)))
@on_ranks(2)
def test_other_ways_to_keep_weights_and_gradients_are_measured(name: str) -> None:
    model = stack(**POLICIES_OF_GROUPS[name])
    report = check_gradient_scale(model, lambda inner, x: inner(x).float().square().mean(), rows(dist.get_rank()))
    assert all(each.factor == pytest.approx(0.5, rel=5e-3) for each in report.parameters)
