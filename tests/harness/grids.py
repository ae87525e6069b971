"""Choose the cases of a grid that `make test` runs; `make test-nightly` runs all.

A mistake that needs three particular values at once is rarer than one that needs two (Kuhn, Wallace and Gallo, 2004,
"Software Fault Interactions and Implications for Software Testing"): a subset with every pair of values finds most.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

Case = TypeVar("Case", bound=Sequence[Hashable])


def covering(cases: Iterable[Case], strength: int = 2) -> list[Case]:
    """Return few of the cases such that each combination of ``strength`` values which occurs in them occurs in these.

    Args:
        cases: of the same number of values each, at least ``strength``; not necessarily a whole product.
        strength: 1 for every value, 2 for every pair of values at two places.
    """
    left = list(cases)
    needs = [set(combinations(enumerate(case), strength)) for case in left]
    missing = set().union(*needs)
    chosen = []
    while missing:
        # The first of the best, so that the choice does not depend on the order of sets.
        best = max(range(len(left)), key=lambda position: len(needs[position] & missing))
        missing -= needs[best]
        chosen.append(left[best])
    return chosen


def nightly_but(quick: Iterable[Hashable], cases: Iterable[Hashable]) -> list[ParameterSet]:
    """Return parameters for ``pytest.mark.parametrize``: all cases, and those that are not in ``quick`` marked slow.

    A case that is a tuple gives several arguments.
    """
    every, kept = list(cases), list(quick)
    assert all(case in every for case in kept), f"{kept} is not among {every}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.slow)
        for case in every
    ]
