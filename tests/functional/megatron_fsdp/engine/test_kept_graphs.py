"""A graph that only one rank keeps (in a log, a traceback, a cycle) changes neither gradients nor orders."""

import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer.events import listen
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Headed, inputs, squared
from tests.harness.twins import Twins

Kept = list[Any]


class Uses(Headed):
    """Run the layers in one of several ways; they have equal sizes, so that a mix-up shows only in values."""

    how = "plain"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "layers twice":
            for layer in self.layers:
                x = layer(x)
            return super().forward(x)
        if torch.is_grad_enabled() and self.how in ("reentrant", "not reentrant"):
            first, *others = self.layers
            x = first(x)
            for layer in others:
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
            return self.head(x)
        return super().forward(x)


def of_a_forward_that_raised(model: Any, kept: Kept) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.layers[2].register_forward_pre_hook(fail)
    try:
        model(inputs(0, 94))
    except KeyboardInterrupt as error:
        kept.append(error)
    handle.remove()


def of_a_backward(model: nn.Module, kept: Kept) -> None:
    kept.append(squared(model, 0, 95))
    kept[-1].backward(retain_graph=True)


def of_hidden_states(model: Any, kept: Kept) -> None:
    handles = [layer.register_forward_hook(lambda *args: kept.append(args[2])) for layer in model.layers]
    model(inputs(0, 96))
    for handle in handles:
        handle.remove()


LEFT: dict[str, Callable[[Any, Kept], object]] = {
    "of a forward": lambda model, kept: kept.append(model(inputs(0, 90))),
    "of a part": lambda model, kept: kept.append(model.layers[1](inputs(0, 91))),
    "of two forwards": lambda model, kept: kept.extend(model(inputs(0, step)) for step in (92, 93)),
    "of a forward that raised": of_a_forward_that_raised,
    "of a backward": of_a_backward,
    "of hidden states": of_hidden_states,
}


def last_first(model: nn.Module, rank: int) -> None:
    first, second = (squared(model, rank, step) for step in (1, 2))
    second.backward()
    first.backward()


def evaluated_before(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model(inputs(rank, 3))
    squared(model, rank, 1).backward()


THEN: dict[str, Callable[[Any, int], object]] = {
    "one backward": lambda model, rank: squared(model, rank, 1).backward(),
    "both at once": lambda model, rank: (model(inputs(rank, 1)) * model(inputs(rank, 2))).mean().backward(),
    "last first": last_first,
    "evaluated before": evaluated_before,
    "a part before": lambda model, rank: (
        (model(inputs(rank, 1)) + model.layers[1](inputs(rank, 2))).square().mean().backward()
    ),
}
HOWS = ("plain", "layers twice", "reentrant", "not reentrant")


def order_and_error(strategy: str, how: str, case: tuple[str, str]) -> tuple[list[str], float]:
    """Return the order of gathers, reductions and releases, and the error of gradients against the plain model."""
    leave, then = LEFT[case[0]], THEN[case[1]]
    twins, kept = Twins(lambda: Uses(Block(), Block(), Block(), Block()), strategy), Kept()
    model, plain = twins
    model.how = plain.how = how
    actions: list[str] = []

    def note(action: str, subject: Any) -> None:
        if action in ("gather", "reduce", "reshard"):
            actions.append(f"{action} {subject.name}")

    with listen(note):
        for _ in range(2):
            leave(model, kept)
            if dist.get_rank() != 0:
                kept.clear()
                gc.collect()
            model.zero_grad()
            then(model, dist.get_rank())
    for rank in range(dist.get_world_size()):
        then(plain, rank)
    for parameter in plain.parameters():
        parameter.grad /= dist.get_world_size()
    return actions, twins.gradients_apart()


def cases_of(how: str, is_quick: bool) -> list[tuple[str, str]]:
    """Return all cases; or a third of them, which depends on ``how``, and the case that once made ranks wait."""
    cases = list(product(LEFT, THEN))
    return sorted({*cases[HOWS.index(how) % 3 :: 3], ("of a forward", "both at once")}) if is_quick else cases


GRID = [(strategy, ranks, how, False) for strategy, ranks in (("optim_grads_params", 3), ("hsdp", 4)) for how in HOWS]
QUICK = [("optim_grads_params", 2, how, True) for how in HOWS]


@pytest.mark.parametrize(("strategy", "num_ranks", "how", "is_quick"), nightly_but(QUICK, [*QUICK, *GRID]))
@on_ranks(lambda num_ranks: num_ranks)
def test_kept_graphs_change_neither_gradients_nor_orders(
    strategy: str, num_ranks: int, how: str, is_quick: bool
) -> None:
    # This rank keeps graphs until the end, and garbage until a test asks for its collection.
    gc.disable()
    try:
        found = {case: order_and_error(strategy, how, case) for case in cases_of(how, is_quick)}
    finally:
        gc.enable()
    orders: list[Any] = [None] * num_ranks
    dist.all_gather_object(orders, {case: actions for case, (actions, _) in found.items()})
    for case, (actions, worst) in found.items():
        assert worst < 2e-6, case
        assert sum(action.startswith("reduce") for action in actions) >= 10, case
        assert all(each[case] == actions for each in orders), case


class Skipping(Block):
    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.skips else super().forward(x)


@on_ranks(2)
def test_a_unit_skipped_by_one_rank_in_the_first_pass_is_reduced_after_both() -> None:
    def loss(model: Any, rank: int, _: int) -> torch.Tensor:
        losses = []
        for step in (1, 2):
            model.layers[1].skips = rank == 0 and step == 1
            losses.append(squared(model, rank, step))
        total: Any = sum(losses)
        return total

    twins = Twins(lambda: Headed(Block(), Skipping(), Skipping(), Block()))
    twins.backward(0, loss)
    assert twins.gradients_apart() < 2e-6
