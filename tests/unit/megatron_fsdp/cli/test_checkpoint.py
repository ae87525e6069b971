"""The checkpoint command in one process: output, exit status, and weights to safetensors and back."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron_fsdp import load_checkpoint, save_checkpoint
from megatron_fsdp.__main__ import main


class Tiny(nn.Module):
    """Two layers and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


MAP = {"embedding.weight": "model.embed_tokens.weight", "blocks.*.weight": "model.layers.*.mlp.weight"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.head(model.embedding(torch.arange(3))).sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, tmp_path / "step_0000007", extra={"iteration": 7, "table": torch.zeros(2, 2)})
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    return tmp_path / "step_0000007"


def command(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def test_inspect_prints_names_shapes_ties_optimizer_and_extra(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("inspect", checkpoint) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{checkpoint}: saved by 1 rank(s), torch 2.")
    assert "  blocks.1.weight   float32   (3, 3)" in lines
    assert f"6 tensors of the model, {4 * (15 + 24 + 15)} bytes" in lines
    assert "tied: embedding.weight = head.weight" in lines
    assert "optimizer AdamW, state per parameter: exp_avg, exp_avg_sq, step" in lines
    assert lines[-2:] == ["extra iteration: 7", "extra table: tensor (2, 2)"]


def test_verify_counts_the_bytes_of_a_whole_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", checkpoint) == 0
    num_bytes = sum(file.stat().st_size for file in checkpoint.iterdir() if file.name != "manifest.json")
    assert capsys.readouterr().out == f"{checkpoint}: whole, {num_bytes:,} bytes checked\n"


def test_verify_goes_through_a_folder_of_checkpoints_and_fails_when_one_is_damaged(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(Tiny(), None, checkpoint.with_name("step_0000008"))
    (checkpoint / "state.pt").write_bytes(b"")
    assert command("verify", checkpoint.parent) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {checkpoint} is damaged; nothing was loaded")
    assert f"{checkpoint / 'state.pt'} has 0 bytes" in printed.err
    assert f"{checkpoint.with_name('step_0000008')}: whole" in printed.out


def test_inspect_goes_through_a_folder_of_checkpoints_as_verify_does(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(Tiny(), None, checkpoint.with_name("step_0000008"))
    assert command("inspect", checkpoint.parent) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.partition(": saved by")[0] for line in lines if ": saved by" in line]
    assert heads == [str(checkpoint), str(checkpoint.with_name("step_0000008"))]


def test_export_replaces_files_with_force_alone(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = checkpoint.parent / "hf"
    assert command("export", checkpoint, output) == 0
    written = (output / "model.safetensors").read_bytes()
    assert command("export", checkpoint, output, "--dtype", "bfloat16") == 1
    assert capsys.readouterr().err == (
        f"megatron-fsdp checkpoint export: {output} holds model.safetensors already. fix: add --force, or "
        "name another folder\n"
    )
    assert (output / "model.safetensors").read_bytes() == written
    assert command("export", checkpoint, output, "--dtype", "bfloat16", "--force") == 0
    assert {tensor.dtype for tensor in load_file(output / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_a_path_without_a_checkpoint_is_an_error(
    tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(action, tmp_path) == 1
    assert capsys.readouterr().err.startswith(f"megatron-fsdp checkpoint {action}: ")


def test_export_writes_each_parameter_once_under_the_mapped_name(checkpoint: Path) -> None:
    output = checkpoint.parent / "hf"
    assert command("export", checkpoint, output, "--name-map", checkpoint.parent / "map.json") == 0
    found = load_file(output / "model.safetensors")
    model: Any = Tiny()
    load_checkpoint(model, None, checkpoint)
    assert sorted(found) == [
        "blocks.0.bias",
        "blocks.1.bias",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.weight",
        "model.layers.1.mlp.weight",
    ]
    assert torch.equal(found["model.layers.1.mlp.weight"], model.blocks[1].weight)


def test_export_splits_and_converts_by_its_options(checkpoint: Path) -> None:
    output = checkpoint.parent / "hf"
    assert command("export", checkpoint, output, "--dtype", "bfloat16", "--max-file-size", "40B") == 0
    files = sorted(output.glob("model-*-of-00003.safetensors"))
    assert len(files) == 3
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}


def test_export_names_the_tensor_that_it_writes_on_a_terminal(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert command("export", checkpoint, checkpoint.parent / "hf") == 0
    shown = capsys.readouterr().err
    assert "\r\x1b[Ktensor 1 of 5: " in shown
    assert shown.endswith("\r\x1b[K")
