"""A function that all ranks call together names the ranks that do not call it, after the job's timeout."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from megatron_fsdp import CheckpointError, fully_shard, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.model_state import full_state_dict
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.safetensors_model import export_safetensors, import_safetensors
from megatron_fsdp.checkpoint.series import CheckpointSeries
from tests.harness import on_ranks
from tests.harness.timeouts import give_up_after

CALLS: dict[str, Callable[[nn.Module, Path], object]] = {
    "save_checkpoint": lambda model, path: save_checkpoint(model, None, path / "step"),
    "load_checkpoint": lambda model, path: load_checkpoint(model, None, path / "step"),
    "CheckpointSeries.load": lambda model, path: CheckpointSeries(path).load(model, None),
    "export_safetensors": lambda model, path: export_safetensors(model, path / "out"),
    "import_safetensors": lambda model, path: import_safetensors(model, path / "out"),
    "full_state_dict": lambda model, _: full_state_dict(model),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["the first call", "a later call"])
@pytest.mark.parametrize("name", CALLS)
@on_ranks(3)
def test_a_call_on_rank_0_alone_names_the_other_ranks(name: str, is_first: bool, tmp_path: Path) -> None:
    model = nn.Linear(7, 3)
    fully_shard(model)
    store = dist.distributed_c10d._get_default_store()
    give_up_after(2.0)
    if not is_first:
        save_checkpoint(model, None, tmp_path / "step")
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match=rf"(?s)ranks 1-?,? ?(and )?2 did not.*fix: call {name}\(\.\.\.\)"):
            CALLS[name](model, tmp_path)
    # Do not call a collective here: it would be matched with rank 0's.
    if dist.get_rank() == 0:
        store.set("over", "")
    store.wait(["over"], timedelta(seconds=60))


@on_ranks(2)
def test_the_checkpoint_group_has_the_timeout_of_the_job() -> None:
    give_up_after(123.0)
    ranks = checkpoint_ranks("calls save_checkpoint")
    group = ranks._steps.group
    assert group is not None
    assert group._get_backend(group._device_types[0]).options._timeout == timedelta(seconds=123)
