"""Random uses of a sharded model, in any order, equal the plain model or raise a named error.

Twenty programs, the same in every run; the closed list of refusals is in ``run``.
``RANDOM_USE="0 2000"`` runs the programs of two thousand seeds from 0 on, ``RANDOM_USE=2000`` those of new ones.
"""

import os
import time
from typing import Any

import pytest

from tests.functional.random_use.cases import CASES
from tests.functional.random_use.draw import draw
from tests.functional.random_use.run import Verdict, outcome, outcomes
from tests.harness.failures import RankError

NUM_USUAL, AT_ONCE = 20, 40


def seeds() -> range:
    words = os.environ.get("RANDOM_USE", f"0 {NUM_USUAL}").split()
    first, count = (int(time.time()), words[0]) if len(words) == 1 else words
    return range(int(first), int(first) + int(count))


@pytest.mark.parametrize("seed", seeds())
def test_a_random_use_is_that_of_the_plain_model_or_refused_by_name(seed: int) -> None:
    program = draw(seed)
    found = outcome(program)
    # The message ends with the program in a form to paste.
    assert found.is_in_order, f"{found.outcome} at action {found.action}\n{found.text}\noutcome({program!r})"


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> dict[str, Verdict]:
    """Run the selected cases on the same ranks, several at a time; leave out groups in which a rank stopped."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if "name" in item.callspec.params]
    found: dict[str, Verdict] = {}
    for num_ranks in (2, 3, 4):
        left = [name for name in names if CASES[name].program.num_ranks == num_ranks]
        while left:
            chosen, left = left[:AT_ONCE], left[AT_ONCE:]
            try:
                verdicts = outcomes([CASES[name].program for name in chosen], timeout=300)
            except RankError:
                continue
            found |= zip(chosen, verdicts, strict=True)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if case.is_slow else []) for name, case in CASES.items()]
)
def test_each_case_equals_the_plain_model_or_is_refused_as_listed(name: str, together: dict[str, Verdict]) -> None:
    case = CASES[name]
    verdict = together.get(name) or outcome(case.program)
    assert verdict.outcome == case.outcome, verdict
