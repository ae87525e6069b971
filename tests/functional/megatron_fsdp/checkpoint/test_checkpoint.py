"""save_checkpoint and load_checkpoint: exact resume in each layout, and errors that change nothing."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import (
    CheckpointError,
    export_safetensors,
    full_state_dict,
    import_safetensors,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp.checkpoint.api import load_matching
from tests.functional.checkpoint_cases import (
    Layout,
    State,
    full_optimizer_state,
    make_two_groups,
    message_of,
    train_alone,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.models import VOCABULARY, WIDTH, Model, make_model
from tests.harness.oracle import differing, sharded, sharded_model, whole_state

EXTRA = {"iteration": 2, "rates": [0.1, 0.2], "data": {"position": 17, "order": torch.arange(5)}, "note": "half way"}


class Momentum(torch.optim.SGD):
    """SGD whose state is momentum."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, lr, momentum=0.9)


# ---------------------------------------------------------------------- refusals


def save_after_two_steps(path: str, has_optimizer: bool) -> State:
    model, optimizer = Layout().build(seed=0)
    train_alone(model, optimizer, range(2))
    save_checkpoint(model, optimizer if has_optimizer else None, path, extra=EXTRA)
    return whole_state(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Checkpoints called "both" and "alone", with an optimizer and without, and the weights in them."""
    path = tmp_path_factory.mktemp("saved")
    run_ranks(3, save_after_two_steps, str(path / "alone"), False)
    return path, run_ranks(3, save_after_two_steps, str(path / "both"), True)[0]


def same() -> Model:
    return sharded_model(seed=1)


def larger() -> Model:
    """Build the saved model with one more block and a wider head."""
    model = make_model(seed=1, num_blocks=3)
    model.head = nn.Linear(WIDTH, VOCABULARY + 2, bias=False)
    return sharded(model, "optim_grads_params")


def smaller() -> Model:
    return sharded(make_model(1, num_blocks=1), "optim_grads_params")


Refusal = tuple[Callable[[], Model], type[torch.optim.Optimizer], str, list[str]]
REFUSALS: dict[str, Refusal] = {
    "a model with more and other tensors": (
        larger,
        torch.optim.AdamW,
        "both",
        [
            "blocks.2.experts: not in the checkpoint",
            "head.weight: (23, 7) in the checkpoint, (25, 7) here",
            "of another model",
            "nothing was loaded",
        ],
    ),
    "a model with fewer tensors": (
        smaller,
        torch.optim.AdamW,
        "both",
        ["blocks.1.project.weight: only in the checkpoint"],
    ),
    "another optimizer": (
        same,
        Momentum,
        "both",
        ["of another optimizer", "nothing was loaded", "head.weight.momentum_buffer: not in the checkpoint"],
    ),
    "an optimizer, of a model alone": (same, torch.optim.AdamW, "alone", ["saved without an optimizer"]),
    "a folder of other things": (same, torch.optim.AdamW, "", ["no complete checkpoint"]),
    "no folder": (same, torch.optim.AdamW, "nowhere", ["nowhere holds no complete checkpoint"]),
}


def refuse_each(path: str) -> dict[str, list[str]]:
    """Load into models in use, which must be refused; return the missing parts of messages, and the changes."""
    wrong = {}
    for name, (build, kind, folder, wanted) in REFUSALS.items():
        model = build()
        optimizer = make_two_groups(model, 0.01, kind)
        train_alone(model, optimizer, range(1))
        before, moments = whole_state(model), full_optimizer_state(model, optimizer)
        random_state = torch.get_rng_state()
        said = message_of(CheckpointError, partial(load_checkpoint, model, optimizer, f"{path}/{folder}"))
        wrong[name] = [part for part in (path, *wanted) if part not in said]
        wrong[name] += differing(whole_state(model), before)
        wrong[name] += differing(full_optimizer_state(model, optimizer), moments)
        wrong[name] += [] if torch.equal(torch.get_rng_state(), random_state) else ["random state"]
    return wrong


def test_mismatched_checkpoints_are_refused_with_names_and_change_nothing(saved: tuple[Path, State]) -> None:
    assert run_ranks(2, refuse_each, str(saved[0])) == [{name: [] for name in REFUSALS}] * 2


def load_model_alone(path: str) -> list[tuple[str, State]]:
    model = same()
    return [(str(load_checkpoint(model, None, f"{path}/{name}")), whole_state(model)) for name in ("both", "alone")]


def test_a_model_alone_loads_from_a_checkpoint_with_an_optimizer_or_without(saved: tuple[Path, State]) -> None:
    path, wanted = saved
    for extra, loaded in (pair for pairs in run_ranks(2, load_model_alone, str(path)) for pair in pairs):
        assert extra == str(EXTRA)
        assert differing(loaded, wanted) == []


# ---------------------------------------------------------------------- the working directory


@contextmanager
def working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def load_the_working_directory(path: str) -> list[str]:
    """Load by a path without a name, with and without a checkpoint there, and try to save there."""
    model, other = (sharded_model(seed=seed) for seed in range(2))
    saved = f"{path}/saved"
    save_checkpoint(model, None, saved)
    with working_in(saved):
        load_checkpoint(other, None, ".")
    met = differing(whole_state(model), whole_state(other))
    with working_in(path):
        uses: tuple[Callable[..., object], ...] = (load_checkpoint, save_checkpoint)
        for use in uses:
            for name in ("", ".", ".."):
                met.append(message_of(CheckpointError, partial(use, model, None, name)))
    return met


def test_a_load_accepts_the_working_directory_and_a_save_refuses_it_by_name(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.mkdir()
    for loaded, below, above, *saves in run_ranks(2, load_the_working_directory, str(path)):
        assert loaded.startswith(f"{path} holds no complete checkpoint")
        assert below == loaded
        assert "holds no complete checkpoint" in above
        assert [f"{path} is the working directory" in each for each in saves] == [True, True, False]
        assert f"{tmp_path} is a folder around the working directory {path}" in saves[2]
    assert [entry.name for entry in path.iterdir()] == ["saved"]


# ---------------------------------------------------------------------- models without memory


@on_ranks(2)
def test_a_model_on_the_meta_device_is_neither_loaded_nor_saved(tmp_path: Path) -> None:
    saved_model = same()
    save_checkpoint(saved_model, None, tmp_path / "step")
    export_safetensors(saved_model, tmp_path / "files")
    with torch.device("meta"):
        plain = make_model()
    model = sharded(copy.deepcopy(plain))
    calls: list[Callable[[nn.Module], object]] = [
        lambda each: load_checkpoint(each, None, tmp_path / "step"),
        lambda each: load_matching(each, tmp_path / "step"),
        lambda each: import_safetensors(each, tmp_path / "files"),
        lambda each: save_checkpoint(each, None, tmp_path / "other"),
        full_state_dict,
    ]
    for each in (model, plain):
        for call in calls:
            with pytest.raises(CheckpointError, match=r"'.*' is on the meta device.*fix: materialize\(model\); or"):
                call(each)
    model.to_empty(device="cpu")
    load_checkpoint(model, None, tmp_path / "step")
    assert differing(whole_state(model), whole_state(saved_model)) == []
