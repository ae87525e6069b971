"""Host time and calls: the subtraction of the plain model, and that each model trains."""

import importlib.util

import pytest
import torch

from benchmarks.bench_host import added_calls, added_microseconds, calls_of
from benchmarks.harness import Samples
from benchmarks.host_models import MODELS, NeedsTransformers


def test_the_plain_step_of_the_same_round_is_subtracted() -> None:
    found = added_microseconds(Samples((5.0, 9.0)), Samples((1.0, 2.0)))
    assert found.values == (4e6, 7e6)


def test_calls_of_python_and_of_c_are_counted_and_the_plain_ones_are_taken_away() -> None:
    def inner() -> int:
        return len("text")

    calls = calls_of(lambda: (inner(), inner(), abs(-1)))
    assert calls["C: len"] == 2
    assert sum(count for name, count in calls.items() if name.endswith("inner")) == 2
    added = dict(added_calls(calls, calls_of(inner)))
    assert added["C: len"] == 1
    assert added["C: abs"] == 1


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_every_model_has_gradients_of_all_its_parameters(name: str) -> None:
    if name.startswith("hf-") and importlib.util.find_spec("transformers") is None:
        with pytest.raises(NeedsTransformers, match="pip install transformers"):
            MODELS[name](2, "cpu")
        return
    trained = MODELS[name](2, "cpu")
    trained.loss().backward()
    assert len(trained.units) == 2
    assert all(parameter.grad is not None for parameter in trained.model.parameters())
    assert all(torch.isfinite(parameter.grad).all() for parameter in trained.model.parameters())  # type: ignore[arg-type]
