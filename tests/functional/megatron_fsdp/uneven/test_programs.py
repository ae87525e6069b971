"""Programs with different parts on each rank equal the plain model, and fail without a part of the forward order."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.variants.forward_order import ForwardOrder
from tests.functional.megatron_fsdp.uneven.programs import random_routes, run_program, run_programs
from tests.harness import RankError, on_ranks, run_ranks

STRATEGIES = {2: ("optim", "optim_grads", "optim_grads_params"), 3: ("optim", "optim_grads", "optim_grads_params")}
GRID = [
    (world, strategy, checkpoints)
    for world, strategies in {**STRATEGIES, 4: ("optim_grads_params", "hsdp")}.items()
    for strategy in strategies
    for checkpoints in (0, 1, 3)
]
IN_EACH_RUN = [(2, "optim_grads_params", 0), (3, "optim_grads", 1), (2, "optim", 3)]


@pytest.mark.parametrize(
    ("world", "strategy", "checkpoints"),
    [pytest.param(*row, marks=() if row in IN_EACH_RUN else pytest.mark.slow) for row in GRID],
)
def test_programs_that_differ_between_ranks_equal_the_plain_model(world: int, strategy: str, checkpoints: int) -> None:
    run_ranks(world, run_programs, strategy, checkpoints, timeout=600)


@on_ranks(3, timeout=600)
def test_routes_that_ranks_draw_by_themselves_equal_the_plain_model() -> None:
    random_routes(range(10), "optim_grads_params")


# ---------------------------------------------------------------- mutants


def no_gather(self: Any, place: int) -> None:
    """Skip a unit without its gather."""


def no_reduction(self: Any, progress: Any, place: int) -> None:
    """Leave out the reduction of a unit that this rank did not run."""
    if self._unit(place).reference in self._root.backward.oldest_calls:
        _CLOSE(self, progress, place)


def no_rest(self: Any) -> Any:
    """End a forward without the units that come after the last unit that ran."""
    self._forward.reached = len(self._units)
    return _END_PASS(self)


def no_zeros(self: Any) -> None:
    """Leave old values in the packed buffer where this rank has no gradient."""
    for index, filled in enumerate(self._filled):
        if not filled:
            self._views[index].fill_(0.5)


_CLOSE, _END_PASS = ForwardOrder._close, ForwardOrder.end_pass
MUTANTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "no gather of a skipped unit": (ForwardOrder, "_take_part", no_gather),
    "no reduction of a skipped unit": (ForwardOrder, "_close", no_reduction),
    "no rest at the end": (ForwardOrder, "end_pass", no_rest),
    "no zeros": (GradientBuffer, "_zero_missing", no_zeros),
}


def run_mutant(name: str) -> None:
    """Run a program with the mutant on the ranks that skip units."""
    kind, method, mutant = MUTANTS[name]
    with mock.patch.object(kind, method, mutant):
        run_program("early_exit", "optim_grads_params", 0)
    assert dist.get_world_size() == 2


@pytest.mark.parametrize("name", MUTANTS)
def test_a_forward_order_with_a_part_left_out_is_found(name: str) -> None:
    with pytest.raises(RankError):
        run_ranks(2, run_mutant, name, timeout=30, fresh=True)
