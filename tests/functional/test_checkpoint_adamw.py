"""The flat AdamW saves and loads as torch's does, in both directions, and resumes bit for bit."""

from pathlib import Path

import pytest
import torch

from megatron_fsdp import load_checkpoint, save_checkpoint
from megatron_fsdp.adamw import AdamW
from tests.functional.checkpoint_cases import (
    LAYOUTS,
    Layout,
    State,
    full_optimizer_state,
    make_two_groups,
    train_alone,
)
from tests.functional.models import differing, make_model, whole_state
from tests.harness import run_ranks

KINDS = {"flat": AdamW, "torch": torch.optim.AdamW}


def save(layout: Layout, kind: str, path: str) -> tuple[State, State, State]:
    """Save after two steps; return weights and moments of then, and the weights after two more."""
    model = layout.place(make_model(0))
    optimizer = make_two_groups(model, 0.01, KINDS[kind])
    train_alone(model, optimizer, range(2))
    save_checkpoint(model, optimizer, path, asynchronous=True)
    then = whole_state(model), full_optimizer_state(model, optimizer)
    train_alone(model, optimizer, range(2, 4))
    return *then, whole_state(model)


def load(layout: Layout, kind: str, path: str, is_fresh: bool) -> tuple[State, State, State]:
    model = layout.place(make_model(1))
    optimizer = make_two_groups(model, 0.5, KINDS[kind])
    if not is_fresh:
        train_alone(model, optimizer, range(1))
    load_checkpoint(model, optimizer, path)
    then = whole_state(model), full_optimizer_state(model, optimizer)
    train_alone(model, optimizer, range(2, 4))
    return *then, whole_state(model)


@pytest.mark.parametrize("is_fresh", [True, False], ids=["a fresh one", "one in use"])
@pytest.mark.parametrize(("saver", "loader"), [("flat", "flat"), ("flat", "torch"), ("torch", "flat")])
def test_state_goes_over_into(saver: str, loader: str, is_fresh: bool, tmp_path: Path) -> None:
    layout, path = LAYOUTS["3 ranks"], str(tmp_path / "step")
    weights, moments, later = run_ranks(3, save, layout, saver, path)[0]
    for found, found_moments, found_later in run_ranks(3, load, layout, loader, path, is_fresh):
        assert differing(found, weights) == []
        assert differing(found_moments, moments) == []
        assert differing(found_later, later, 0.0 if saver == loader else 1e-6) == []


def test_flat_state_of_two_axes_loads_on_one(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    weights, moments, _ = run_ranks(4, save, LAYOUTS["HFSDP, blocks of 5 rows"], "flat", path)[0]
    for found, found_moments, _ in run_ranks(2, load, LAYOUTS["2 ranks, ZeRO-2"], "flat", path, True):
        assert differing(found, weights) == []
        assert differing(found_moments, moments) == []
