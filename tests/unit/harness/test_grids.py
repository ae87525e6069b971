"""The subsets of grids: small, and without a pair of values missing."""

from itertools import combinations, product

import pytest

from tests.harness.grids import covering, nightly_but

GRID = list(product("ab", "xyz", (1, 2), (True, False)))


def test_every_pair_of_values_of_a_grid_is_in_a_quarter_of_it() -> None:
    chosen = covering(GRID)
    for first, second in combinations(range(4), 2):
        wanted = {(case[first], case[second]) for case in GRID}
        assert {(case[first], case[second]) for case in chosen} == wanted
    assert len(chosen) <= len(GRID) / 3


def test_cases_outside_the_quick_ones_are_marked_slow() -> None:
    params = nightly_but(["b"], ["a", "b"])
    assert [bool(param.marks) for param in params] == [True, False]


def test_a_quick_case_that_the_grid_does_not_have_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="c"):
        nightly_but(["c"], ["a", "b"])
