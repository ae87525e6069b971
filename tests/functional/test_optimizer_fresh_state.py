"""Megatron-FSDP's recipe for checkpoints: ``optimizer.state_dict()`` of a new optimizer, and ``dcp.load`` into it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron_fsdp import AdamW, CheckpointError, fully_shard_optimizer, load_checkpoint, save_checkpoint
from tests.functional.checkpoint_cases import full_optimizer_state, message_of
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, make_model, world_mesh
from tests.harness.oracle import differing, shard_model, train, whole_state

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01, moments_dtype=torch.bfloat16),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
}


def build(kind: str, seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    model = shard_model(make_model(seed), world_mesh())
    return model, fully_shard_optimizer(KINDS[kind](model.parameters()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    train(model, optimizer, steps, [dist.get_rank()])


def load_by_the_recipe(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("kind", nightly_but(["SGD", "AdamW"], ["Adam", "AdamW", "SGD"]))
@on_ranks(3)
def test_moments_and_steps_come_back_into_a_new_optimizer_bit_for_bit(kind: str, tmp_path: Path) -> None:
    # On three ranks some hold nothing of the smaller parameters.
    path = str(tmp_path / "step")
    model, optimizer = build(kind)
    step(model, optimizer, range(2))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    other, other_optimizer = build(kind, seed=1)
    load_by_the_recipe(other, other_optimizer, path)
    found = differing(full_optimizer_state(other, other_optimizer), full_optimizer_state(model, optimizer))
    step(model, optimizer, range(2, 4))
    step(other, other_optimizer, range(2, 4))
    differences = found + differing(whole_state(other), whole_state(model))
    num_states = len(other_optimizer.state)
    assert differences == []
    # One parameter is frozen, and has none.
    assert num_states == len(list(make_model().parameters())) - 1


@pytest.mark.parametrize("kind", nightly_but(["Adam", "NAdam"], ["Adam", "SGD", "NAdam"]))
@on_ranks(2)
def test_what_was_not_read_into_is_no_state_and_a_part_of_it_is_an_error(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    model, optimizer = build(kind)
    other, other_optimizer = build(kind)
    other_optimizer.load_state_dict(other_optimizer.state_dict())
    num_states = len(other_optimizer.state)
    step(model, optimizer, range(2))
    step(other, other_optimizer, range(2))
    # What is only shown is in none of this project's checkpoints, and a load into it comes without.
    fresh, fresh_optimizer = build(kind)
    save_checkpoint(fresh, fresh_optimizer, path)
    load_checkpoint(other, other_optimizer, path)
    state = fresh_optimizer.state_dict()
    if kind != "NAdam":
        # As if a checkpoint had another kind's state: moments, and no steps.
        for values in state["state"].values():
            key = next(key for key, value in values.items() if value.ndim)
            values[key].add_(1.0)
    message = message_of(CheckpointError, lambda: fresh_optimizer.load_state_dict(state))
    differences, *num_states, message = (
        differing(whole_state(other), whole_state(fresh)),
        num_states,
        len(other_optimizer.state),
        message,
    )
    assert differences == []
    assert num_states == [0, 0]
    if kind == "Adam":
        assert "only a part was read from the checkpoint, not step, exp_avg_sq, max_exp_avg_sq" in message


@pytest.mark.parametrize("kind", nightly_but(["AdamW", "NAdam"], ["AdamW", "SGD", "NAdam"]))
@on_ranks(2)
def test_a_new_optimizer_that_loads_its_own_state_trains_as_if_it_had_not(kind: str) -> None:
    model, optimizer = build(kind)
    other, other_optimizer = build(kind)
    other_optimizer.load_state_dict(other_optimizer.state_dict())
    step(model, optimizer, range(2))
    step(other, other_optimizer, range(2))
    assert differing(whole_state(other), whole_state(model)) == []


@on_ranks(1)
def test_an_optimizer_whose_new_state_is_not_zeros_says_that_nothing_was_read(tmp_path: Path) -> None:
    # NAdam's product of momenta begins at one.
    path = str(tmp_path / "step")
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    model, optimizer = build("NAdam")
    step(model, optimizer, range(1))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    other, other_optimizer = build("NAdam")
    logger = logging.getLogger("megatron_fsdp")
    logger.addHandler(handler)
    load_by_the_recipe(other, other_optimizer, path)
    logger.removeHandler(handler)
    (text,) = texts
    assert "NAdam: the state dict of an optimizer that has not stepped came back, with no state in it" in text
    assert "use megatron_fsdp.load_checkpoint" in text
