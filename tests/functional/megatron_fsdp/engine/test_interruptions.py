"""A model stays usable after a step that is interrupted at any call, by an exception or a lack of memory."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_optimizer
from tests.functional.megatron_fsdp.engine.interruptions import SWEEPS, Sweep, run
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Block, Headed, inputs, squared
from tests.harness.oracle import ZERO, whole
from tests.harness.twins import Twins


def kept_gathered(model: Any) -> None:
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    # A fused step changes no version counter.
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def refreshing(model: nn.Module) -> torch.optim.Optimizer:
    return fully_shard_optimizer(fused(model))


@pytest.mark.parametrize("build", [fused, refreshing])
@pytest.mark.parametrize("strategy", ZERO)
@on_ranks(2)
def test_the_next_forward_uses_weights_changed_by_an_interrupted_step(
    strategy: str, build: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    twins = Twins(lambda: Headed(Block(), Block(), nn.LayerNorm(WIDTH)), strategy)
    model, plain = twins
    kept_gathered(model)
    optimizer = build(model)
    squared(model, dist.get_rank(), 0).backward()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    # Hooks are called in the order of registration, those of all optimizers last.
    optimizer._optimizer_step_post_hooks = {-1: fail, **optimizer._optimizer_step_post_hooks}
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    model.zero_grad()
    weights = {name: whole(value, value) for name, value in model.named_parameters()}
    assert any(not torch.equal(value, weights[name]) for name, value in plain.named_parameters())
    plain.load_state_dict(weights)
    # Run with gradients enabled: an evaluation refreshes weights in any case.
    mine, wanted = (one(inputs(dist.get_rank(), 2)) for one in twins)
    assert (mine - wanted).abs().max().item() < 1e-6


# Functions that reduce while backward runs, and that gather or release weights.
BACKWARD = (
    r"grads\.py wait |reduce\.py fold |accumulation\.py begin_sum |post_backward\.py drain "
    r"|backward\.py begin_backward |final_callback\.py final_callback |params\.py allow_reads "
)
GATHERS = r"all_gather\.py all_gather |waits\.py wait_for "
QUICK = [
    Sweep("optim_grads_params", "memory", 13, is_fresh=True),
    Sweep("optim", "memory", 23, is_fresh=True),
    Sweep("no_shard", "calls", 401, is_fresh=True),
    Sweep("optim_grads_params", "calls", 401, is_fresh=True),
    Sweep("mixed", "calls", 401),
    Sweep("hfsdp", "calls", 401),
    Sweep("optim_grads, adamw", "calls", 401),
    Sweep("optim, refreshed", "calls", 401, num_ranks=2),
    *(Sweep(setup, BACKWARD, 5, num_ranks=2) for setup in ("no_shard", "optim_grads_params")),
    *(Sweep(setup, GATHERS, 5, num_ranks=2) for setup in ("optim", "optim_grads", "optim_grads_params")),
    Sweep("ordered", r"forward_order\.py", 7),
    Sweep("ordered", "memory", 17),
    Sweep("frozen", r"all_gather\.py sort ", 3, num_ranks=2),
    *(Sweep(setup, r"storage\.py reallocate ", 1) for setup in ZERO),
    Sweep("adamw", r"update\.py run ", 1),
]


@pytest.mark.parametrize("pattern", sorted({sweep.kind for sweep in (*QUICK, *SWEEPS) if ".py" in sweep.kind}))
def test_a_pattern_of_calls_names_functions_of_the_library(pattern: str) -> None:
    root = Path(__file__).parents[4]
    for file, several, one in re.findall(r"(\w+)\\\.py(?: \(([\w|]+)\) | (\w+) |$)", pattern):
        names = {
            node.name
            for folder in ("dbuffer", "megatron_fsdp")
            for path in (root / folder).rglob(f"{file}.py")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
        assert names, f"no file {file}.py"
        assert {name for name in (*several.split("|"), one) if name} <= names
    assert pattern.count(".py") == len(re.findall(r"\w+\\\.py(?: \([\w|]+\) | \w+ |$)", pattern))


@pytest.mark.parametrize("sweep", nightly_but(QUICK, [*QUICK, *SWEEPS]), ids=str)
def test_a_step_interrupted_at_any_call_does_not_affect_later_steps(sweep: Sweep) -> None:
    for found in run_ranks(sweep.num_ranks, run, sweep, timeout=120 if sweep in QUICK else 1200):
        assert found.num_steps >= 3
        assert found.wrong == []
