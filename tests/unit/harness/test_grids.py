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


def test_only_cases_of_an_incomplete_grid_are_chosen() -> None:
    cases = [case for case in GRID if case[0] == "a" or case[1] == "x"]
    assert set(covering(cases)) <= set(cases)


def test_each_value_once_takes_as_many_cases_as_the_longest_axis() -> None:
    assert len(covering(product(range(5), range(3)), strength=1)) == 5


def test_what_is_not_quick_is_slow() -> None:
    params = nightly_but(["b"], ["a", "b"])
    assert [bool(param.marks) for param in params] == [True, False]


def test_a_quick_case_that_the_grid_does_not_have_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="c"):
        nightly_but(["c"], ["a", "b"])
