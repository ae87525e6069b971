"""Checkpoints that an earlier version wrote on three ranks load into this version, and training goes on equally.

The folders in ``tests/functional/golden/checkpoints`` hold the saved weights and the weights two steps later. The
commit before the code was split into rooms wrote them; they are never written again.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from megatron_fsdp import (
    AdamW,
    MixedPrecisionPolicy,
    Muon,
    full_state_dict,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    import_safetensors,
    load_checkpoint,
)
from megatron_fsdp.muon import muon_param_groups
from tests.harness import run_ranks

FOLDER = Path(__file__).parents[2] / "golden" / "checkpoints"
KINDS = ("adamw", "torch_adamw", "split_weights", "muon", "megatron")
SPLIT = MixedPrecisionPolicy(param_dtype=torch.bfloat16, split_main_params=True)
State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Three matrices, none divisible by three ranks, with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.second, self.last = nn.Linear(7, 10, bias=False), nn.Linear(10, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = functional.silu(self.second(self.norm(functional.silu(self.first(inputs)))))
        output: torch.Tensor = self.last(hidden)
        return output


def build(kind: str) -> tuple[Any, Any]:
    model: Any = Net()
    if kind == "megatron":
        model = fully_shard_model(model, fsdp_unit_modules=[nn.Linear])
    else:
        policy = SPLIT if kind == "split_weights" else None
        for part in (model.first, model.second, model):
            fully_shard(part, mp_policy=policy)
    if kind == "muon":
        return model, Muon(muon_param_groups(model), lr=0.02)
    if kind in ("adamw", "split_weights"):
        return model, AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, fully_shard_optimizer(torch.optim.AdamW(groups, lr=0.02))


def go_on(path: str) -> tuple[dict[str, tuple[State, State, Any]], State]:
    """Load each kind, and take two steps with the same rows on every rank; then read weights that were exported."""
    found = {}
    for kind in KINDS:
        model, optimizer = build(kind)
        sample = load_checkpoint(model, optimizer, f"{path}/{kind}").get("sample")
        before = full_state_dict(model)
        for step in range(3, 5):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            functional.mse_loss(model(inputs), inputs[:, :3]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = before, full_state_dict(model), sample
    model, _ = build("adamw")
    import_safetensors(model, FOLDER / "exported")
    return found, full_state_dict(model)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_old_checkpoints_are_loaded_and_gone_on_from(num_ranks: int, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "old")
    by_kind, exported = run_ranks(num_ranks, go_on, str(tmp_path / "old"))[0]
    for kind, (before, after, sample) in by_kind.items():
        wanted = load_file(FOLDER / f"{kind}.safetensors")
        assert sample == (None if kind == "megatron" else 3)
        assert {f"before.{name}" for name in before} == {name for name in wanted if name.startswith("before.")}
        tolerance = 0.02 if kind == "split_weights" else 1e-5
        for name, value in before.items():
            assert torch.equal(value, wanted[f"before.{name}"]), (kind, name)
            assert not torch.equal(after[name], value)
            torch.testing.assert_close(after[name], wanted[f"after.{name}"], rtol=tolerance, atol=tolerance)
    wanted = load_file(FOLDER / "adamw.safetensors")
    assert exported
    for name, value in exported.items():
        assert torch.equal(value, wanted[f"before.{name}"]), name
