"""Weights gathered in 8 bits have the values given by the formula, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import Row, memory_meter, observe_collectives
from megatron_fsdp import AdamW, MixedPrecisionPolicy, Placements, explain, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.oracle import sharded, units_of, whole


class Net(nn.Module):
    """Matrices, an expert weight, and biases, which are gathered unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 64, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 64, 32) * 0.1)
        self.last = nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.last(torch.einsum("bi,eij->bj", x, self.experts))


@dataclass(frozen=True)
class Job:
    """The number of units other than the root, whether the mesh has two axes, and whether rows may be cut anywhere."""

    units: tuple[str, ...] = ()
    is_hybrid: bool = False
    cuts_rows: bool = False
    dtype: torch.dtype | None = None

    def build(self) -> Any:
        torch.manual_seed(0)
        model = sharded(
            Net(),
            "hsdp" if self.is_hybrid else "optim_grads_params",
            units=lambda model: [getattr(model, name) for name in self.units],
            mp_policy=MixedPrecisionPolicy(self.dtype, gather_dtype="int8_block"),
            granularity=Row() if self.cuts_rows else None,
            reshard_after_forward=True,
        )
        for unit in units_of(model):
            unit.set_gradient_divide_factor(1)
        return model


def backward(model: nn.Module, step: int) -> float:
    """Only rank 0 has gradients other than zero, so every sum over ranks is exact: its own."""
    torch.manual_seed(step)
    loss = model(torch.randn(5, 64)).square().mean()
    (loss * (dist.get_rank() == 0)).backward()
    return float(loss.detach())


def train(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = job.build()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: whole(p, p).detach().clone() for name, p in model.named_parameters()}


def used_weights(job: Job) -> tuple[dict[str, torch.Tensor], ...]:
    """Return main weights, and the weights that compute uses in forward and in backward."""
    model = job.build()
    seen: list[dict[str, torch.Tensor]] = []

    def note() -> None:
        seen.append({name: whole(p, p).detach().clone() for name, p in model.named_parameters()})

    note()
    forward = Net.forward

    def noted(self: Net, x: torch.Tensor) -> torch.Tensor:
        note()
        output = forward(self, x)
        output.register_hook(lambda _: note())
        # This hook runs behind the output's hook, which gathers.
        return output.clone()

    with mock.patch.object(Net, "forward", noted):
        model(torch.randn(3, 64)).sum().backward()
    return tuple(seen)


def traffic(job: Job) -> tuple[list[str], list[str], int, int]:
    """Return the collectives of one step, observed and from ``explain``; and the bytes at rest from both."""
    before = memory_meter().current_bytes
    model = job.build()
    rest = memory_meter().current_bytes - before
    optimizer = AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    calls: list[str] = []
    with observe_collectives(lambda call: calls.append(f"{call.kind} {call.num_bytes}")):
        backward(model, 1)
        optimizer.step()
    report: Any = explain(model)
    said = [f"{each.kind} {each.num_bytes // each.count}" for each in report.collectives for _ in range(each.count)]
    return sorted(calls), sorted(said), rest, report.persistent_bytes


def test_any_ranks_and_units_train_to_the_same_bits() -> None:
    ((losses, weights),) = run_ranks(1, train, Job())
    others = [
        (3, Job(("second", "first"))),
        (4, Job(("first",), is_hybrid=True, cuts_rows=True)),
        (4, Job(cuts_rows=True)),
    ]
    for num_ranks, job in others:
        for found, found_weights in run_ranks(num_ranks, train, job):
            assert found == losses
            assert all(torch.equal(found_weights[name], weight) for name, weight in weights.items())


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of largest / 127, in blocks of 256 elements."""
    parts = []
    for block in weight.flatten().split(256):
        scale = block.abs().max() / 127.0
        parts.append(torch.tensor([float(round(value)) for value in (block / scale).tolist()]) * scale)
    return torch.cat(parts).view_as(weight)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@on_ranks(3)
def test_compute_sees_what_the_formula_gives(dtype: torch.dtype | None) -> None:
    main, *seen = used_weights(Job(cuts_rows=True, dtype=dtype))
    assert len(seen) == 2
    for name, weight in main.items():
        wanted = weight if weight.ndim < 2 else in_blocks(weight)
        assert all(torch.equal(found[name], wanted.to(dtype or torch.float32)) for found in seen), name


@on_ranks(2)
def test_a_gather_takes_a_byte_and_scales_per_element_as_explain_says() -> None:
    calls, said, rest, said_rest = traffic(Job(("first", "second"), dtype=torch.bfloat16))
    assert (calls, rest) == (said, said_rest)
    assert not any(call.startswith("all_reduce") for call in calls)
    calls, said, rest, said_rest = traffic(Job(dtype=torch.bfloat16))
    assert (calls, rest) == (said, said_rest)
    largest = max(int(call.split()[1]) for call in calls if call.startswith("all_gather"))
    parameters = list(Net().parameters())
    numel = sum(p.numel() for p in parameters if p.ndim > 1)
    # The biases are gathered with them in bf16; their shards begin at multiples of 16 bytes.
    others = 2 * sum(p.numel() for p in parameters if p.ndim == 1)
    assert numel <= largest - others <= 1.035 * numel + 2 * 256 * len(parameters)


@on_ranks(2)
def test_int8_gather_refuses_replicated_weights_with_the_fix() -> None:
    policy = MixedPrecisionPolicy(gather_dtype="int8_block")
    with pytest.raises(
        ValueError, match=r"gather_dtype='int8_block'.*needs weights that are sharded.*fix: .*optim_grads_params"
    ):
        fully_shard(Net(), placements=Placements.optim(), mp_policy=policy)
