"""The resident memory of a process that trains on CPU stays bounded: collectives do not fragment its heap."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from gpt.train_log import memory_use
from megatron_fsdp import clip_grad_norm_, fully_shard, fully_shard_optimizer
from tests.harness import on_ranks

WIDTH, TOKENS = 32, 1024
FIRST, LAST = 20, 120


class Block(nn.Module):
    """Activations of 512 KiB, which the allocator takes from the heap instead of mapping pages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + update


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(*(Block() for _ in range(4)))
        for block in self.model:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = fully_shard_optimizer(torch.optim.AdamW(self.model.parameters()))

    def step(self) -> None:
        self.model(torch.randn(TOKENS, WIDTH)).square().mean().backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.slow
@on_ranks(2, fresh=True)
def test_a_hundred_steps_add_less_than_10_mib_to_what_is_resident() -> None:
    # With the flight recorder the growth is 30. Use new processes: a used heap has holes that absorb the growth for a
    # while.
    training = Training()
    held = []
    for number in range(LAST):
        training.step()
        if number + 1 in (FIRST, LAST):
            held.append(memory_use(torch.device("cpu")).now)
    assert held[1] - held[0] < 10


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build for GPUs keeps its records")
@on_ranks(2)
def test_nothing_is_kept_of_the_collectives_of_a_step() -> None:
    Training().step()
    c10d: Any = torch._C._distributed_c10d
    assert json.loads(c10d._dump_fr_trace_json()).get("entries", []) == []


def printed(program: str, **variables: str) -> str:
    """Return the output of a program in a new process with additional environment variables."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_FR_BUFFER_SIZE"} | variables
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return found.stdout.strip()


def test_importing_the_library_sets_one_environment_variable_at_most() -> None:
    program = """
import os, torch
before = dict(os.environ)
from megatron_fsdp import fully_shard
print({name: value for name, value in os.environ.items() if before.get(name) != value})
"""
    expected = {} if torch.backends.cuda.is_built() else {"TORCH_FR_BUFFER_SIZE": "0"}
    assert printed(program) == str(expected)


def test_a_size_that_the_user_gave_the_flight_recorder_is_kept() -> None:
    program = "import os; from megatron_fsdp import fully_shard; print(os.environ['TORCH_FR_BUFFER_SIZE'])"
    assert printed(program, TORCH_FR_BUFFER_SIZE="7") == "7"
