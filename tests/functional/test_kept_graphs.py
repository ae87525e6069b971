"""What one rank alone keeps of a graph (a log, a traceback, a cycle) changes neither gradients nor any order."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer.events import listen
from megatron_fsdp import Placements, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Headed, inputs, make_mesh
from tests.harness.oracle import whole

Kept = list[Any]


class Uses(Headed):
    """Runs its layers in one of several ways; they are of one size, so that only values tell a mix-up."""

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


def of_a_forward(model: nn.Module, kept: Kept) -> None:
    kept.append(model(inputs(0, 90)))


def of_a_part(model: Any, kept: Kept) -> None:
    kept.append(model.layers[1](inputs(0, 91)))


def of_two_forwards(model: nn.Module, kept: Kept) -> None:
    kept.extend(model(inputs(0, step)) for step in (92, 93))


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
    kept.append(model(inputs(0, 95)).square().mean())
    kept[-1].backward(retain_graph=True)


def of_hidden_states(model: Any, kept: Kept) -> None:
    handles = [layer.register_forward_hook(lambda *args: kept.append(args[2])) for layer in model.layers]
    model(inputs(0, 96))
    for handle in handles:
        handle.remove()


LEFT = (of_a_forward, of_a_part, of_two_forwards, of_a_forward_that_raised, of_a_backward, of_hidden_states)


def one_backward(model: nn.Module, rank: int) -> None:
    model(inputs(rank, 1)).square().mean().backward()


def both_at_once(model: nn.Module, rank: int) -> None:
    (model(inputs(rank, 1)) * model(inputs(rank, 2))).mean().backward()


def last_first(model: nn.Module, rank: int) -> None:
    first, second = (model(inputs(rank, step)).square().mean() for step in (1, 2))
    second.backward()
    first.backward()


def evaluated_before(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model(inputs(rank, 3))
    one_backward(model, rank)


def a_part_before(model: Any, rank: int) -> None:
    (model(inputs(rank, 1)) + model.layers[1](inputs(rank, 2))).square().mean().backward()


THEN = (one_backward, both_at_once, last_first, evaluated_before, a_part_before)
HOWS = ("plain", "layers twice", "reentrant", "not reentrant")


def build(strategy: str | None) -> Uses:
    torch.manual_seed(0)
    model = Uses(Block(), Block(), Block(), Block())
    if strategy is None:
        return model
    is_nested = strategy in ("hsdp", "hfsdp")
    mesh = make_mesh((2, dist.get_world_size() // 2) if is_nested else (dist.get_world_size(),))
    placements = getattr(Placements, strategy)(*((0, 1) if is_nested else (0,)))
    for part in (*model.layers, model):
        fully_shard(part, mesh, placements)
    return model


def order_and_error(
    strategy: str, how: str, leave: Callable[[nn.Module, Kept], None], then: Callable[[nn.Module, int], None]
) -> tuple[list[str], float]:
    """Return what was gathered, reduced and released in which order, and how far gradients are from the plain ones."""
    model, plain, kept = build(strategy), build(None), Kept()
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
    worst = 0.0
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        off = whole(mine.grad, mine) - theirs.grad / dist.get_world_size()
        worst = max(worst, off.abs().max().item())
    return actions, worst


def orders_and_errors(strategy: str, how: str, is_quick: bool) -> dict[tuple[str, str], tuple[list[str], float]]:
    """Go through all cases, or a third of them, which depends on ``how``."""
    cases = [(leave, then) for leave in LEFT for then in THEN]
    if is_quick:
        cases = cases[HOWS.index(how) % 3 :: 3]
    # What this rank keeps is kept until the end, and garbage until somebody asks for it.
    gc.disable()
    try:
        return {(one.__name__, two.__name__): order_and_error(strategy, how, one, two) for one, two in cases}
    finally:
        gc.enable()


GRID = [(strategy, ranks, how, False) for strategy, ranks in (("optim_grads_params", 3), ("hsdp", 4)) for how in HOWS]
QUICK = [("optim_grads_params", 2, how, True) for how in HOWS]


@pytest.mark.parametrize(("strategy", "num_ranks", "how", "is_quick"), nightly_but(QUICK, [*QUICK, *GRID]))
def test_gradients_and_orders_are_those_of_ranks_that_keep_nothing(
    strategy: str, num_ranks: int, how: str, is_quick: bool
) -> None:
    first, *others = run_ranks(num_ranks, orders_and_errors, strategy, how, is_quick)
    assert len(first) == len(LEFT) * len(THEN) // (3 if is_quick else 1)
    for case, (actions, worst) in first.items():
        assert worst < 2e-6, case
        assert sum(action.startswith("reduce") for action in actions) >= 10, case
        for other in others:
            assert other[case][0] == actions, case
            assert other[case][1] < 2e-6, case


class Skipping(Block):
    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.skips else super().forward(x)


@on_ranks(2)
def test_a_unit_that_one_rank_does_not_use_in_the_earlier_of_two_passes_is_reduced_after_both() -> None:

    def train(model: Any, rank: int) -> None:
        losses = []
        for step in (1, 2):
            model.layers[1].skips = rank == 0 and step == 1
            losses.append(model(inputs(rank, step)).square().mean())
        sum(losses).backward()

    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Headed(Block(), Skipping(), Skipping(), Block()))
    model, plain = models
    for part in (*model.layers, model):
        fully_shard(part)
    train(model, dist.get_rank())
    for rank in range(dist.get_world_size()):
        train(plain, rank)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert max(float((whole(a.grad, a) - b.grad / dist.get_world_size()).abs().max()) for a, b in pairs) < 2e-6
