"""``transformers.Trainer``, handed a model that is sharded already."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Trainer

from megatron_fsdp import FsdpModule
from megatron_fsdp.integrations.huggingface.prepare import prepare_model
from tests.harness import RankError
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import (
    ALL,
    LENGTH,
    Samples,
    generated,
    logits_of,
    make_model,
    make_trainer,
    reset_accelerate,
    whole_state,
    worst,
)


def run_trainer(model: nn.Module, folder: Path, batch: int, **options: Any) -> tuple[list[float], list[float], Trainer]:
    """Train; return the logged losses and gradient norms."""
    reset_accelerate()
    options = {"per_device_train_batch_size": batch, "weight_decay": 0.1, "max_grad_norm": 1.0, **options}
    trainer = make_trainer(model, folder, **options)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry["loss"] for entry in history], [float(entry["grad_norm"]) for entry in history], trainer


def train_sharded(kind: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    model = prepare_model(make_model(kind), options.pop("config", None))
    losses, norms, trainer = run_trainer(model, folder / "run", 3, **options)
    assert isinstance(trainer.model, FsdpModule)
    assert trainer.model_wrapped is model
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    trainer.save_model(str(folder / "saved"))
    return {"losses": losses, "norms": norms, "state": whole_state(model), "logits": logits_of(model)}


def train_whole(kind: str, folder: Path, options: dict[str, Any], batch: int = 6) -> dict[str, Any]:
    options.pop("config", None)
    model = make_model(kind)
    losses, norms, _ = run_trainer(model, folder / "whole", batch, **options)
    return {"losses": losses, "norms": norms, "state": whole_state(model), "logits": logits_of(model)}


def assert_alike(kind: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    oracle = run_ranks(1, train_whole, kind, folder, options)[0]
    first, second = run_ranks(2, train_sharded, kind, folder, options)
    for found in (first, second):
        # Losses are logged with a few digits.
        assert found["losses"] == pytest.approx(oracle["losses"], abs=2e-4)
        assert found["norms"] == pytest.approx(oracle["norms"], abs=1e-4)
        assert worst(found["state"], oracle["state"]) < 2e-5
    assert worst(oracle["state"], whole_state(make_model(kind))) > 1e-2
    loaded: dict[str, Any] = first
    return loaded


@pytest.mark.parametrize("kind", ALL)
def test_the_trainer_trains_a_sharded_model_as_a_whole_one_and_saves_it(kind: str, tmp_path: Path) -> None:
    found = assert_alike(kind, tmp_path, {})
    loaded = type(make_model(kind)).from_pretrained(tmp_path / "saved")
    assert worst(whole_state(loaded), found["state"]) == 0
    assert torch.equal(logits_of(loaded), found["logits"])


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "max_steps": 2},
        {"config": {"activation_checkpointing": True}},
        {"optim": "adamw_torch", "adam_beta2": 0.9},
    ],
    ids=["accumulation", "checkpointing", "optimizer"],
)
def test_the_trainer_s_options_work_on_a_sharded_model(options: dict[str, Any], tmp_path: Path) -> None:
    assert_alike("llama", tmp_path, options)


def train_with_both_kinds_of_checkpointing(folder: Path) -> None:
    model = prepare_model(make_model("llama"), {"activation_checkpointing": True})
    run_trainer(model, folder, 3, activation_checkpointing=True)


def test_gradient_checkpointing_on_top_of_activation_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="activation_checkpointing contradicts gradient checkpointing"):
        run_ranks(2, train_with_both_kinds_of_checkpointing, tmp_path)


def save_while_training(folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    model = prepare_model(make_model("llama"))
    run_trainer(model, folder, 3, save_strategy="steps", save_steps=2, save_only_model=True)
    dist.barrier()
    return sorted(path.name for path in folder.iterdir()), whole_state(model)


def test_weights_are_saved_while_training_goes_on(tmp_path: Path) -> None:
    names, state = run_ranks(2, save_while_training, tmp_path)[0]
    assert names == ["checkpoint-2", "checkpoint-4"]
    kind = type(make_model("llama"))
    assert worst(whole_state(kind.from_pretrained(tmp_path / "checkpoint-4")), state) == 0
    assert worst(whole_state(kind.from_pretrained(tmp_path / "checkpoint-2")), state) > 1e-3


def evaluate_and_generate(folder: Path) -> tuple[float, list[int]]:
    model = prepare_model(make_model("llama"))
    _, _, trainer = run_trainer(model, folder, 3, max_steps=1)
    loss = trainer.evaluate(Samples())["eval_loss"]
    return loss, generated(model)


def test_the_sharded_model_evaluates_and_generates(tmp_path: Path) -> None:
    (loss, tokens), other = run_ranks(2, evaluate_and_generate, tmp_path)
    assert (loss, tokens) == other
    assert 3.0 < loss < 5.0
    assert len(tokens) == LENGTH + 4


def train_on_a_grid(kind: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = prepare_model(make_model(kind), None, mesh)
    losses, norms, _ = run_trainer(model, folder, 3, **options)
    return {"losses": losses, "norms": norms, "state": whole_state(model)}


def test_replicas_of_shards_agree_after_accumulating_gradients(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_steps": 2}
    oracle = run_ranks(1, train_whole, "llama", tmp_path, options, 12)[0]
    for found in run_ranks(4, train_on_a_grid, "llama", tmp_path, options):
        assert found["norms"] == pytest.approx(oracle["norms"], abs=1e-4)
        assert worst(found["state"], oracle["state"]) < 2e-5
