"""The dtype of each copy of weights and gradients during training, and the resulting numbers."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from dbuffer import CollectiveCall, Flat, memory_meter, observe_collectives
from megatron_fsdp import (
    ConfigError,
    MixedPrecisionPolicy,
    Placements,
    StateError,
    explain,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, Made, Stack, inputs, make_mesh
from tests.harness.oracle import whole
from tests.harness.twins import sharded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Probe(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(WIDTH, dtype=dtype), requires_grad=False)
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = {"input": x.dtype, "keyword": scale.dtype, "index": index.dtype, "weight": self.linear.weight.dtype}
        self.seen |= {"frozen": self.frozen.dtype, "table": self.table.dtype}
        return {"output": self.linear(x.to(self.linear.weight.dtype)) * self.frozen, "index": self.table[index]}


class Wanted(NamedTuple):
    """How to make a probe, and the results of its step. Bytes are per element of a trained weight."""

    own: torch.dtype
    policy: Any
    weight: torch.dtype
    inputs: torch.dtype
    gathered_bytes: float
    reduced_bytes: float
    gradient: torch.dtype = FP32
    output: torch.dtype | None = None


ALL_SIX = MixedPrecisionPolicy(BF16, FP32, FP32, False, FP32, FP32)
POLICIES = {
    "none": Wanted(FP32, None, FP32, FP32, 4.0, 4.0),
    "compute": Wanted(FP32, MixedPrecisionPolicy(BF16), BF16, BF16, 2.0, 4.0, output=BF16),
    "all six": Wanted(BF16, ALL_SIX, BF16, FP32, 2.0, 4.0, output=FP32),
    "narrow gradients": Wanted(FP32, MixedPrecisionPolicy(BF16, main_grads_dtype=BF16), BF16, BF16, 2.0, 2.0, BF16),
    "main weights": Wanted(BF16, MixedPrecisionPolicy(main_params_dtype=FP32), BF16, FP32, 2.0, 2.0),
    "torch": Wanted(FP32, TorchPolicy(BF16, FP32, FP32), BF16, BF16, 2.0, 4.0, output=FP32),
}


@pytest.mark.parametrize("name", POLICIES)
@on_ranks(2)
def test_weights_inputs_outputs_gradients_and_collectives_have_the_policys_dtypes(name: str) -> None:
    wanted = POLICIES[name]
    model = Probe(wanted.own)
    fully_shard(model, mp_policy=wanted.policy)
    optimizer = fully_shard_optimizer(torch.optim.SGD([model.linear.weight, model.linear.bias], lr=0.1, momentum=0.9))
    group = next(group for group in model.parameter_groups if group.requires_grad)
    # Integers and frozen weights are gathered too, as bytes.
    rest = {"all_gather": sum(each.gathered.nbytes for each in model.parameter_groups if each is not group)}
    sizes: dict[str, set[float]] = {}

    def note(call: Any) -> None:
        sizes.setdefault(call.kind, set()).add((call.num_bytes - rest.get(call.kind, 0)) / group.plan.numel)

    x, scale = inputs(dist.get_rank(), 0), torch.ones(())
    output = model(x, scale=scale, index=torch.tensor([1]))
    model.reshard()
    with observe_collectives(note):
        output["output"].float().square().mean().backward()
    gradient = model.linear.weight.grad
    optimizer.step()
    seen = model.seen
    assert seen["weight"] is seen["frozen"] is wanted.weight
    assert seen["input"] is seen["keyword"] is wanted.inputs
    assert seen["index"] is seen["table"] is output["index"].dtype is torch.int64
    assert wanted.output in (None, output["output"].dtype)
    # The trainer sees FP32 main weights and state; frozen parameters get no wider copy.
    assert model.linear.weight.dtype is optimizer.state[model.linear.weight]["momentum_buffer"].dtype is FP32
    assert model.frozen.dtype is wanted.own
    assert gradient.dtype is wanted.gradient
    assert sizes == {"all_gather": {wanted.gathered_bytes}, "reduce_scatter": {wanted.reduced_bytes}}


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    return model(inputs(rank, 0).to(BF16)).float().square().sum()


@pytest.mark.parametrize("own", [FP32, BF16], ids=["from fp32", "from bf16"])
@on_ranks(2)
def test_bf16_gradients_reduced_in_fp32_are_exactly_the_fp32_mean_of_every_ranks_own(own: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(BF16, FP32, main_params_dtype=FP32)
    torch.manual_seed(3)
    plain = Stack(Block(), Block(hidden=5)).to(BF16)
    model = sharded(copy.deepcopy(plain).to(own), mp_policy=policy)
    loss_of(model, dist.get_rank()).backward()
    totals = [torch.zeros(parameter.shape) for parameter in plain.parameters()]
    for rank in range(dist.get_world_size()):
        plain.zero_grad()
        loss_of(plain, rank).backward()
        for total, parameter in zip(totals, plain.parameters(), strict=True):
            total += parameter.grad.float() / dist.get_world_size()
    pairs = [(whole(p.grad, p), total) for p, total in zip(model.parameters(), totals, strict=True)]
    assert all(torch.equal(found, wanted) for found, wanted in pairs)
    assert all(bool(wanted.any()) for _, wanted in pairs)


def weight_of(dtype: torch.dtype) -> Any:
    return Made(lambda m, x: m.weight * x, weight=nn.Parameter(torch.ones(5, dtype=dtype)))


@on_ranks(4)
def test_a_sum_beyond_the_range_of_fp16_does_not_overflow_on_the_way_to_its_mean() -> None:
    model = weight_of(FP32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(FP16, FP16, main_grads_dtype=FP32))
    model(torch.full((5,), (2e4, 2.5e4, 3e4, 2.5e4)[dist.get_rank()])).sum().backward()
    assert whole(model.weight.grad, model.weight).tolist() == pytest.approx([2.5e4] * 5, rel=2**-10)


@pytest.mark.parametrize(("dtype", "wanted"), [(FP32, 1.125), (None, 1.0)])
@on_ranks(2)
def test_small_microbatches_add_up_in_fp32_main_gradients_alone(dtype: torch.dtype | None, wanted: float) -> None:
    model = weight_of(BF16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(main_grads_dtype=dtype))
    values = [1.0] + [2.0**-9] * 64
    for index, value in enumerate(values):
        with microbatch(model, index == len(values) - 1):
            model(torch.full((5,), value, dtype=BF16)).sum().backward()
    assert whole(model.weight.grad, model.weight).tolist() == [wanted] * 5


# 1 - 2**-9 lies halfway between two bf16 numbers and rounds to the even one, which is 1.
@pytest.mark.parametrize(("dtype", "wanted"), [(FP32, 0.875), (None, 1.0)])
@on_ranks(2)
def test_small_steps_reach_bf16_weights_through_fp32_main_weights_alone(
    dtype: torch.dtype | None, wanted: float
) -> None:
    model = weight_of(BF16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(main_params_dtype=dtype))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=2.0**-9))
    for _ in range(64):
        model(torch.ones(5, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert model(torch.ones(5, dtype=BF16)).tolist() == [wanted] * 5


@on_ranks(2)
def test_units_of_one_model_may_compute_in_different_dtypes() -> None:
    model = Stack(Block(), Block())
    fully_shard(model.layers[0], mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP32))
    fully_shard(model.layers[1])
    fully_shard(model)
    seen: list[torch.dtype] = []
    for layer in model.layers:
        layer.up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert seen == [BF16, FP32]


# The mean of 1 and 2**-10: exact, and rounded to bf16 before or after the sum.
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


def both(value: Any) -> dict[str, Any]:
    return dict.fromkeys(("one", "two"), value)


# The parameters' dtype, the policy, the requested grad_dtype, and the result.
CASES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy, dict[str, torch.dtype | None], Found]] = {
    "nothing is asked": (FP32, MixedPrecisionPolicy(BF16), {}, both((FP32, FP32, EXACT))),
    "a reduce_dtype": (FP32, MixedPrecisionPolicy(BF16, BF16), {}, both((FP32, FP32, ROUNDED))),
    "narrow gradients": (FP32, MixedPrecisionPolicy(), both(BF16), both((BF16, BF16, ROUNDED))),
    "wide gradients": (BF16, MixedPrecisionPolicy(), both(FP32), both((FP32, FP32, EXACT))),
    "narrow ones beside others are reduced with them": (
        FP32, MixedPrecisionPolicy(BF16), {"one": BF16}, {"one": (BF16, BF16, ROUNDED), "two": (FP32, FP32, EXACT)}
    ),
    "of any dtype": (FP32, MixedPrecisionPolicy(BF16), both(None), both((BF16, None, ROUNDED))),
    "of any dtype beside others": (
        FP32, MixedPrecisionPolicy(BF16), {"one": None}, {"one": (FP32, None, EXACT), "two": (FP32, FP32, EXACT)}
    ),
    "reduced in another": (FP32, MixedPrecisionPolicy(BF16, FP32), both(BF16), both((BF16, BF16, ROUNDED))),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_gradients_are_reduced_and_stored_in_the_parameters_grad_dtype(when: str, strategy: str) -> None:
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


@pytest.mark.parametrize(("reduce", "wanted"), [(None, 1 + 2.0**-12), (BF16, 1.0)])
@on_ranks(2)
def test_fp32_gradients_of_a_function_are_not_rounded_to_the_compute_dtype(
    reduce: torch.dtype | None, wanted: float
) -> None:
    model: Any = Made(lambda m, x: Cube.apply(m.weight, x), weight=nn.Parameter(torch.ones(4)))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, reduce, cast_forward_inputs=False))
    model(torch.full((4,), 1 + 2.0**-12)).backward()
    assert whole(model.weight.grad, model.weight).tolist() == [wanted] * 4


@on_ranks(2)
def test_gradients_follow_a_conversion_unless_their_dtype_was_set() -> None:
    found = []
    for asked in ({}, both(FP16)):
        model = Weights()
        ask(model, asked)
        found.append(gradients(fully_shard(model).to(BF16)))
    assert [{dtype for dtype, *_ in one.values()} for one in found] == [{BF16}, {FP16}]
    assert {value for *_, value in found[0].values()} == {ROUNDED}


@on_ranks(2)
def test_a_grad_dtype_set_too_late_is_refused_with_the_parameter() -> None:
    model = fully_shard(Weights())
    ask(model, {"one": BF16})
    with pytest.raises(StateError, match=r"'one' has grad_dtype=torch.bfloat16 and 'two' has own.* before fully_shard"):
        gradients(model)
    model = fully_shard(Weights())
    gradients(model)
    model.zero_grad()
    ask(model, {"two": BF16})
    with pytest.raises(StateError, match=r"grad_dtype of parameter 'two' was set to torch.bfloat16 after"):
        gradients(model)
    # The refused setting has been undone.
    model.zero_grad()
    assert {dtype for dtype, *_ in gradients(model).values()} == {FP32}


@on_ranks(2)
def test_parameters_compute_in_the_dtype_that_the_override_gives_them() -> None:
    asked: list[int] = []
    seen: list[torch.dtype] = []

    def own_for_vectors(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter.ndim)
        return parameter.dtype if parameter.ndim == 1 else None

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        seen.extend([x.dtype, m.up.weight.dtype, m.scale.dtype])
        return m.up(x) * m.scale

    torch.manual_seed(0)
    model: Any = Made(forward, up=nn.Linear(3, 4, bias=False), scale=nn.Parameter(torch.ones(4)))
    weight = model.up.weight.detach().clone()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=own_for_vectors))
    xs = [torch.arange(6.0).view(2, 3) + rank for rank in range(2)]
    total: Any = sum(nn.functional.linear(x.bfloat16(), weight.bfloat16()).float().sum(0) / 2 for x in xs)
    model(xs[dist.get_rank()]).float().sum().backward()
    assert sorted(asked) == [1, 2]
    assert seen == [BF16, BF16, FP32]
    assert [parameter.grad.dtype for parameter in model.parameters()] == [FP32, FP32]
    assert torch.equal(whole(model.scale.grad, model.scale), total)


@on_ranks(2)
def test_an_override_that_depends_on_the_rank_is_refused_on_all_of_them() -> None:
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda one: FP32 if dist.get_rank() else None)
    with pytest.raises(ValueError, match="unit 'Weights': the ranks of its mesh lay it out differently"):
        fully_shard(Weights(), mp_policy=policy)


@on_ranks(1)
def test_an_override_to_a_third_dtype_is_refused_and_changes_nothing() -> None:
    model = Weights()
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda parameter: FP16)
    with pytest.raises(ConfigError, match=r"parameter 'one': param_dtype_override_fn returned torch.float16"):
        fully_shard(model, mp_policy=policy)
    assert type(model) is Weights


@on_ranks(1)
def test_explain_says_which_gradients_are_reduced_in_a_wider_dtype() -> None:
    policies = [MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16, BF16), MixedPrecisionPolicy()]
    pages = [str(explain(fully_shard(Weights(), mp_policy=policy))).splitlines() for policy in policies]
    (silent, asked, same) = [[line for line in page if "reduced in" in line] for page in pages]
    assert (asked, same) == ([], [])
    (line,) = silent
    assert "gradients of bfloat16 weights are reduced in float32: the default (reduce_dtype=None)" in line
    assert "reduce_dtype=torch.bfloat16 sends 50% of the bytes: Weights" in line


NARROW = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
WIDE = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, accumulate_dtype=torch.float32)
LAYOUTS = {"optim_grads": (3,), "optim_grads_params": (4,), "hsdp": (2, 2), "hfsdp": (2, 2)}


def scaled(strategy: str, mesh: tuple[int, ...], policy: MixedPrecisionPolicy) -> Any:
    """Make a model whose gradients are its inputs, exact in bf16; its two dtypes make two groups."""
    model = Made(
        lambda m, x, y: (m.weight * x).sum() + (m.other * y).sum(),
        weight=nn.Parameter(torch.zeros(37, 11)),
        other=nn.Parameter(torch.zeros(5, 3, dtype=torch.float64)),
    )
    return sharded(model, strategy, mesh=make_mesh(mesh), mp_policy=policy)


def drawn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(37, 11, generator=generator), torch.randn(5, 3, generator=generator)
    return x.bfloat16().float(), y.bfloat16().double()


def error_of(strategy: str, mesh: tuple[int, ...], policy: MixedPrecisionPolicy, microbatches: int) -> float:
    """Return the larger relative error of the two gradients after some microbatches."""
    model, ranks = scaled(strategy, mesh, policy), range(dist.get_world_size())
    for _ in range(microbatches):
        model(*drawn(dist.get_rank())).backward()
    found = []
    for index, parameter in enumerate(model.parameters()):
        wanted: Any = microbatches * sum(drawn(rank)[index].double() for rank in ranks) / len(ranks)
        found.append(float((parameter.grad.full_tensor().double() - wanted).norm() / wanted.norm()))
    return max(found)


@pytest.mark.parametrize("strategy", LAYOUTS)
@on_ranks(lambda strategy: torch.Size(LAYOUTS[strategy]).numel())
def test_sums_over_ranks_are_rounded_as_fp32_ones_under(strategy: str) -> None:
    mesh = LAYOUTS[strategy]
    for microbatches in (1, 3):
        assert error_of(strategy, mesh, WIDE, microbatches) < 2e-7
        # A sum of two terms of 8 bits has 9, so it loses little; sums of three and four terms lose more.
        assert mesh == (2, 2) or error_of(strategy, mesh, NARROW, microbatches) > 1e-3


@on_ranks(3)
def test_as_many_bytes_travel_in_as_many_collectives() -> None:
    sizes = []
    for policy in (WIDE, NARROW):
        model = scaled("optim_grads_params", (3,), policy)
        calls: list[CollectiveCall] = []
        with observe_collectives(calls.append):
            model(*drawn(dist.get_rank())).backward()
        sizes.append([(call.kind, call.num_bytes) for call in calls])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("slots", [None, "by_size"])
@on_ranks(2)
def test_the_second_buffer_is_what_explain_says(slots: str | None) -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.bfloat16, accumulate_dtype=torch.float32)
    model = sharded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), mp_policy=policy)
    meter = memory_meter()
    before = held = 0
    model.set_slot_pool(slots)
    for _ in range(3):
        before = meter.current_bytes
        loss = model(torch.randn(2, 64)).sum()
        meter.reset_peak()
        loss.backward()
        held = meter.peak_bytes
        model.zero_grad()
    report = explain(model)
    held += (report.slot_bytes if slots else 0) - before
    assert (held, meter.current_bytes - before) == (report.backward_peak.num_bytes, 0)


@on_ranks(2)
def test_accumulate_dtype_with_unsupported_settings_is_refused_by_name() -> None:
    both_axes = Placements((0, 1), (Flat(), Flat()), (Flat(), Flat()), (Flat(), Flat()))
    with pytest.raises(ConfigError, match=r"(?s)accumulate_dtype=torch.float32.*exactly one axis"):
        fully_shard(nn.Linear(3, 5), make_mesh((2, 1)), both_axes, mp_policy=WIDE)
    model = scaled("optim_grads_params", (2,), WIDE)
    with pytest.raises(ConfigError, match="unit 'Made': a custom reduce-scatter adds up by itself"):
        model.set_custom_reduce_scatter(lambda *_: None)
