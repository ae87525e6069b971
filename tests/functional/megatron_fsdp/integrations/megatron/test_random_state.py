"""Megatron's strict load on other sizes: it asks for no random states but those of its own ranks, and gets on."""

import logging
import logging.handlers
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_fsdp.integrations.megatron import random_state
from megatron_fsdp.integrations.megatron.random_state import without_states_of_other_ranks
from tests.harness import on_ranks, run_ranks

# Pipeline stages, tensor-parallel ranks, and whether data-parallel ranks have states of their own.
ONE, TENSOR, STAGES, RANDOM = (1, 1, False), (1, 2, False), (2, 1, False), (1, 1, True)


def states_of(sizes: tuple[int, int, bool], seed: int) -> dict[str, Any]:
    """Return what Megatron's get_rng_state does for fsdp_dtensor, on one of two ranks."""
    stages, tensor, is_random = sizes
    rank = dist.get_rank() if stages * tensor > 1 else 0
    generators = [torch.Generator().manual_seed(seed + place) for place in (range(2) if is_random else [rank])]
    states = [{"torch_rng_state": generator.get_state()} for generator in generators]
    return {f"({rank % stages}, {rank % tensor})": states}


def arguments(folder: Path | None, sizes: tuple[int, int, bool], **changes: Any) -> Any:
    stages, tensor, is_random = sizes
    values = {
        "load": folder, "no_load_rng": False, "finetune": False, "pipeline_model_parallel_size": stages,
        "tensor_model_parallel_size": tensor, "data_parallel_size": 2 // stages // tensor,
        "data_parallel_random_init": is_random,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def strict_load(args: Any, sizes: tuple[int, int, bool]) -> bool:
    """Load as megatron/training/checkpointing.py does; return whether random states were among it."""
    state: dict[str, Any] = {"iteration": 0}
    if not args.no_load_rng:
        state["rng_state"] = states_of(sizes, 50)
    dcp.load(state, checkpoint_id=args.load, planner=DefaultLoadPlanner(allow_partial_load=False))
    assert state["iteration"] == 7
    if "rng_state" in state:
        assert torch.equal(*(
            next(iter(each.values()))[0]["torch_rng_state"] for each in (state["rng_state"], states_of(sizes, 10))
        ))  # fmt: skip
    return "rng_state" in state


def save_and_load(folder: Path, saved: Any, sizes: Any, changes: Any) -> tuple[bool, list[str]]:
    state = {"iteration": 7} if saved is None else {"iteration": 7, "rng_state": states_of(saved, 10)}
    dcp.save(state, checkpoint_id=folder)
    args = arguments(folder, sizes, **changes)
    said = logging.handlers.BufferingHandler(9)
    with (
        mock.patch.object(logging.getLogger(random_state.__name__), "handlers", [said]),
        without_states_of_other_ranks(args, lambda args: str(args.load)),
    ):
        is_loaded = strict_load(args, sizes)
    assert args.no_load_rng is changes.get("no_load_rng", False)
    return is_loaded, [record.getMessage() for record in said.buffer]


@pytest.mark.parametrize("sizes", [ONE, TENSOR, STAGES, RANDOM])
def test_on_the_same_sizes_random_states_are_loaded(sizes: Any, tmp_path: Path) -> None:
    assert run_ranks(2, save_and_load, tmp_path, sizes, sizes, {}) == [(True, [])] * 2


@pytest.mark.parametrize(
    ("saved", "sizes", "message"),
    [
        (ONE, TENSOR, "1 pipeline stage(s) x 1 tensor-parallel rank(s), and this job has 1 pipeline stage(s) x 2 "),
        (TENSOR, ONE, "1 pipeline stage(s) x 2 tensor-parallel rank(s), and this job has 1 pipeline stage(s) x 1 "),
        (TENSOR, STAGES, "1 pipeline stage(s) x 2 tensor-parallel rank(s), and this job has 2 pipeline stage(s) x 1 "),
        (ONE, RANDOM, "tensor-parallel rank(s), and this job has 1 pipeline stage(s) x 1 tensor-parallel rank(s) x 2 "),
        (None, ONE, "random states of no ranks, and this job has 1 pipeline stage(s) x 1 "),
    ],
)
def test_on_other_sizes_all_but_random_states_is_loaded_and_it_is_said(
    saved: Any, sizes: Any, message: str, tmp_path: Path
) -> None:
    (first, lines), (second, others) = run_ranks(2, save_and_load, tmp_path, saved, sizes, {})
    assert (first, second) == (False, False)
    assert len(lines) == 1
    assert message in lines[0]
    assert "as with --no-load-rng" in lines[0]
    assert others == []


def test_a_job_that_loads_none_is_left_as_it_is(tmp_path: Path) -> None:
    assert run_ranks(2, save_and_load, tmp_path, ONE, TENSOR, {"no_load_rng": True}) == [(False, [])] * 2


@on_ranks(2)
def test_megatrons_load_alone_misses_the_other_ranks_states(tmp_path: Path) -> None:
    folder = tmp_path
    dcp.save({"iteration": 7, "rng_state": states_of(ONE, 10)}, checkpoint_id=folder)
    with pytest.raises(dcp.api.CheckpointException) as refused:
        strict_load(arguments(folder, TENSOR), TENSOR)
    text = str(refused.value)
    assert "Missing key in checkpoint state_dict: rng_state.(0, 1)" in text


def test_without_a_checkpoint_megatron_is_asked_as_ever(tmp_path: Path) -> None:
    for args in (arguments(None, ONE), arguments(tmp_path / "nothing", ONE), arguments(tmp_path, ONE, finetune=True)):
        with without_states_of_other_ranks(args, lambda args: str(args.load)):
            assert args.no_load_rng is False
