"""Which dtype each copy of weights and gradients has while a model trains, and what that does to its numbers."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from dbuffer import observe_collectives
from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch
from tests.harness import on_ranks, run_ranks
from tests.harness.models import WIDTH, Block, Stack, inputs
from tests.harness.oracle import whole

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


@dataclass(frozen=True)
class Dtypes:
    """What one step shows.

    Attributes:
        seen: in forward. output, index: of what the module returned.
        parameter, gradient: of the sharded weight as the trainer sees them.
        stepped: gradient and state dtype inside ``optimizer.step``.
        element_bytes: of each kind of collective, for the trainable weights.
    """

    seen: dict[str, torch.dtype]
    output: torch.dtype
    index: torch.dtype
    parameter: torch.dtype
    gradient: torch.dtype
    frozen: torch.dtype
    stepped: tuple[torch.dtype, ...]
    element_bytes: dict[str, set[float]] = field(default_factory=dict)


def dtypes_of_a_step(own: torch.dtype, policy: Any) -> Dtypes:
    model = Probe(own)
    fully_shard(model, mp_policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.SGD([model.linear.weight, model.linear.bias], lr=0.1, momentum=0.9))
    group = next(group for group in model.parameter_groups if group.requires_grad)
    sizes: dict[str, set[float]] = {}

    # Integers and frozen weights travel with them, as the bytes that they are.
    others = [each for each in model.parameter_groups if each is not group]
    rest = {"all_gather": sum(each.gathered.nbytes for each in others)}

    def note(call: Any) -> None:
        sizes.setdefault(call.kind, set()).add((call.num_bytes - rest.get(call.kind, 0)) / group.plan.numel)

    x, scale = inputs(dist.get_rank(), 0), torch.ones(())
    output = model(x, scale=scale, index=torch.tensor([1]))
    model.reshard()
    with observe_collectives(note):
        output["output"].float().square().mean().backward()
    gradient = model.linear.weight.grad
    assert gradient is not None
    optimizer.step()
    state = optimizer.state[model.linear.weight]["momentum_buffer"]
    return Dtypes(
        model.seen,
        output["output"].dtype,
        output["index"].dtype,
        model.linear.weight.dtype,
        gradient.dtype,
        model.frozen.dtype,
        (state.dtype,),
        sizes,
    )


POLICIES: dict[str, tuple[torch.dtype, Any]] = {
    "none": (FP32, None),
    "compute": (FP32, MixedPrecisionPolicy(BF16)),
    "all six": (BF16, MixedPrecisionPolicy(BF16, FP32, FP32, False, FP32, FP32)),
    "narrow gradients": (FP32, MixedPrecisionPolicy(BF16, main_grads_dtype=BF16)),
    "main weights": (BF16, MixedPrecisionPolicy(main_params_dtype=FP32)),
    "torch": (FP32, TorchPolicy(BF16, FP32, FP32)),
}


def all_dtypes() -> dict[str, Dtypes]:
    return {name: dtypes_of_a_step(*arguments) for name, arguments in POLICIES.items()}


@pytest.fixture(scope="module")
def shown() -> dict[str, Dtypes]:
    return run_ranks(2, all_dtypes)[1]


WANTED_WEIGHTS = {
    "none": FP32,
    "compute": BF16,
    "all six": BF16,
    "narrow gradients": BF16,
    "main weights": BF16,
    "torch": BF16,
}


@pytest.mark.parametrize(("name", "wanted"), WANTED_WEIGHTS.items())
def test_forward_sees_weights_in_the_compute_dtype(shown: dict[str, Dtypes], name: str, wanted: torch.dtype) -> None:
    assert shown[name].seen["weight"] is shown[name].seen["frozen"] is wanted


@pytest.mark.parametrize("name", ["compute", "torch", "narrow gradients"])
def test_floating_point_inputs_are_cast_to_the_compute_dtype(shown: dict[str, Dtypes], name: str) -> None:
    assert shown[name].seen["input"] is shown[name].seen["keyword"] is BF16


@pytest.mark.parametrize("name", ["none", "all six", "main weights"])
def test_inputs_stay_as_they_are_without_a_compute_dtype_or_when_told_so(shown: dict[str, Dtypes], name: str) -> None:
    assert shown[name].seen["input"] is shown[name].seen["keyword"] is FP32


@pytest.mark.parametrize("name", POLICIES)
def test_integers_are_never_cast(shown: dict[str, Dtypes], name: str) -> None:
    assert shown[name].seen["index"] is shown[name].seen["table"] is shown[name].index is torch.int64


@pytest.mark.parametrize(("name", "wanted"), [("compute", BF16), ("all six", FP32), ("torch", FP32)])
def test_outputs_are_cast_when_an_output_dtype_is_given(
    shown: dict[str, Dtypes], name: str, wanted: torch.dtype
) -> None:
    assert shown[name].output is wanted


@pytest.mark.parametrize("name", POLICIES)
def test_the_trainer_sees_fp32_main_weights(shown: dict[str, Dtypes], name: str) -> None:
    assert shown[name].parameter is FP32


@pytest.mark.parametrize("name", POLICIES)
def test_frozen_weights_get_no_wider_copy(shown: dict[str, Dtypes], name: str) -> None:
    assert shown[name].frozen is POLICIES[name][0]


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_rest_in_their_own_dtype(shown: dict[str, Dtypes], name: str) -> None:
    assert shown[name].gradient is (BF16 if name == "narrow gradients" else FP32)


@pytest.mark.parametrize("name", POLICIES)
def test_optimizer_state_has_the_dtype_of_the_main_weights(shown: dict[str, Dtypes], name: str) -> None:
    assert shown[name].stepped == (FP32,)


@pytest.mark.parametrize(("name", "wanted"), [("none", 4.0), ("compute", 2.0), ("all six", 2.0), ("main weights", 2.0)])
def test_weights_are_gathered_in_the_compute_dtype(shown: dict[str, Dtypes], name: str, wanted: float) -> None:
    assert shown[name].element_bytes["all_gather"] == {wanted}


WANTED_REDUCTIONS = {
    "none": 4.0,
    "compute": 4.0,
    "all six": 4.0,
    "narrow gradients": 2.0,
    "main weights": 2.0,
    "torch": 4.0,
}


@pytest.mark.parametrize(("name", "wanted"), WANTED_REDUCTIONS.items())
def test_gradients_are_reduced_in_the_reduce_dtype_or_that_of_the_gradients(
    shown: dict[str, Dtypes], name: str, wanted: float
) -> None:
    assert shown[name].element_bytes["reduce_scatter"] == {wanted}


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    return model(inputs(rank, 0).to(BF16)).float().square().sum()


@pytest.mark.parametrize("own", [FP32, BF16], ids=["from fp32", "from bf16"])
@on_ranks(2)
def test_bf16_gradients_reduced_in_fp32_are_exactly_the_fp32_mean_of_every_ranks_own(own: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(BF16, FP32, main_params_dtype=FP32)
    torch.manual_seed(3)
    plain = Stack(Block(), Block(hidden=5)).to(BF16)
    model = copy.deepcopy(plain).to(own)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
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


class Weight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def reduced_gradient(values: tuple[float, ...], policy: MixedPrecisionPolicy) -> list[float]:
    model = Weight(FP32)
    fully_shard(model, mp_policy=policy)
    model(torch.full((5,), values[dist.get_rank()])).sum().backward()
    return [float(value) for value in whole(model.weight.grad, model.weight)]


def test_a_small_gradient_of_one_rank_survives_a_reduction_in_fp32() -> None:
    values = (1.0, 2.0**-10)
    (found, _) = run_ranks(2, reduced_gradient, values, MixedPrecisionPolicy(BF16, FP32))
    assert found == [(1.0 + 2.0**-10) / 2] * 5


def test_a_small_gradient_of_one_rank_is_rounded_away_by_a_reduction_in_bf16() -> None:
    values = (1.0, 2.0**-10)
    (found, _) = run_ranks(2, reduced_gradient, values, MixedPrecisionPolicy(BF16, BF16))
    assert found == [0.5] * 5


def test_a_sum_beyond_the_range_of_fp16_does_not_overflow_on_the_way_to_its_mean() -> None:
    values = (20_000.0, 25_000.0, 30_000.0, 25_000.0)
    for found in run_ranks(4, reduced_gradient, values, MixedPrecisionPolicy(FP16, FP16, main_grads_dtype=FP32)):
        assert found == pytest.approx([25_000.0] * 5, rel=2**-10)


def accumulated_gradient(policy: MixedPrecisionPolicy) -> list[float]:
    model = Weight(BF16)
    fully_shard(model, mp_policy=policy)
    values = [1.0] + [2.0**-9] * 64
    for index, value in enumerate(values):
        with microbatch(model, index == len(values) - 1):
            model(torch.full((5,), value, dtype=BF16)).sum().backward()
    return [float(value) for value in whole(model.weight.grad, model.weight)]


def test_small_microbatches_add_up_in_fp32_main_gradients() -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=FP32)
    assert run_ranks(2, accumulated_gradient, policy) == [[1.125] * 5] * 2


def test_small_microbatches_vanish_in_bf16_main_gradients() -> None:
    assert run_ranks(2, accumulated_gradient, MixedPrecisionPolicy()) == [[1.0] * 5] * 2


def weights_after_small_steps(policy: MixedPrecisionPolicy) -> list[float]:
    model = Weight(BF16)
    fully_shard(model, mp_policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=2.0**-9))
    for _ in range(64):
        model(torch.ones(5, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [float(value) for value in model(torch.ones(5, dtype=BF16))]


def test_small_steps_reach_bf16_weights_through_fp32_main_weights() -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=FP32)
    assert run_ranks(2, weights_after_small_steps, policy) == [[0.875] * 5] * 2


def test_small_steps_are_lost_without_main_weights() -> None:
    # 1 - 2**-9 lies halfway between two bf16 numbers and rounds to the even one, which is 1.
    assert run_ranks(2, weights_after_small_steps, MixedPrecisionPolicy()) == [[1.0] * 5] * 2


@on_ranks(2)
def test_units_of_one_model_may_compute_in_different_dtypes() -> None:
    model = Stack(Block(), Block())
    fully_shard(model.layers[0], mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP32))
    fully_shard(model.layers[1])
    fully_shard(model)
    seen: list[torch.dtype] = []

    def note(module: nn.Module, args: object) -> None:
        seen.append(module.weight.dtype)

    for layer in model.layers:
        layer.up.register_forward_pre_hook(note)
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert seen == [BF16, FP32]
