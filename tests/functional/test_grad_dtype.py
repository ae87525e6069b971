"""The dtypes in which gradients travel and rest when nobody gives a reduce_dtype: those that parameters ask for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import (
    ConfigError,
    MixedPrecisionPolicy,
    Placements,
    StateError,
    explain,
    fully_shard,
    fully_shard_optimizer,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.oracle import whole

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Of the mean of 1 and 2**-10: exact, and rounded to bf16 before or after the sum.
EXACT, ROUNDED = (1 + 2.0**-10) / 2, 0.5


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(5, dtype=dtype))
        self.two = nn.Parameter(torch.ones(3, 2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one * x).sum() + (self.two * x[0]).sum()


Found = dict[str, tuple[torch.dtype, torch.dtype | None, float]]


def gradients(model: Weights) -> Found:
    """Return dtype, ``grad_dtype`` and value of each gradient, where ranks have 1 and 2**-10."""
    value = (1.0, 2.0**-10)[dist.get_rank()]
    model(torch.full((5,), value)).backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        values = whole(gradient, parameter).double()
        assert bool((values == values.flatten()[0]).all())
        found[name] = (gradient.dtype, parameter.grad_dtype, float(values.flatten()[0]))
    return found


def ask(model: nn.Module, dtypes: dict[str, torch.dtype | None]) -> None:
    for name, dtype in dtypes.items():
        model.get_parameter(name).grad_dtype = dtype


BOTH = ("one", "two")
CASES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy, dict[str, torch.dtype | None], Found]] = {
    "nothing is asked": (FP32, MixedPrecisionPolicy(BF16), {}, dict.fromkeys(BOTH, (FP32, FP32, EXACT))),
    "a reduce_dtype": (FP32, MixedPrecisionPolicy(BF16, BF16), {}, dict.fromkeys(BOTH, (FP32, FP32, ROUNDED))),
    "narrow gradients": (
        FP32,
        MixedPrecisionPolicy(),
        dict.fromkeys(BOTH, BF16),
        dict.fromkeys(BOTH, (BF16, BF16, ROUNDED)),
    ),
    "wide gradients": (
        BF16,
        MixedPrecisionPolicy(),
        dict.fromkeys(BOTH, FP32),
        dict.fromkeys(BOTH, (FP32, FP32, EXACT)),
    ),
    "narrow ones beside others are reduced with them": (
        FP32,
        MixedPrecisionPolicy(BF16),
        {"one": BF16},
        {"one": (BF16, BF16, ROUNDED), "two": (FP32, FP32, EXACT)},
    ),
    "of any dtype": (
        FP32,
        MixedPrecisionPolicy(BF16),
        dict.fromkeys(BOTH),
        dict.fromkeys(BOTH, (BF16, None, ROUNDED)),
    ),
    "of any dtype beside others": (
        FP32,
        MixedPrecisionPolicy(BF16),
        {"one": None},
        {"one": (FP32, None, EXACT), "two": (FP32, FP32, EXACT)},
    ),
    "reduced in another": (
        FP32,
        MixedPrecisionPolicy(BF16, FP32),
        dict.fromkeys(BOTH, BF16),
        dict.fromkeys(BOTH, (BF16, BF16, ROUNDED)),
    ),
}


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_gradients_travel_and_rest_in_the_dtype_that_parameters_ask_for(when: str, strategy: str) -> None:
    found = {}
    for name, (own, policy, asked, _) in CASES.items():
        if when == "after" and len(asked) == 1:
            continue
        model = Weights(own)
        placements = getattr(Placements, strategy)(0)
        if when == "before":
            ask(model, asked)
        fully_shard(model, placements=placements, mp_policy=policy)
        if when == "after":
            ask(model, asked)
        found[name] = gradients(model)
    assert len(found) >= 6
    assert found == {name: CASES[name][-1] for name in found}


class Cube(torch.autograd.Function):
    """A function of 16-bit weights whose backward has FP32 gradients, as kernels that add up microbatches do."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (weight * x.to(weight.dtype)).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient.float() * x.float(), None


class WideGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(self.weight, x)


def of_a_wide_function(reduce: torch.dtype | None) -> list[float]:
    model = fully_shard(WideGradients(), mp_policy=MixedPrecisionPolicy(BF16, reduce, cast_forward_inputs=False))
    model(torch.full((4,), 1 + 2.0**-12)).backward()
    return whole(model.weight.grad, model.weight).tolist()


def test_gradients_that_a_function_gives_in_fp32_are_not_rounded_to_the_compute_dtype() -> None:
    assert run_ranks(2, of_a_wide_function, None) == [[1 + 2.0**-12] * 4] * 2
    assert run_ranks(2, of_a_wide_function, BF16) == [[1.0] * 4] * 2


def trained(prepare: Callable[[Weights], object]) -> tuple[list[float], set[torch.dtype]]:
    """Return weights after three steps of a stock optimizer over microbatches, and the dtypes of gradients."""
    model = Weights()
    prepare(model)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    dtypes = set()
    for step in range(3):
        for number in range(2):
            model(torch.full((5,), (step + 1.0) * (number + 1) * (dist.get_rank() + 1))).backward()
        optimizer.step()
        dtypes |= {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
        optimizer.zero_grad()
    return [float(whole(parameter.detach(), parameter).flatten()[0]) for parameter in model.parameters()], dtypes


@on_ranks(2)
def test_a_stock_optimizer_steps_with_gradients_of_another_dtype() -> None:
    def narrow(model: Weights) -> None:
        ask(model, {"one": BF16, "two": BF16})
        fully_shard(model)

    (narrow, dtypes), (usual, usual_dtypes) = trained(narrow), trained(fully_shard)
    assert (dtypes, usual_dtypes) == ({BF16}, {FP32})
    assert narrow == pytest.approx(usual, rel=1e-2)
    assert narrow != [1.0, 1.0]


@on_ranks(2)
def test_gradients_follow_a_conversion_unless_their_dtype_was_set() -> None:
    found = []
    for asked in ({}, dict.fromkeys(BOTH, FP16)):
        model = Weights()
        ask(model, asked)
        found.append(gradients(fully_shard(model).to(BF16)))
    assert [{dtype for dtype, *_ in one.values()} for one in found] == [{BF16}, {FP16}]
    assert {value for *_, value in found[0].values()} == {ROUNDED}


@on_ranks(2)
def test_a_dtype_that_cannot_be_followed_is_refused_with_the_parameter() -> None:
    errors = []

    def collect(action: Callable[[], object]) -> None:
        with pytest.raises(StateError) as error:
            action()
        errors.append(str(error.value))

    model = fully_shard(Weights())
    ask(model, {"one": BF16})
    collect(lambda: gradients(model))
    model = fully_shard(Weights())
    gradients(model)
    model.zero_grad()
    ask(model, {"two": BF16})
    collect(lambda: gradients(model))
    # What was set is taken back.
    model.zero_grad()
    assert {dtype for dtype, *_ in gradients(model).values()} == {FP32}
    mixed, late = errors
    assert "parameter 'one' has grad_dtype=torch.bfloat16 and 'two' has own" in mixed
    assert "Set grad_dtype before fully_shard" in mixed
    assert "grad_dtype of parameter 'two' was set to torch.bfloat16 after" in late


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, self.up.weight.dtype, self.scale.dtype]
        return self.up(x) * self.scale


@on_ranks(2)
def test_parameters_compute_in_the_dtype_that_the_override_gives_them() -> None:
    asked: list[int] = []

    def own_for_vectors(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter.ndim)
        return parameter.dtype if parameter.ndim == 1 else None

    torch.manual_seed(0)
    model = Scaled()
    weight = model.up.weight.detach().clone()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=own_for_vectors))
    total = torch.zeros(4)
    for rank in range(2):
        x = torch.arange(6.0).view(2, 3) + rank
        total += torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()).float().sum(0) / 2
    model(torch.arange(6.0).view(2, 3) + dist.get_rank()).float().sum().backward()
    worst = float((whole(model.scale.grad, model.scale) - total).abs().max())
    assert sorted(asked) == [1, 2]
    seen = model.seen
    dtypes = [parameter.grad.dtype for parameter in model.parameters()]
    assert seen == [BF16, BF16, FP32]
    assert dtypes == [FP32, FP32]
    assert worst == 0.0


@on_ranks(2)
def test_an_override_that_depends_on_the_rank_is_refused_on_all_of_them() -> None:
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda one: FP32 if dist.get_rank() else None)
    with pytest.raises(ValueError) as error:
        fully_shard(Weights(), mp_policy=policy)
    message = str(error.value)
    assert "unit 'Weights': the ranks of its mesh lay it out differently" in message


@on_ranks(1)
def test_an_override_of_a_third_dtype_leaves_the_module_as_it_was() -> None:
    model = Weights()
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: FP16)
    with pytest.raises(ConfigError, match=r"parameter 'one': param_dtype_override_fn returned torch.float16"):
        fully_shard(model, mp_policy=policy)
    assert type(model) is Weights


@on_ranks(1)
def test_explain_says_which_gradients_travel_in_more_than_weights_compute_in() -> None:
    policies = [MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16, BF16), MixedPrecisionPolicy()]
    pages = [str(explain(fully_shard(Weights(), mp_policy=policy))).splitlines() for policy in policies]
    (silent, asked, same) = [[line for line in page if "reduced in" in line] for page in pages]
    assert (asked, same) == ([], [])
    (line,) = silent
    assert "gradients of bfloat16 weights are reduced in float32, which is the default (reduce_dtype=None)" in line
    assert "reduce_dtype=torch.bfloat16 sends 50% of the bytes: Weights" in line
