"""How many collectives a training step issues: one gather per unit and direction, one reduction per unit, no more."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import FsdpModule, fully_shard, fully_shard_optimizer, microbatch, no_sync
from tests.harness import run_ranks
from tests.harness.models import Block, Headed, Stack, inputs
from tests.harness.oracle import shard_each

NUM_UNITS = 4


def four_units() -> nn.Module:
    model = Stack(*(Block(hidden=5 + 4 * index) for index in range(NUM_UNITS)))
    shard_each(model)
    return model


def with_root_parameters() -> nn.Module:
    model = Headed(Block(hidden=5), Block(hidden=9))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def frozen_in_the_middle() -> nn.Module:
    model = Stack(*(Block(hidden=5 + 4 * index) for index in range(NUM_UNITS)))
    model.layers[2].requires_grad_(False)
    shard_each(model)
    return model


def frozen_at_the_start() -> nn.Module:
    model = Stack(*(Block(hidden=5 + 4 * index) for index in range(NUM_UNITS)))
    model.layers[0].requires_grad_(False)
    shard_each(model)
    return model


def frozen_and_trainable_in_one_unit() -> nn.Module:
    model = Stack(*(Block(hidden=5 + 4 * index) for index in range(NUM_UNITS)))
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.up.requires_grad_(False)
    shard_each(model)
    return model


def weights_kept_after_forward() -> nn.Module:
    model = four_units()
    assert isinstance(model, Stack)
    for layer in model.layers:
        assert isinstance(layer, FsdpModule)
        layer.set_reshard_after_forward(False)
    return model


def weights_kept_after_backward() -> nn.Module:
    model = four_units()
    assert isinstance(model, FsdpModule)
    model.set_reshard_after_backward(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "four units": four_units,
    "root parameters": with_root_parameters,
    "a frozen unit in the middle": frozen_in_the_middle,
    "a frozen unit at the start": frozen_at_the_start,
    "frozen and trainable parameters in each unit": frozen_and_trainable_in_one_unit,
    "weights kept after forward": weights_kept_after_forward,
    "weights kept after backward": weights_kept_after_backward,
}


@dataclass(frozen=True)
class Counts:
    """Collectives of one microbatch."""

    forward_gathers: int
    backward_gathers: int
    reductions: int
    others: int = 0


def count(name: str, microbatches: int = 1, synced: bool = True) -> list[Counts]:
    """Train three steps and return the collectives of every microbatch."""
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


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("four units", Counts(4, 3, 4)),
        ("root parameters", Counts(3, 1, 3)),
        ("a frozen unit in the middle", Counts(4, 3, 3)),
        ("a frozen unit at the start", Counts(4, 2, 3)),
        ("frozen and trainable parameters in each unit", Counts(8, 6, 4)),
        ("weights kept after forward", Counts(4, 0, 4)),
    ],
)
def test_every_microbatch_issues_exactly_the_collectives_of(name: str, wanted: Counts, microbatches: int) -> None:
    for counts in run_ranks(2, count, name, microbatches):
        assert counts == [wanted] * 3 * microbatches


def test_without_sync_only_the_last_microbatch_reduces() -> None:
    for counts in run_ranks(2, count, "four units", 3, False):
        assert counts == [Counts(4, 3, 0), Counts(4, 3, 0), Counts(4, 3, 4)] * 3


def test_weights_kept_after_backward_serve_the_next_microbatch_until_the_optimizer_steps() -> None:
    for counts in run_ranks(2, count, "weights kept after backward", 2):
        assert counts == [Counts(4, 3, 4), Counts(0, 3, 4)] * 3


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_alone_issues_no_collective_for(name: str) -> None:
    assert run_ranks(1, count, name, 2) == [[Counts(0, 0, 0)] * 6]


def evaluate() -> list[int]:
    model = four_units()
    counts = []
    for step in range(3):
        calls: list[CollectiveCall] = []
        with torch.no_grad(), observe_collectives(calls.append):
            model(inputs(dist.get_rank(), step))
        counts.append(len(calls))
    return counts


def test_evaluation_gathers_every_unit_once() -> None:
    assert run_ranks(2, evaluate) == [[NUM_UNITS] * 3] * 2


def traffic() -> tuple[dict[str, int], list[int]]:
    """Return the bytes per kind of collective in one step, and the bytes of each padded buffer."""
    model = four_units()
    totals: dict[str, int] = {}

    def add(call: CollectiveCall) -> None:
        totals[call.kind] = totals.get(call.kind, 0) + call.num_bytes

    with observe_collectives(add):
        model(inputs(dist.get_rank(), 0)).square().mean().backward()
    groups = [group for layer in model.modules() if isinstance(layer, FsdpModule) for group in layer.parameter_groups]
    return totals, [group.plan.numel * 4 for group in groups]


def test_a_step_moves_the_weights_twice_but_the_last_units_once_and_the_gradients_once() -> None:
    for totals, sizes in run_ranks(2, traffic):
        assert totals == {"all_gather": 2 * sum(sizes) - sizes[-1], "reduce_scatter": sum(sizes)}
