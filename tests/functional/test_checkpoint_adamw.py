"""The flat AdamW saves and loads as torch's does, in both directions, and resumes bit for bit."""

from pathlib import Path

import pytest
import torch

from megatron_fsdp import MixedPrecisionPolicy, load_checkpoint, save_checkpoint
from megatron_fsdp.optim.adamw import AdamW
from tests.functional.checkpoint_cases import (
    LAYOUTS,
    Layout,
    State,
    full_optimizer_state,
    make_two_groups,
    train_alone,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import make_model
from tests.harness.oracle import differing, whole_state

KINDS = {"flat": AdamW, "torch": torch.optim.AdamW}


def save(layout: Layout, kind: str, path: str) -> tuple[State, State, State]:
    """Save after two steps; return weights and moments of then, and the weights after two more."""
    model = layout.place(make_model(0))
    optimizer = make_two_groups(model, 0.01, KINDS[kind])
    train_alone(model, optimizer, range(2))
    saving = save_checkpoint(model, optimizer, path, asynchronous=True)
    then = whole_state(model), full_optimizer_state(model, optimizer)
    train_alone(model, optimizer, range(2, 4))
    # Before the process group is closed, which the save needs.
    saving.wait()
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


# Whether what loads is a fresh one; else it is in use.
WAYS = [(*pair, fresh) for pair in (("flat", "flat"), ("flat", "torch"), ("torch", "flat")) for fresh in (True, False)]
QUICK = [("flat", "flat", True), ("flat", "torch", False), ("torch", "flat", True)]


@pytest.mark.parametrize(("saver", "loader", "is_fresh"), nightly_but(QUICK, WAYS))
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


@on_ranks(2)
def test_moments_wider_than_the_weights_lose_nothing_on_the_way(tmp_path: Path) -> None:
    """Save FP32 moments of bf16 weights; load them into a fresh optimizer by both ways."""
    path = str(tmp_path / "step")
    layout = Layout((2,), policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model = layout.place(make_model(0).to(torch.bfloat16))
    optimizers = [AdamW(model.parameters(), lr=0.01, moments_dtype=torch.float32) for _ in range(3)]
    train_alone(model, optimizers[0], range(2))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    save_checkpoint(model, optimizers[0], path)
    load_checkpoint(model, optimizers[2], path)
    wanted, *found = (full_optimizer_state(model, optimizer) for optimizer in optimizers)
    dtypes = {value.dtype for name, value in wanted.items() if name.endswith("exp_avg")}
    assert (differing(found[0], wanted), differing(found[1], wanted), dtypes) == ([], [], {torch.float32})
