"""Checkpoints of each kind, small, and what training from them gives; written once, for later versions to load.

``python -m torch.distributed.run --nproc-per-node 3 -m tests.functional.old_checkpoints FOLDER`` writes them.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from megatron_fsdp import (
    AdamW,
    MixedPrecisionPolicy,
    Muon,
    export_safetensors,
    full_state_dict,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    save_checkpoint,
)
from megatron_fsdp.integrations.megatron.checkpoint import describe_by_name, lay_out_for_megatron
from megatron_fsdp.muon import muon_param_groups

KINDS = ("adamw", "torch_adamw", "split_weights", "muon", "megatron")
SPLIT = MixedPrecisionPolicy(param_dtype=torch.bfloat16, split_main_params=True)


class Net(nn.Module):
    """Three matrices, none of which three ranks divide, with a norm between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.second, self.last = nn.Linear(7, 10, bias=False), nn.Linear(10, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return three numbers per row."""
        hidden = functional.silu(self.second(self.norm(functional.silu(self.first(inputs)))))
        output: torch.Tensor = self.last(hidden)
        return output


def build(kind: str, seed: int) -> tuple[Any, Any]:
    """Make a sharded model of a kind and its optimizer."""
    model: Any = Net(seed)
    if kind == "megatron":
        return _with_groups(fully_shard_model(model, fsdp_unit_modules=[nn.Linear]))
    policy = SPLIT if kind == "split_weights" else None
    for part in (model.first, model.second, model):
        fully_shard(part, mp_policy=policy)
    if kind == "torch_adamw":
        return _with_groups(model)
    if kind == "muon":
        return model, Muon(muon_param_groups(model), lr=0.02)
    return model, AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def _with_groups(model: Any) -> tuple[Any, Any]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, fully_shard_optimizer(torch.optim.AdamW(groups, lr=0.02))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps with the same rows on every rank, so that the number of ranks changes nothing but rounding."""
    for step in steps:
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        functional.mse_loss(model(inputs), inputs[:, :3]).backward()
        optimizer.step()
        optimizer.zero_grad()


def write(folder: Path) -> None:
    """Write every kind: trained for three steps, with its weights then and after two more."""
    for kind in KINDS:
        model, optimizer = build(kind, seed=1)
        train(model, optimizer, range(3))
        save(kind, model, optimizer, folder / kind)
        before = full_state_dict(model)
        train(model, optimizer, range(3, 5))
        after = full_state_dict(model)
        if dist.get_rank() == 0:
            values = {f"before.{name}": value.contiguous() for name, value in before.items()}
            values |= {f"after.{name}": value.contiguous() for name, value in after.items()}
            save_file(values, folder / f"{kind}.safetensors")


def save(kind: str, model: Any, optimizer: Any, path: Path) -> None:
    """Save a model and its optimizer as a kind is saved; with weights alone besides, for one."""
    if kind == "megatron":
        state = {"model": model.state_dict(), "optimizer": describe_by_name([model], optimizer, is_loading=False)}
        dcp.save(lay_out_for_megatron(state, model, is_gated=False), checkpoint_id=path)
        return
    save_checkpoint(model, optimizer, path, extra={"sample": 3, "kind": kind})
    if kind == "adamw":
        export_safetensors(model, path.parent / "exported")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    write(Path(sys.argv[1]))
    dist.destroy_process_group()
