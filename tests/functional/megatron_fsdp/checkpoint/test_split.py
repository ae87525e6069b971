"""Checkpoints hold split main weights as FP32 ones: every bit, for any layout, split or not."""

from pathlib import Path

import pytest
import torch

from megatron_fsdp import (
    export_safetensors,
    full_state_dict,
    import_safetensors,
    load_checkpoint,
    save_checkpoint,
)
from tests.functional.checkpoint_cases import Layout, State, full_optimizer_state
from tests.functional.split_weights import FP32, PLAIN, SPLIT, full_weights, make_adamw, rounding_ties_away
from tests.harness import run_ranks
from tests.harness.models import Model, draw_tokens, loss_of, make_model
from tests.harness.oracle import differing

LAYOUTS = {
    "3 ranks": Layout(policy=SPLIT),
    "2 ranks, ZeRO-2": Layout((2,), "optim_grads", SPLIT),
    "HFSDP": Layout((2, 2), "hfsdp", SPLIT),
    "FP32 main weights": Layout((2,), policy=PLAIN),
}


def tied(seed: int) -> Model:
    model = make_model(seed)
    model.head.weight = model.embedding.weight
    return model


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range, num_readers: int) -> None:
    """Take steps that do not depend on the number of ranks: every rank has the same data."""
    for step in steps:
        tokens = torch.cat([draw_tokens(reader, step) for reader in range(num_readers)])
        with rounding_ties_away():
            loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(layout: Layout, path: str, asynchronous: bool) -> tuple[State, State, State]:
    """Save after three steps; return weights and moments at the save, and the weights after two more steps."""
    model = layout.place(tied(0))
    optimizer = make_adamw(model)
    train(model, optimizer, range(3), 2)
    handle = save_checkpoint(model, optimizer, path, asynchronous=asynchronous)
    then = full_weights(model), full_optimizer_state(model, optimizer)
    train(model, optimizer, range(3, 5), 2)
    # The group belongs to this call of the ranks.
    handle.wait()
    return *then, full_weights(model)


def load(layout: Layout, path: str, is_fresh: bool) -> tuple[State, State, State]:
    model = layout.place(tied(1))
    optimizer = make_adamw(model, lr=0.5)
    if not is_fresh:
        train(model, optimizer, range(1), 2)
    load_checkpoint(model, optimizer, path)
    then = full_weights(model), full_optimizer_state(model, optimizer)
    train(model, optimizer, range(3, 5), 2)
    return *then, full_weights(model)


@pytest.mark.parametrize(
    ("saver", "loader", "is_fresh"),
    [
        pytest.param("3 ranks", "3 ranks", True, marks=pytest.mark.slow),
        pytest.param("3 ranks", "2 ranks, ZeRO-2", False, marks=pytest.mark.slow),
        ("HFSDP", "3 ranks", False),
        ("3 ranks", "FP32 main weights", True),
        ("FP32 main weights", "HFSDP", True),
    ],
)
def test_every_bit_goes_over_into(saver: str, loader: str, is_fresh: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    weights, moments, later = run_ranks(LAYOUTS[saver].num_ranks, save, LAYOUTS[saver], path, is_fresh)[0]
    for found, found_moments, found_later in run_ranks(
        LAYOUTS[loader].num_ranks, load, LAYOUTS[loader], path, is_fresh
    ):
        assert differing(found, weights) == []
        assert {value.dtype for value in found_moments.values()} == {FP32}
        assert differing(found_moments, moments) == []
        if saver == loader:
            assert differing(found_later, later) == []
        # Another number of ranks sums bf16 gradients in another order.
        assert differing(found_later, later, 0.03) == []


def through_safetensors(path: str) -> tuple[list[str], list[str], set[torch.dtype]]:
    layout = LAYOUTS["3 ranks"]
    model, again = layout.place(tied(0)), layout.place(tied(1))
    train(model, make_adamw(model), range(2), 2)
    export_safetensors(model, path)
    import_safetensors(again, path)
    whole = full_state_dict(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    dtypes = {value.dtype for name, value in whole.items() if name in trained}
    weights = full_weights(model)
    wrong = [name for name in weights.keys() & whole.keys() if not torch.equal(weights[name], whole[name])]
    return differing(full_weights(again), weights), wrong, dtypes


def test_exports_and_whole_state_dicts_hold_the_fp32_weights(tmp_path: Path) -> None:
    for rank, (differences, wrong, dtypes) in enumerate(run_ranks(3, through_safetensors, str(tmp_path / "export"))):
        assert (differences, wrong) == ([], [])
        assert dtypes == (set() if rank else {FP32})
