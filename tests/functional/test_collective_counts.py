"""How many collectives a training step issues: one gather per unit and direction, one reduction per unit, no more."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import CollectiveCall, Region, observe_collectives
from megatron_fsdp import FsdpModule, fully_shard_optimizer, microbatch, no_sync
from megatron_fsdp.build.builder import unit_regions
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Block, Headed, Made, Stack, inputs, make_mesh
from tests.harness.twins import Twins, sharded

NUM_UNITS = 4


def four_units(freeze: Callable[[list[Any]], Iterable[nn.Module]] = lambda layers: ()) -> Any:
    """Return a stack of units, of which some parts are frozen."""
    model = Stack(*(Block(hidden=5 + 4 * index) for index in range(NUM_UNITS)))
    for module in freeze(list(model.layers)):
        module.requires_grad_(False)
    return sharded(model)


def with_choice(name: str) -> Any:
    model = four_units()
    getattr(model, name)(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "four units": four_units,
    "root parameters": lambda: sharded(Headed(Block(hidden=5), Block(hidden=9))),
    "a frozen unit at the start": lambda: four_units(lambda layers: [layers[0]]),
    "frozen and trainable parameters in each unit": lambda: four_units(lambda layers: [one.up for one in layers]),
    "weights kept after forward": lambda: with_choice("set_reshard_after_forward"),
    "weights kept after backward": lambda: with_choice("set_reshard_after_backward"),
}


@dataclass(frozen=True)
class Counts:
    forward_gathers: int
    backward_gathers: int
    reductions: int
    others: int = 0


def count(name: str, microbatches: int = 1, synced: bool = True) -> list[Counts]:
    model = MODELS[name]()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    counts = []
    for step in range(3):
        for index in range(microbatches):
            is_last = index == microbatches - 1
            context = microbatch(model, is_last) if synced or is_last else no_sync(model)
            forward: list[CollectiveCall] = []
            backward: list[CollectiveCall] = []
            with context:
                with observe_collectives(forward.append):
                    loss = model(inputs(dist.get_rank(), step)).square().mean()
                with observe_collectives(backward.append):
                    loss.backward()
            counts.append(_counts(forward, backward))
        after: list[CollectiveCall] = []
        with observe_collectives(after.append):
            optimizer.step()
            optimizer.zero_grad()
        assert not after
    return counts


def _counts(forward: list[CollectiveCall], backward: list[CollectiveCall]) -> Counts:
    before, after = Counter(call.kind for call in forward), Counter(call.kind for call in backward)
    others = set(before) - {"all_gather"} | set(after) - {"all_gather", "reduce_scatter"}
    return Counts(before["all_gather"], after["all_gather"], after["reduce_scatter"], len(others))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("root parameters", Counts(3, 1, 3)),
        ("a frozen unit at the start", Counts(4, 2, 3)),
        ("frozen and trainable parameters in each unit", Counts(4, 3, 4)),
        ("weights kept after forward", Counts(4, 0, 4)),
    ],
)
def test_every_microbatch_issues_exactly_the_collectives_of(name: str, wanted: Counts) -> None:
    for counts in run_ranks(2, count, name, 2):
        assert counts == [wanted] * 3 * 2


def mixed() -> nn.Module:
    """Return a unit of many groups: two dtypes, a frozen part, and rows that no common layout has without padding."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        total = m.wide.sum() + (m.odd**2).sum() + m.narrow.sin().sum()
        return x * (total + m.double_rows.cos().sum() + m.frozen.sum()).float() / 1000

    sizes = {"wide": (5, 1152), "odd": (7, 430), "narrow": (11, 6)}
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in sizes.items()}
    parameters["double_rows"] = nn.Parameter(torch.randn(3, 34, dtype=torch.float64))
    return Made(forward, **parameters, frozen=nn.Parameter(torch.randn(13, 10), requires_grad=False))


def region_each(shapes: Sequence[Sequence[int]], *rest: Any) -> tuple[Region, ...]:
    """Lay every tensor out in a region of its own, as models of thousands of ranks may have it."""
    regions = [unit_regions([shape], *rest)[0] for shape in shapes]
    return tuple(replace(region, indices=(index,)) for index, region in enumerate(regions))


def count_mixed(strategy: str, shape: tuple[int, ...], microbatches: int) -> tuple[list[dict[str, int]], int, float]:
    """Train against a plain model; return collectives of each step, groups per unit, and how far the weights differ."""
    with mock.patch("megatron_fsdp.build.builder.unit_regions", region_each):
        twins = Twins(lambda: nn.Sequential(mixed(), mixed()), strategy, mesh=make_mesh(shape))
    model, plain = twins
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    counts = []
    for step in range(3):
        calls: list[CollectiveCall] = []
        with observe_collectives(calls.append):
            for index in range(microbatches):
                with microbatch(model, index == microbatches - 1):
                    model(inputs(dist.get_rank(), 10 * step + index)).square().mean().backward()
        for index in range(microbatches):
            twins.plain_backward(10 * step + index)
        with observe_collectives(calls.append):
            optimizer.step()
        optimizer.zero_grad()
        # By hand: the step of any optimizer may have changed any weights, which are gathered again then.
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-2 * parameter.grad
        plain.zero_grad()
        counts.append(dict(Counter(call.kind for call in calls)))
    return counts, len(model[0].parameter_groups), twins.weights_apart()


# Of two units and two microbatches. The last unit of a forward waits for its backward with its weights.
MIXED = [
    ("optim_grads_params", (2,), {"all_gather": 6, "reduce_scatter": 4}),
    ("optim_grads_params", (3,), {"all_gather": 6, "reduce_scatter": 4}),
    ("optim_grads_params", (4,), {"all_gather": 6, "reduce_scatter": 4}),
    ("optim_grads", (3,), {"all_gather": 2, "reduce_scatter": 4}),
    ("optim", (3,), {"all_gather": 2, "reduce_scatter": 2}),
    # One all-reduce for each dtype.
    ("no_shard", (3,), {"all_reduce": 4}),
    ("hsdp", (2, 2), {"all_gather": 6, "reduce_scatter": 4, "all_reduce": 4}),
    ("hfsdp", (2, 2), {"all_gather": 6 + 2, "reduce_scatter": 4 + 2}),
]


@pytest.mark.parametrize(("strategy", "shape", "wanted"), MIXED, ids=str)
def test_a_unit_of_many_groups_is_gathered_and_reduced_by_one_collective_each(
    strategy: str, shape: tuple[int, ...], wanted: dict[str, int]
) -> None:
    for counts, num_groups, worst in run_ranks(math.prod(shape), count_mixed, strategy, shape, 2):
        assert num_groups == 5
        assert counts[1:] == [wanted] * 2
        assert worst < 1e-5


@on_ranks(2)
def test_groups_travel_apart_where_that_is_switched_off() -> None:
    # One of the five groups is frozen.
    with mock.patch("dbuffer.collectives_together.is_off", "together".__eq__):
        counts, _, worst = count_mixed("optim_grads_params", (2,), 2)
    assert worst < 1e-5
    counts = counts[1:]
    assert counts == [{"all_gather": 6 * 5, "reduce_scatter": 4 * 4}] * 2


def test_without_sync_only_the_last_microbatch_reduces() -> None:
    for counts in run_ranks(2, count, "four units", 3, False):
        assert counts == [Counts(4, 3, 0), Counts(4, 3, 0), Counts(4, 3, 4)] * 3


def test_weights_kept_after_backward_serve_the_next_microbatch_until_the_optimizer_steps() -> None:
    for counts in run_ranks(2, count, "weights kept after backward", 2):
        assert counts == [Counts(4, 3, 4), Counts(0, 3, 4)] * 3


@on_ranks(1)
def test_one_rank_alone_issues_no_collective() -> None:
    assert {name: set(count(name, 2)) for name in MODELS} == {name: {Counts(0, 0, 0)} for name in MODELS}


@on_ranks(2)
def test_a_step_moves_the_weights_twice_but_the_last_units_once_and_the_gradients_once() -> None:
    model = four_units()
    totals: dict[str, int] = {}

    def add(call: CollectiveCall) -> None:
        totals[call.kind] = totals.get(call.kind, 0) + call.num_bytes

    with observe_collectives(add):
        model(inputs(dist.get_rank(), 0)).square().mean().backward()
    groups = [group for layer in model.modules() if isinstance(layer, FsdpModule) for group in layer.parameter_groups]
    sizes = [group.plan.numel * 4 for group in groups]
    assert totals == {"all_gather": 2 * sum(sizes) - sizes[-1], "reduce_scatter": sum(sizes)}
