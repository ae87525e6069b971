"""The learning-rate schedule."""

import math

import pytest

from gpt.learning_rate import LearningRate


def make(style: str, *, warmup: int = 4, decay: int = 24) -> LearningRate:
    """Return a schedule from 1.0 to 0.2."""
    return LearningRate(peak=1.0, floor=0.2, style=style, warmup_iterations=warmup, decay_iterations=decay)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_warm_up_rises_in_equal_steps_from_above_zero_to_the_peak(style: str) -> None:
    assert [make(style).at(iteration) for iteration in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("style", "half_way"), [("constant", 1.0), ("linear", 0.6), ("cosine", 0.6)], ids=lambda value: str(value)
)
def test_half_way_through_the_decay_the_rate_is_half_way_down(style: str, half_way: float) -> None:
    assert make(style).at(14) == pytest.approx(half_way)


def test_a_quarter_of_the_cosine_decay_is_higher_than_of_the_linear_one() -> None:
    assert make("linear").at(9) == pytest.approx(0.8)
    assert make("cosine").at(9) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_rate_stays_at_the_floor_after_the_decay(style: str) -> None:
    assert [make(style).at(iteration) for iteration in (24, 25, 1000)] == [0.2, 0.2, 0.2]


def test_without_warm_up_the_decay_begins_with_the_first_step() -> None:
    assert make("linear", warmup=0, decay=10).at(1) == pytest.approx(0.92)
