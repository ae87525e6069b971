"""Memory by phase from the allocator's events, and bytes moved by operators."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.allocations import MovedBytes, phases_of


def test_a_phase_knows_what_was_held_before_at_most_and_after() -> None:
    def run(begin: Callable[[str], None]) -> torch.Tensor:
        begin("first")
        kept = torch.zeros(1000)
        begin("second")
        dropped = torch.zeros(500)
        del dropped
        return kept

    (first_name, first), (second_name, second) = phases_of(run)
    assert (first_name, second_name) == ("first", "second")
    assert (first.start, first.end) == (0, 4000)
    assert (second.start, second.peak, second.end) == (4000, 6000, 4000)


def moved(function: Callable[[], object]) -> int:
    counter = MovedBytes()
    with counter.counting():
        function()
    return counter.total


X, Y = torch.ones(10, 10), torch.ones(10, 10)
PRODUCT = torch.ones(10, 10, requires_grad=True) * 2.0

CASES: dict[str, tuple[Callable[[], object], int]] = {
    "a sum reads two and writes one": (lambda: X + Y, 1200),
    "a sum in place reads two and writes one": (lambda: X.add_(Y), 1200),
    "a copy reads one and writes one": (lambda: X.copy_(Y), 800),
    "a clone reads one and writes one": (lambda: X.clone(), 800),
    "a cast reads four and writes two bytes": (lambda: X.to(torch.bfloat16), 600),
    "zeros are written": (lambda: X.zero_(), 400),
    "a view moves nothing": (lambda: X.t()[2:].flatten(0, 0).detach(), 0),
    "memory alone moves nothing": (lambda: torch.empty(100), 0),
    "a matrix product is not counted": (lambda: X @ Y, 0),
    "an output that is given is written": (lambda: torch.add(X, Y, out=torch.empty(10, 10)), 1200),
    "a backward": (lambda: PRODUCT.backward(Y, retain_graph=True), 800),
    "several at once": (lambda: torch._foreach_copy_([X, Y], [Y, X]), 1600),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_moved(case: str) -> None:
    function, wanted = CASES[case]
    assert moved(function) == wanted
