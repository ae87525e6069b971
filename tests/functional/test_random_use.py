"""Whatever is done with a sharded model, in whatever order: it does what the plain model does, or refuses by name.

Twenty programs, the same in every run; the closed list of refusals is in ``random_use_run``.
``RANDOM_USE="0 2000"`` runs the programs of two thousand seeds from 0 on, ``RANDOM_USE=2000`` those of new ones.
"""

import os
import time

import pytest

from tests.functional.random_programs import draw
from tests.functional.random_use import Program
from tests.functional.random_use_cases import CASES
from tests.functional.random_use_run import outcome

NUM_USUAL = 20


def seeds() -> range:
    words = os.environ.get("RANDOM_USE", f"0 {NUM_USUAL}").split()
    first, count = (int(time.time()), words[0]) if len(words) == 1 else words
    return range(int(first), int(first) + int(count))


def check(program: Program) -> None:
    """Run a program; fail with how it ended, and with the program in a form to paste."""
    found = outcome(program)
    if not found.is_in_order:
        pytest.fail(f"{found.outcome} at action {found.action}\n{found.text}\ncheck({program!r})", pytrace=False)


@pytest.mark.parametrize("seed", seeds())
def test_a_random_use_is_that_of_the_plain_model_or_refused_by_name(seed: int) -> None:
    check(draw(seed))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if case.is_slow else []) for name, case in CASES.items()]
)
def test_losses_gradients_and_weights_are_a_plain_models_at_every_moment_or_refused_when(name: str) -> None:
    case = CASES[name]
    verdict = outcome(case.program)
    assert verdict.outcome == case.outcome, verdict
