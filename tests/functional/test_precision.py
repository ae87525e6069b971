"""Which dtype each copy of weights and gradients has while a model trains, and what that does to its numbers."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from dbuffer import observe_collectives
from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch
from tests.harness import on_ranks
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
class Wanted:
    """How a probe is made, and what a step of it has to show; bytes are of an element of a trained weight."""

    own: torch.dtype
    policy: Any
    weight: torch.dtype
    inputs: torch.dtype
    gathered_bytes: float
    reduced_bytes: float
    gradient: torch.dtype = FP32
    output: torch.dtype | None = None


POLICIES = {
    "none": Wanted(FP32, None, FP32, FP32, 4.0, 4.0),
    "compute": Wanted(FP32, MixedPrecisionPolicy(BF16), BF16, BF16, 2.0, 4.0, output=BF16),
    "all six": Wanted(
        BF16, MixedPrecisionPolicy(BF16, FP32, FP32, False, FP32, FP32), BF16, FP32, 2.0, 4.0, output=FP32
    ),
    "narrow gradients": Wanted(FP32, MixedPrecisionPolicy(BF16, main_grads_dtype=BF16), BF16, BF16, 2.0, 2.0, BF16),
    "main weights": Wanted(BF16, MixedPrecisionPolicy(main_params_dtype=FP32), BF16, FP32, 2.0, 2.0),
    "torch": Wanted(FP32, TorchPolicy(BF16, FP32, FP32), BF16, BF16, 2.0, 4.0, output=FP32),
}


@pytest.mark.parametrize("name", POLICIES)
@on_ranks(2)
def test_weights_inputs_outputs_gradients_and_what_travels_have_the_dtypes_that_a_policy_says(name: str) -> None:
    wanted = POLICIES[name]
    model = Probe(wanted.own)
    fully_shard(model, mp_policy=wanted.policy)
    optimizer = fully_shard_optimizer(torch.optim.SGD([model.linear.weight, model.linear.bias], lr=0.1, momentum=0.9))
    group = next(group for group in model.parameter_groups if group.requires_grad)
    # Integers and frozen weights travel with them, as the bytes that they are.
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
    # The trainer sees FP32 main weights and state; what is frozen gets no wider copy.
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


@pytest.mark.parametrize(
    ("values", "policy", "wanted"),
    [
        # A small gradient of one rank survives a reduction in FP32, and is rounded away by one in bf16.
        ((1.0, 2.0**-10), MixedPrecisionPolicy(BF16, FP32), (1.0 + 2.0**-10) / 2),
        ((1.0, 2.0**-10), MixedPrecisionPolicy(BF16, BF16), 0.5),
        # A sum beyond the range of FP16 does not overflow on the way to its mean.
        ((2e4, 2.5e4, 3e4, 2.5e4), MixedPrecisionPolicy(FP16, FP16, main_grads_dtype=FP32), 2.5e4),
    ],
)
@on_ranks(lambda values: len(values))
def test_gradients_are_reduced_in_the_dtype_asked_for(
    values: tuple[float, ...], policy: MixedPrecisionPolicy, wanted: float
) -> None:
    model = Weight(FP32)
    fully_shard(model, mp_policy=policy)
    model(torch.full((5,), values[dist.get_rank()])).sum().backward()
    tolerance = 0.0 if policy.reduce_dtype is not FP16 else 2**-10
    assert whole(model.weight.grad, model.weight).tolist() == pytest.approx([wanted] * 5, rel=tolerance)


@pytest.mark.parametrize(("dtype", "wanted"), [(FP32, 1.125), (None, 1.0)])
@on_ranks(2)
def test_small_microbatches_add_up_in_fp32_main_gradients_alone(dtype: torch.dtype | None, wanted: float) -> None:
    model = Weight(BF16)
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
    model = Weight(BF16)
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

    def note(module: nn.Module, args: object) -> None:
        seen.append(module.weight.dtype)

    for layer in model.layers:
        layer.up.register_forward_pre_hook(note)
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert seen == [BF16, FP32]
