"""Megatron's strict load on other sizes needs random states that the checkpoint lacks: the error says what to pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.integrations.megatron.adapter import _load
from megatron_fsdp.integrations.megatron.data_parallel import DataParallelMethods
from tests.harness import on_ranks


def states_of(stages: int, tensor: int, seed: int) -> dict[str, Any]:
    """Return the result of Megatron's get_rng_state for fsdp_dtensor, on one of two ranks."""
    rank = dist.get_rank() if stages * tensor > 1 else 0
    states = [{"torch_rng_state": torch.Generator().manual_seed(seed + rank).get_state()}]
    return {f"({rank % stages}, {rank % tensor})": states}


@pytest.mark.parametrize(("stages", "tensor"), [(1, 1), (1, 2), (2, 1)])
@on_ranks(2)
def test_missing_random_states_raise_an_error_that_says_not_to_load_them(
    stages: int, tensor: int, tmp_path: Path
) -> None:
    save({"iteration": 7, "rng_state": states_of(1, 1, 10)}, checkpoint_id=tmp_path)
    state = {"iteration": 0, "rng_state": states_of(stages, tensor, 50)}

    def strict_load(chunks: list[Any], missing: str = "") -> Any:
        """Load as megatron/training/checkpointing.py does."""
        planner = DefaultLoadPlanner(allow_partial_load=False)
        load({**state, **({missing: 0} if missing else {})}, checkpoint_id=tmp_path, planner=planner)
        return state["iteration"]

    ours = [object.__new__(DataParallelMethods)]
    assert _load(strict_load, [object()]) is NotImplemented
    if stages * tensor == 1:
        with pytest.raises(CheckpointException, match="weight"):
            _load(strict_load, ours, "weight")
        return
    with pytest.raises(CheckpointError, match=r"other numbers of pipeline stages .* fix: --no-load-rng"):
        _load(strict_load, ours)
