"""The checksum of a model, and of each optimizer's moments, is the same for each sharding."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from megatron_fsdp import AdamW, ConfigError, MixedPrecisionPolicy, checksum
from megatron_fsdp.observability.checksum import parameter_checksums, unit_checksums
from tests.harness import run_ranks
from tests.harness.oracle import sharded

RUNS = [
    ((1,), "optim_grads_params"),
    ((2,), "no_shard"),
    ((3,), "optim"),
    ((3,), "optim_grads"),
    ((3,), "optim_grads_params"),
    ((2, 2), "hsdp"),
    ((2, 2), "hfsdp"),
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch's AdamW": functools.partial(torch.optim.AdamW, lr=1e-2),
    "torch's SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "AdamW": functools.partial(AdamW, lr=1e-2),
    "AdamW with int8 moments": functools.partial(AdamW, lr=1e-2, moments="int8"),
}


class Tied(nn.Module):
    """Odd sizes, a bias of one element (no rank but one has any), one weight of two names, one beyond 4096 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 13)
        self.inner = nn.Sequential(nn.Linear(13, 331), nn.GELU(), nn.Linear(331, 13))
        self.head = nn.Linear(13, 29, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Linear(1, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.inner(self.embedding(tokens)))
        return logits * self.scale(torch.ones(1))


def made() -> Tied:
    torch.manual_seed(3)
    return Tied()


def sharded_tied(shape: tuple[int, ...], strategy: str, policy: MixedPrecisionPolicy | None = None) -> Tied:
    return sharded(made(), strategy, units=lambda model: [model.inner], mesh=shape, mp_policy=policy)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step with gradients that are set without sums, so that every run has the same bits."""
    generator = torch.Generator().manual_seed(5)
    parameter: Any
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if hasattr(parameter, "device_mesh"):
            parameter.grad = torch.zeros_like(parameter)
            whole = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad.copy_(whole)
        else:
            parameter.grad = gradient
    optimizer.step()


def sums(shape: tuple[int, ...], strategy: str, name: str, precision: str) -> dict[str, int]:
    policy = MixedPrecisionPolicy(moments="int8") if name.endswith("int8 moments") else None
    if precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded_tied(shape, strategy, policy)
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    found = parameter_checksums(model, optimizer)
    assert checksum(model, optimizer) == sum(found.values()) % 2**64
    assert checksum(model, optimizer) != checksum(model)
    return found


@functools.cache
def plain_sums(name: str) -> dict[str, int]:
    model = made()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    return parameter_checksums(model, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_moments_have_the_plain_models_checksum_for_every_sharding(name: str) -> None:
    wanted = plain_sums(name)
    assert list(wanted) == [key for key, _ in made().named_parameters()]
    # Each strategy runs with two of the optimizers.
    for shape, strategy in RUNS[[*OPTIMIZERS].index(name) % 2 :: 2]:
        for found in run_ranks(torch.Size(shape).numel(), sums, shape, strategy, name, "fp32"):
            assert found == wanted, (shape, strategy)


def test_compute_in_bf16_does_not_change_the_checksum_of_main_weights() -> None:
    for found in run_ranks(2, sums, (2,), "optim_grads_params", "torch's AdamW", "bf16"):
        assert found == plain_sums("torch's AdamW")


def changed(what: Callable[[Any], None]) -> dict[str, int]:
    model = made()
    with torch.no_grad():
        what(model)
    return parameter_checksums(model)


def test_a_flipped_bit_a_swap_or_a_new_name_changes_one_parameters_checksum() -> None:
    def flip(model: Tied) -> None:
        model.inner[0].weight.view(-1).view(torch.int32)[4200] ^= 1

    def swap(model: Any) -> None:
        model.inner[0].weight[:2] = model.inner[0].weight[:2].flip(0)

    wanted = parameter_checksums(made())
    for what in (flip, swap):
        found = changed(what)
        assert {name for name, value in found.items() if wanted[name] != value} == {"inner.0.weight"}
    twins = nn.ModuleList([nn.Linear(3, 3, bias=False)] * 1 + [nn.Linear(3, 3, bias=False)])
    twins[1] = copy.deepcopy(twins[0])
    assert len(set(parameter_checksums(twins).values())) == 2


def between_forward_and_backward() -> tuple[int, int]:
    model = sharded_tied((2,), "optim_grads_params")
    before = checksum(model)
    model(torch.arange(4)).sum().backward()
    return before, checksum(model)


def test_a_checksum_after_backward_is_that_before_forward() -> None:
    for before, after in run_ranks(2, between_forward_and_backward):
        assert before == after == checksum(made())


def test_a_dtensor_that_fully_shard_did_not_make_is_refused_by_name() -> None:
    for message in run_ranks(1, refused):
        assert "'weight' is a DTensor that fully_shard did not make" in message


def refused() -> str:
    model = nn.Linear(3, 3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
    with pytest.raises(ConfigError) as error:
        checksum(model)
    return str(error.value)


def sums_by_unit() -> dict[str, int]:
    return unit_checksums(sharded_tied((2,), "optim_grads_params"))


def test_sums_of_units_are_those_of_their_parameters() -> None:
    each = parameter_checksums(made())
    wanted = {
        unit: sum(number for name, number in each.items() if name.startswith("inner.") == (unit == "inner")) % 2**64
        for unit in ("", "inner")
    }
    assert run_ranks(2, sums_by_unit) == [wanted, wanted]
    assert unit_checksums(made()) == {"": sum(each.values()) % 2**64}
