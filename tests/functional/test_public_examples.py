"""The example in the docstring of every public name runs unchanged."""

import argparse
import contextlib
import importlib
import inspect
import os
import re
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from megatron_fsdp.megatron import fully_shard_model, fully_shard_model_and_optimizer
from megatron_fsdp.muon import MatrixView, explain_ownership, muon_param_groups
from tests.harness import run_ranks

MODULES = ("megatron_fsdp", "megatron_fsdp.huggingface", "megatron_fsdp.megatron", "megatron_fsdp.muon")
# Examples that need a missing package or a Megatron job: these are only compiled. The others run.
NEED_MORE = ("accelerate_fsdp2 get_megatron_optimizer install load_torch_dist main uninstall").split()
# A table, a class that is made from one of megatron.core's on demand, and PyTorch's own.
WITHOUT = ("COEFFICIENT_SETS", "ShardedDataParallel", "CPUOffloadPolicy", "OffloadPolicy")
NAMES = [
    (module, name)
    for module in MODULES
    for name in importlib.import_module(module).__all__
    if name not in WITHOUT and (module == "megatron_fsdp" or name not in megatron_fsdp.__all__)
]
# Examples that shard get a whole model, other examples get a sharded one.
SHARDING = re.compile(r"(fully_shard|fully_shard_model\w*|replicate)\(")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def example_of(module: str, name: str) -> str:
    """Return the code below "Example:" in a name's docstring, or an empty text."""
    value: Any = getattr(importlib.import_module(module), name)
    text = inspect.cleandoc(value.__doc__ or "")
    found = re.search(r"^Example:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


def scene(code: str) -> dict[str, Any]:
    model: Any = Model()
    if not SHARDING.search(code):
        for block in model.blocks:
            megatron_fsdp.fully_shard(block)
        megatron_fsdp.fully_shard(model)
    batches = [torch.randn(3, 16) for _ in range(2)]
    ours = {name: getattr(megatron_fsdp, name) for name in megatron_fsdp.__all__}
    theirs = (argparse, torch, dist, nn, init_device_mesh, timedelta, Model, Block)
    muons = (MatrixView, explain_ownership, muon_param_groups)
    megatrons = (fully_shard_model, fully_shard_model_and_optimizer)
    return {
        **ours,
        **{each.__name__.rpartition(".")[2]: each for each in (*theirs, *muons, *megatrons)},
        "dist": dist,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "batch": batches[0],
        "batches": batches,
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "path": "runs/step_0000100",
    }


def run_example(module: str, name: str, folder: str) -> None:
    os.chdir(folder)
    code, value = example_of(module, name), getattr(importlib.import_module(module), name)
    is_error = isinstance(value, type) and issubclass(value, Exception)
    names = scene(code)
    if "path" in code:
        megatron_fsdp.save_checkpoint(names["model"], names["optimizer"], names["path"])
    with contextlib.suppress(value) if is_error else contextlib.nullcontext():
        exec(compile(code, f"<the example of {name}>", "exec"), names)  # the text itself is under test


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_public_name_has_a_short_example_that_runs(module: str, name: str, tmp_path: Path) -> None:
    code = example_of(module, name)
    assert 1 <= len(code.strip().splitlines()) <= 6
    if name in NEED_MORE:
        compile(code, f"<the example of {name}>", "exec")
    else:
        run_ranks(1, run_example, module, name, str(tmp_path))
