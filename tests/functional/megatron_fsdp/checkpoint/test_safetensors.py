"""Sharded models to and from safetensors files: whole tensors out, own ranges in."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_fsdp import CheckpointError
from megatron_fsdp.checkpoint.model_state import full_state_dict
from megatron_fsdp.checkpoint.safetensors_model import export_safetensors, import_safetensors
from megatron_fsdp.optim.local_parts import local_of
from tests.functional.checkpoint_cases import LAYOUTS, Layout, State, message_of
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import draw_tokens, loss_of, make_model
from tests.harness.oracle import differing, whole_state

NAME_MAP = {"blocks.*.norm.weight": "model.layers.*.input_layernorm.weight", "head.weight": "lm_head.weight"}
SHARDED = [name for name in LAYOUTS if name != "one process"]


def export(layout: Layout, folder: str) -> None:
    model, _ = layout.build(seed=0)
    export_safetensors(model, folder, name_map=NAME_MAP, max_file_bytes=500)


@pytest.mark.parametrize("name", ["3 ranks", "HSDP", "ZeRO-1", "FSDP2"])
def test_an_export_has_the_whole_models_values_under_the_mapped_names_of(name: str, tmp_path: Path) -> None:
    run_ranks(LAYOUTS[name].num_ranks, export, LAYOUTS[name], str(tmp_path))
    found = {key: value for file in tmp_path.glob("*.safetensors") for key, value in load_file(file).items()}
    wanted = make_model(0).state_dict()
    wanted["lm_head.weight"] = wanted.pop("head.weight")
    for block in range(2):
        wanted[f"model.layers.{block}.input_layernorm.weight"] = wanted.pop(f"blocks.{block}.norm.weight")
    assert differing(found, wanted) == []
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2


def import_and_compare(layout: Layout, folder: str) -> tuple[State, float, int, int]:
    """Import. Return the weights, a loss computed with them, and the numbers of elements read and stored."""
    model, _ = layout.build(seed=1)
    num_read = [0]

    class Counted:
        """A file that counts the elements of the boxes read from it."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = open_file(*args, **options)

        def __enter__(self) -> "Counted":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            assert name != "get_tensor", "a whole tensor was read"
            return getattr(self.file, name)

        def get_slice(self, name: str) -> Any:
            part = self.file.get_slice(name)
            return mock.MagicMock(wraps=part, __getitem__=lambda _, box: self.counted(part[box]))

        def counted(self, values: torch.Tensor) -> torch.Tensor:
            num_read[0] += values.numel()
            return values

    open_file = safetensors.safe_open
    with mock.patch.object(safetensors, "safe_open", Counted):
        import_safetensors(model, folder, name_map=NAME_MAP)
    num_held = sum(local_of(tensor).numel() for tensor in model.state_dict().values())
    tokens = draw_tokens(0)
    return whole_state(model), loss_of(model(tokens), tokens).item(), num_read[0], num_held


@pytest.mark.parametrize("name", nightly_but(["3 ranks", "HFSDP, blocks of 5 rows", "ZeRO-1", "FSDP2"], LAYOUTS))
def test_every_rank_reads_only_its_own_elements_on(name: str, tmp_path: Path) -> None:
    model = make_model(0)
    state = model.state_dict()
    state["lm_head.weight"] = state.pop("head.weight")
    for block in range(2):
        state[f"model.layers.{block}.input_layernorm.weight"] = state.pop(f"blocks.{block}.norm.weight")
    save_file(state, tmp_path / "model.safetensors")
    tokens = draw_tokens(0)
    wanted_loss = loss_of(model(tokens), tokens).item()
    tolerance = 0.05 if LAYOUTS[name].policy else 1e-6
    for weights, loss, num_read, num_held in run_ranks(
        LAYOUTS[name].num_ranks, import_and_compare, LAYOUTS[name], str(tmp_path)
    ):
        assert differing(weights, model.state_dict()) == []
        assert loss == pytest.approx(wanted_loss, abs=tolerance)
        assert num_read == num_held


def refuse(folder: str, strict: bool) -> tuple[str, list[str]]:
    model, _ = LAYOUTS["3 ranks"].build(seed=1)
    before = whole_state(model)
    message = message_of(CheckpointError, lambda: import_safetensors(model, folder, strict=strict))
    return message, differing(whole_state(model), before)


def test_files_of_another_model_are_refused_by_name_and_change_nothing(tmp_path: Path) -> None:
    state = make_model(0).state_dict()
    state["rotary"] = torch.zeros(3)
    state["head.weight"] = torch.zeros(5, 7)
    del state["shift"]
    save_file(state, tmp_path / "model.safetensors")
    for message, changed in run_ranks(3, refuse, str(tmp_path), True):
        assert "shift: not in the checkpoint" in message
        assert "head.weight: (5, 7) in the checkpoint, (23, 7) here" in message
        assert "rotary: only in the checkpoint" in message
        assert changed == []


def test_tensors_only_in_the_files_are_skipped_without_strict(tmp_path: Path) -> None:
    save_file({**make_model(0).state_dict(), "rotary": torch.zeros(3)}, tmp_path / "model.safetensors")
    for message, changed in run_ranks(3, refuse, str(tmp_path), False):
        assert message == "no error"
        assert changed != []


def fail_to_export(folder: str) -> str:
    model, _ = LAYOUTS["3 ranks"].build(seed=0)
    return message_of(CheckpointError, lambda: export_safetensors(model, folder))


def test_an_export_that_rank_0_cannot_write_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for message in run_ranks(3, fail_to_export, str(tmp_path / "file")):
        assert "exporting to" in message
        assert "failed on rank 0: FileExistsError" in message


def take_whole(layout: Layout) -> tuple[int, State]:
    model, _ = layout.build(seed=0)
    return dist.get_rank(), full_state_dict(model)


@pytest.mark.parametrize("name", ["3 ranks", "HFSDP, blocks of 5 rows", "FSDP2"])
def test_the_full_state_dict_is_whole_on_rank_0_and_empty_elsewhere_on(name: str) -> None:
    for rank, found in run_ranks(LAYOUTS[name].num_ranks, take_whole, LAYOUTS[name]):
        assert differing(found, make_model(0).state_dict() if rank == 0 else {}) == []
