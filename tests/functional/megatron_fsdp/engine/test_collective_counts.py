"""The number of collectives in a training step: one gather per unit and direction, one reduction per unit."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import CollectiveCall, Region, observe_collectives
from megatron_fsdp import fully_shard_optimizer, microbatch, no_sync
from megatron_fsdp.build.builder import unit_regions
from tests.harness import on_ranks
from tests.harness.models import Block, Headed, Made, Stack, make_mesh, squared
from tests.harness.oracle import units_of
from tests.harness.twins import Twins, sharded

NUM_UNITS = 4


def four_units(freeze: Callable[[list[Any]], Iterable[nn.Module]] = lambda layers: (), kept: str = "") -> Any:
    """Return a stack of units, some with frozen parts, that keep weights after forward or backward."""
    model: Any = Stack(*(Block(hidden=5 + 4 * index) for index in range(NUM_UNITS)))
    for module in freeze(list(model.layers)):
        module.requires_grad_(False)
    sharded(model)
    if kept:
        getattr(model, f"set_reshard_after_{kept}")(False)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "four units": four_units,
    "root parameters": lambda: sharded(Headed(Block(hidden=5), Block(hidden=9))),
    "a frozen unit at the start": lambda: four_units(lambda layers: [layers[0]]),
    "frozen and trainable parameters in each unit": lambda: four_units(lambda layers: [one.up for one in layers]),
    "weights kept after forward": lambda: four_units(kept="forward"),
    "weights kept after backward": lambda: four_units(kept="backward"),
}
Counts = tuple[int, int, int, int]
"""Gathers in forward, and in backward, reductions in backward, and all else."""


def count(name: str, microbatches: int = 1, *, is_synced: bool = True) -> list[Counts]:
    model = MODELS[name]()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    counts: list[Counts] = []
    for step in range(3):
        for index in range(microbatches):
            is_last = index == microbatches - 1
            calls: tuple[list[str], ...] = ([], [])
            with microbatch(model, is_last) if is_synced or is_last else no_sync(model):
                with observe_collectives(lambda call: calls[0].append(call.kind)):  # noqa: B023
                    loss = squared(model, dist.get_rank(), step)
                with observe_collectives(lambda call: calls[1].append(call.kind)):  # noqa: B023
                    loss.backward()
            before, after = map(Counter, calls)
            known = before["all_gather"], after["all_gather"], after["reduce_scatter"]
            counts.append((*known, before.total() + after.total() - sum(known)))
        with observe_collectives(lambda call: pytest.fail(f"{call.kind} in a step")):
            optimizer.step()
            optimizer.zero_grad()
    return counts


@on_ranks(2)
def test_every_microbatch_issues_exactly_the_collectives_that_it_needs() -> None:
    wanted = {
        "root parameters": (3, 1, 3, 0),
        "a frozen unit at the start": (4, 2, 3, 0),
        "frozen and trainable parameters in each unit": (4, 3, 4, 0),
        "weights kept after forward": (4, 0, 4, 0),
    }
    assert {name: set(count(name, 2)) for name in wanted} == {name: {one} for name, one in wanted.items()}
    # Kept weights serve the next microbatch until the optimizer steps.
    assert count("weights kept after backward", 2) == [(4, 3, 4, 0), (0, 3, 4, 0)] * 3
    assert count("four units", 3, is_synced=False) == [(4, 3, 0, 0), (4, 3, 0, 0), (4, 3, 4, 0)] * 3


@on_ranks(1)
def test_one_rank_alone_issues_no_collective() -> None:
    assert {name: set(count(name, 2)) for name in MODELS} == {name: {(0, 0, 0, 0)} for name in MODELS}


def mixed() -> nn.Module:
    """Return a unit of many groups: two dtypes, a frozen part, and rows whose common layouts all need padding."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        total = m.wide.sum() + (m.odd**2).sum() + m.narrow.sin().sum()
        return x * (total + m.double_rows.cos().sum() + m.frozen.sum()).float() / 1000

    sizes = {"wide": (5, 1152), "odd": (7, 430), "narrow": (11, 6)}
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in sizes.items()}
    parameters["double_rows"] = nn.Parameter(torch.randn(3, 34, dtype=torch.float64))
    return Made(forward, **parameters, frozen=nn.Parameter(torch.randn(13, 10), requires_grad=False))


def region_each(shapes: Sequence[Sequence[int]], *rest: Any) -> tuple[Region, ...]:
    """Give every tensor its own region, as models on thousands of ranks may have."""
    regions = [unit_regions([shape], *rest)[0] for shape in shapes]
    return tuple(replace(region, indices=(index,)) for index, region in enumerate(regions))


def check_mixed(strategy: str, shape: tuple[int, ...], wanted: dict[str, int]) -> None:
    """Train two units of two microbatches against a plain model; the first step makes more collectives."""
    with mock.patch("megatron_fsdp.build.builder.unit_regions", region_each):
        twins = Twins(lambda: nn.Sequential(mixed(), mixed()), strategy, mesh=make_mesh(shape))
    assert len(twins.model[0].parameter_groups) == 5
    # Step the plain model by hand: after a step of any optimizer, all weights count as changed and are gathered again.
    optimizer = fully_shard_optimizer(torch.optim.SGD(twins.model.parameters(), lr=1e-2))
    for step in range(3):
        calls: list[str] = []
        with observe_collectives(lambda call: calls.append(call.kind)):  # noqa: B023
            for index in range(2):
                with microbatch(twins.model, index == 1):
                    squared(twins.model, dist.get_rank(), 10 * step + index).backward()
            optimizer.step()
        optimizer.zero_grad()
        for index in range(2):
            twins.plain_backward(10 * step + index)
        with torch.no_grad():
            for parameter in twins.plain.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-2 * parameter.grad
        twins.plain.zero_grad()
        assert step == 0 or Counter(calls) == wanted
    apart = twins.weights_apart()
    assert apart < 1e-5


# The last unit of a forward keeps its weights for its backward.
ZERO3 = {"all_gather": 6, "reduce_scatter": 4}
MIXED = [
    ("optim_grads_params", (2,), ZERO3),
    ("optim_grads_params", (3,), ZERO3),
    ("optim_grads_params", (4,), ZERO3),
    ("optim_grads", (3,), {"all_gather": 2, "reduce_scatter": 4}),
    ("optim", (3,), {"all_gather": 2, "reduce_scatter": 2}),
    # One all-reduce for each dtype.
    ("no_shard", (3,), {"all_reduce": 4}),
    ("hsdp", (2, 2), ZERO3 | {"all_reduce": 4}),
    ("hfsdp", (2, 2), {"all_gather": 6 + 2, "reduce_scatter": 4 + 2}),
]


@pytest.mark.parametrize(("strategy", "shape", "wanted"), MIXED, ids=str)
@on_ranks(lambda shape: math.prod(shape))
def test_a_unit_of_many_groups_is_gathered_and_reduced_by_one_collective_each(
    strategy: str, shape: tuple[int, ...], wanted: dict[str, int]
) -> None:
    check_mixed(strategy, shape, wanted)


@on_ranks(2)
def test_groups_travel_apart_where_that_is_switched_off() -> None:
    with mock.patch("dbuffer.collectives.parts.is_off", "together".__eq__):
        # One of the five groups is frozen.
        check_mixed("optim_grads_params", (2,), {"all_gather": 6 * 5, "reduce_scatter": 4 * 4})


@on_ranks(2)
def test_a_step_gathers_weights_twice_the_last_unit_once_and_reduces_once() -> None:
    model, totals = four_units(), Counter[str]()

    def add(call: CollectiveCall) -> None:
        totals[call.kind] += call.num_bytes

    with observe_collectives(add):
        squared(model, dist.get_rank(), 0).backward()
    sizes = [group.plan.numel * 4 for unit in units_of(model) for group in unit.parameter_groups]
    assert totals == {"all_gather": 2 * sum(sizes) - sizes[-1], "reduce_scatter": sum(sizes)}
