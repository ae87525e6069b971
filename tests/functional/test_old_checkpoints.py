"""Checkpoints that an earlier version wrote on three ranks load into this one, and training goes on from them alike.

They lie in ``golden/checkpoints`` and were written by ``old_checkpoints.py`` of the commit before the folders were cut
into rooms; they are not written again.
"""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_fsdp import full_state_dict, import_safetensors, load_checkpoint
from tests.functional.old_checkpoints import KINDS, build, train
from tests.harness import run_ranks

FOLDER = Path(__file__).parent / "golden" / "checkpoints"
State = dict[str, torch.Tensor]


def go_on(path: str, kind: str) -> tuple[State, State, dict[str, object]]:
    model, optimizer = build(kind, seed=2)
    extra = load_checkpoint(model, optimizer, f"{path}/{kind}")
    before = full_state_dict(model)
    train(model, optimizer, range(3, 5))
    return before, full_state_dict(model), dict(extra)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_old_checkpoint_is_loaded_and_gone_on_from(kind: str, num_ranks: int, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "old")
    wanted = load_file(FOLDER / f"{kind}.safetensors")
    before, after, extra = run_ranks(num_ranks, go_on, str(tmp_path / "old"), kind)[0]
    assert extra.get("sample") == (None if kind == "megatron" else 3)
    assert {f"before.{name}" for name in before} == {name for name in wanted if name.startswith("before.")}
    for name, value in before.items():
        assert torch.equal(value, wanted[f"before.{name}"]), name
    tolerance = 0.02 if kind == "split_weights" else 1e-5
    for name, value in after.items():
        assert not torch.equal(value, before[name])
        torch.testing.assert_close(value, wanted[f"after.{name}"], rtol=tolerance, atol=tolerance)


def read_exported() -> State:
    model, _ = build("adamw", seed=2)
    import_safetensors(model, FOLDER / "exported")
    return full_state_dict(model) if dist.is_initialized() else {}


def test_old_exported_weights_are_read() -> None:
    wanted = load_file(FOLDER / "adamw.safetensors")
    found = run_ranks(2, read_exported)[0]
    assert found
    for name, value in found.items():
        assert torch.equal(value, wanted[f"before.{name}"]), name
