"""What would cost the order of sums, put in: the comparison with one rank finds each."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from dbuffer.collectives import all_reduce
from megatron_fsdp.optim import grad_norm
from megatron_fsdp.runtime.grads.invariant_reduction import BinaryCounter, _InvariantReduction
from tests.functional.test_invariance import Run, clipped
from tests.harness import run_ranks

# They try the tests, not the library.
pytestmark = pytest.mark.slow

_PUSH, _INIT, _WRITE = BinaryCounter.push, _InvariantReduction.__init__, _InvariantReduction._write


def sum_in_a_row() -> AbstractContextManager[Any]:
    """What is received is added up one after the other, as it comes."""

    def push(counter: BinaryCounter, *leaves: torch.Tensor | None) -> None:
        for leaf in leaves:
            held = counter._levels.get(0)
            counter._levels[0] = counter._copied(leaf) if held is None and leaf is not None else held
            if held is not None and leaf is not None:
                held.tensor.add_(leaf)
            counter.count += 1

    return mock.patch.object(BinaryCounter, "push", push)


def sum_before_the_counter() -> AbstractContextManager[Any]:
    """Every rank adds up what it receives in a backward before the counter sees it."""
    push = BinaryCounter.push

    def push_sum(counter: BinaryCounter, *leaves: torch.Tensor | None) -> None:
        found = [leaf for leaf in leaves if leaf is not None]
        push(counter, torch.stack(found).sum(0) if found else None)

    return mock.patch.object(BinaryCounter, "push", push_sum)


def numbers_reversed() -> AbstractContextManager[Any]:
    """The last rank's microbatch counts as the first of a turn."""

    def init(reduction: Any, *arguments: Any) -> None:
        _INIT(reduction, *arguments)
        reduction._rows.reverse()

    return mock.patch.object(_InvariantReduction, "__init__", init)


def divided_twice() -> AbstractContextManager[Any]:
    """Each microbatch is divided by the number of ranks too."""

    def write(reduction: Any, target: torch.Tensor) -> None:
        _WRITE(reduction, target)
        target /= reduction._num_ranks

    return mock.patch.object(_InvariantReduction, "_write", write)


def norm_by_shard() -> AbstractContextManager[Any]:
    """Each rank takes the norm of its shard, and these are added."""

    def norm(spread: Iterable[Any], order: float, device: torch.device) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for axes, tensors in spread:
            square = sum((tensor.float().square().sum() for tensor in tensors), torch.zeros((), device=device))
            for axis in axes:
                all_reduce(square, axis, "sum")
            total += square
        return total.sqrt()

    return mock.patch.object(grad_norm, "exact_norm", norm)


def mutated(mutant: Callable[[], AbstractContextManager[Any]], run: Run) -> tuple[list[torch.Tensor], dict[str, Any]]:
    with mutant():
        return clipped(run)[:2]


@pytest.mark.parametrize(
    "mutant", [sum_in_a_row, sum_before_the_counter, numbers_reversed, divided_twice, norm_by_shard]
)
def test_the_comparison_with_one_rank_finds(mutant: Callable[[], AbstractContextManager[Any]]) -> None:
    norms, wanted, _ = run_ranks(1, clipped, Run((1,), num_steps=4))[0]
    found, values = run_ranks(3, mutated, mutant, Run((3,), num_steps=4))[0]
    assert not torch.equal(torch.stack(found), torch.stack(norms))
    assert [name for name, value in values.items() if not torch.equal(value, wanted[name])]
