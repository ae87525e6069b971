"""A reduction once per step uses the reduce dtype; microbatches are summed in the dtype of ``main_grad``."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer.events import listen
from megatron_fsdp import MixedPrecisionPolicy, Placements, fully_shard, microbatch
from tests.certify.models import ReadsEarly
from tests.harness import run_ranks
from tests.harness.models import WIDTH, make_mesh

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STRATEGIES = {
    "no_shard": ((3,), Placements.no_shard(0)),
    "optim": ((3,), Placements.optim(0)),
    "hsdp": ((3, 1), Placements.hsdp(0, 1)),
    "hfsdp": ((3, 1), Placements.hfsdp(0, 1)),
}


@dataclass(frozen=True)
class Wire:
    """The policy, the dtype that gradients then travel in, and the dtype of sums."""

    policy: MixedPrecisionPolicy
    travels: torch.dtype
    rests: torch.dtype = FP32
    divisor: float = 3.0


WIRES = {
    "bf16": Wire(MixedPrecisionPolicy(reduce_dtype=BF16), BF16),
    "fp16": Wire(MixedPrecisionPolicy(reduce_dtype=FP16), FP16),
    # A twentieth of these averages are subnormal in fp16.
    "fp16, many ranks": Wire(MixedPrecisionPolicy(reduce_dtype=FP16), FP16, divisor=2.0**13),
    "bf16, added up in fp32": Wire(MixedPrecisionPolicy(reduce_dtype=BF16, accumulate_dtype=FP32), FP32),
    "fp32, of sums in bf16": Wire(MixedPrecisionPolicy(reduce_dtype=FP32, main_grads_dtype=BF16), FP32, BF16),
}
EPSILONS = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}
CASES = [(strategy, wire) for strategy in STRATEGIES for wire in WIRES]


class Odd(nn.Module):
    """Layers of sizes that three ranks do not share evenly, with a vector of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
        self.last = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


def loss_of(model: nn.Module, rank: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + index)
    return model(torch.randn(4, WIDTH, generator=generator)).square().sum()


@dataclass
class Seen:
    gradients: list[torch.Tensor]
    dtypes: set[torch.dtype]


def train_all() -> list[Seen]:
    return [train(*STRATEGIES[strategy], WIRES[wire]) for strategy, wire in CASES]


def train(shape: tuple[int, ...], placements: Placements, wire: Wire) -> Seen:
    model: Any = Odd()
    for part in (*model.layers[::2], model):
        fully_shard(part, make_mesh(shape), placements, mp_policy=wire.policy).set_gradient_divide_factor(wire.divisor)
    dtypes: set[torch.dtype] = set()

    def hear(action: str, subject: Any) -> None:
        if action == "transfer" and subject.kind in ("all_reduce", "reduce_scatter"):
            dtypes.update(tensor.dtype for tensor in subject.reads)

    with listen(hear):
        for index in range(2):
            with microbatch(model, index == 1):
                loss_of(model, dist.get_rank(), index).backward()
    return Seen([parameter.grad.full_tensor() for parameter in model.parameters()], dtypes)


@functools.cache
def seen() -> list[list[Seen]]:
    return run_ranks(3, train_all)


@functools.cache
def plain() -> list[list[torch.Tensor]]:
    """Return the plain model's gradients of each rank's microbatches."""
    found = []
    for rank in range(3):
        for index in range(2):
            model = Odd()
            loss_of(model, rank, index).backward()
            found.append([parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None])
    return found


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_sums_of_microbatches_are_reduced_in_the_reduce_dtype_and_rounded_once(
    case: tuple[str, str],
) -> None:
    wire = WIRES[case[1]]
    for rank in (rank[CASES.index(case)] for rank in seen()):
        assert rank.dtypes == {wire.travels}
        for index, found in enumerate(rank.gradients):
            assert found.dtype is wire.rests
            terms = torch.stack([each[index] for each in plain()]) / wire.divisor
            # A reduction rounds each term and two sums; microbatches round two terms and the end. Shards are packed in
            # the reduce dtype. Backward itself has some FP32 rounding errors.
            packed = EPSILONS[wire.policy.reduce_dtype or FP32] * (case[0] in ("hsdp", "hfsdp"))
            rounding = 3 * EPSILONS[wire.travels] + 3 * EPSILONS[wire.rests] + packed + 2.0**-20
            allowed = terms.abs().sum(0) * rounding
            off = (found.double() - terms.sum(0)).abs()
            assert (off <= allowed).all(), (off / allowed).max()


def close_twice(strategy: str) -> tuple[list[torch.Tensor], int]:
    """Return gradients, and how often the rest of the unit's reduction was issued."""
    shape, placements = STRATEGIES[strategy]
    model: Any = ReadsEarly()
    for part in (model.first, model.late, model):
        fully_shard(part, make_mesh(shape), placements, mp_policy=WIRES["bf16"].policy)
    issued: list[str] = []

    def hear(action: str, subject: Any) -> None:
        if action == "final":
            issued.append(subject.name)

    with listen(hear):
        loss_of(model, dist.get_rank(), 0).backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()], issued.count("late")


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_gradient_after_its_unit_closed_is_added_to_the_reduced_ones(strategy: str) -> None:
    terms = []
    for rank in range(3):
        model = ReadsEarly()
        loss_of(model, rank, 0).backward()
        terms.append([parameter.grad.double() / 3 for parameter in model.parameters() if parameter.grad is not None])
    for gradients, num_issued in run_ranks(3, close_twice, strategy):
        assert num_issued == 2
        for found, *each in zip(gradients, *terms, strict=True):
            allowed = torch.stack(each).abs().sum(0) * 3 * (EPSILONS[BF16] + 2.0**-20)
            assert ((found.double() - torch.stack(each).sum(0)).abs() <= allowed).all()
