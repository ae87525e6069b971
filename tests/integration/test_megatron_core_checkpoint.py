"""Checkpoints of a GPTModel over this engine: DCP through Megatron's methods, and this project's own format."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from megatron_fsdp import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import ConfigError
from tests.integration.megatron_training import EXPERTS, Job, build, megatron_processes, optimizers, train
from tests.integration.ranks import run_ranks

Figures = list[tuple[float, float, float]]
JOB = Job("optim_grads_params", is_tied=True, model=EXPERTS)


def save(model: Any, optimizer: Any, folder: Path, kind: str) -> None:
    if kind == "own":
        save_checkpoint(model.module, optimizer.optimizer, folder)
    elif kind == "local":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder.with_suffix(f".{torch.distributed.get_rank()}"))
    else:
        weights = model.sharded_state_dict()
        dcp.save({"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}, checkpoint_id=folder)


def load(model: Any, optimizer: Any, folder: Path, kind: str) -> None:
    if kind == "own":
        load_checkpoint(model.module, optimizer.optimizer, folder)
        return
    if kind == "local":
        name = folder.with_suffix(f".{torch.distributed.get_rank()}")
        state = torch.load(name, weights_only=False)
    else:
        weights = model.state_dict_for_save_checkpoint()
        state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True)}
        dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.reload_model_params()


def resume(folder: Path, kind: str) -> tuple[Figures, Figures]:
    with megatron_processes():
        model, optimizer = build(JOB)
        train(model, optimizer, range(2))
        save(model, optimizer, folder, kind)
        wanted = train(model, optimizer, range(2, 4))
        model, optimizer = build(JOB)
        load(model, optimizer, folder, kind)
        return wanted, train(model, optimizer, range(2, 4))


def held_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out parameters of which this rank holds nothing, as Megatron does for version 2 of Megatron-FSDP."""
    held = [{**group, "params": [p for p in group["params"] if p._local_tensor.numel()]} for group in groups]
    return [group for group in held if group["params"]]


def resume_with_held_groups(folder: Path) -> tuple[Figures, Figures, int]:
    original = optimizers._get_param_groups
    with mock.patch.object(
        optimizers, "_get_param_groups", lambda *args, **options: held_groups(original(*args, **options))
    ):
        wanted, found = resume(folder, "dcp")
        with megatron_processes():
            _, optimizer = build(JOB)
            return wanted, found, len(optimizer.param_groups)


def test_a_run_goes_on_where_ranks_leave_out_what_they_hold_nothing_of(tmp_path: Path) -> None:
    found = run_ranks(3, resume_with_held_groups, tmp_path / "step2")
    for wanted, again, _ in found:
        assert again == wanted
    assert len({num_groups for *_, num_groups in found}) == 2


@pytest.mark.parametrize("kind", ["dcp", "own", "local"])
def test_training_goes_on_from_a_checkpoint_as_without_a_break(kind: str, tmp_path: Path) -> None:
    for wanted, found in run_ranks(2, resume, tmp_path / "step2", kind):
        assert found == wanted


def whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all weights and moments."""
    weights = dict(model.module.named_parameters())
    moments = {
        f"{name}.{key}": value
        for name, values in optimizer.sharded_state_dict()["state"].items()
        for key, value in values.items()
    }
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in {**weights, **moments}.items()
    }


def save_trained(folder: Path) -> dict[str, torch.Tensor]:
    with megatron_processes():
        model, optimizer = build(JOB)
        train(model, optimizer, range(2))
        save(model, optimizer, folder, "dcp")
        return whole(model, optimizer)


def load_anew(folder: Path) -> dict[str, torch.Tensor]:
    with megatron_processes():
        model, optimizer = build(JOB)
        load(model, optimizer, folder, "dcp")
        return whole(model, optimizer)


def test_a_checkpoint_of_two_ranks_loads_on_one(tmp_path: Path) -> None:
    wanted = run_ranks(2, save_trained, tmp_path / "two")[0]
    (found,) = run_ranks(1, load_anew, tmp_path / "two")
    assert found.keys() == wanted.keys()
    assert any(name.endswith("exp_avg_sq") for name in wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def ask_early(kind: str) -> tuple[Figures, Figures]:
    """Train, then train another one whose optimizer was asked for its state, or told of none, before the first step."""
    with megatron_processes():
        job = replace(JOB, optimizer={"optimizer": kind})
        wanted = train(*build(job), range(2))
        model, optimizer = build(job)
        state = optimizer.sharded_state_dict(model.sharded_state_dict(), is_loading=True)
        assert state["state"]
        return wanted, train(model, optimizer, range(2))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_search_for_a_checkpoint_that_is_not_there_changes_nothing(kind: str) -> None:
    for wanted, found in run_ranks(2, ask_early, kind):
        assert found == wanted


def refuse() -> None:
    with megatron_processes():
        model, _ = build(JOB)
        with pytest.raises(ConfigError, match=r"sharded_offsets=.* wanted \(\)"):
            model.sharded_state_dict(sharded_offsets=((0, 0, 2),))


def test_offsets_of_pipeline_stages_are_refused() -> None:
    run_ranks(1, refuse)
