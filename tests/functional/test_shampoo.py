"""Shampoo on the ownership plan: the steps of whole matrices to the bit, its factors on owners, re-owned on load."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import ConfigError, Muon, Placements, load_checkpoint, save_checkpoint
from tests.functional.muon_model import (
    DIVISOR,
    NUM_MICROBATCHES,
    VIEWS,
    cuts_of,
    make_matrices,
    param_groups,
    put_back,
    seed_of,
    shard_matrices,
    train_sharded,
)
from tests.functional.shampoo import Shampoo
from tests.harness import run_ranks
from tests.harness.models import make_mesh
from tests.harness.oracle import differing, whole_state

OPTIONS: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.1, "beta2": 0.9, "frequency": 2}
Weights = dict[str, torch.Tensor]


def root(mean: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(mean)
    values = values.clamp(min=0) + 1e-6 * values[-1].clamp(min=1e-30)
    return (vectors * values.pow(-0.25)) @ vectors.T


def whole_run(num_steps: int, num_ranks: int) -> Weights:
    model = make_matrices()
    parameters = dict(model.named_parameters())
    adamw = torch.optim.AdamW(
        [p for key, p in parameters.items() if key.rpartition(".")[2] not in VIEWS], lr=0.01, weight_decay=0.05
    )
    matrices = [(cut, p) for key, p in parameters.items() for cut in cuts_of(key.rpartition(".")[2])]
    state: dict[int, Any] = {}
    for step in range(num_steps):
        for rank in range(num_ranks):
            for index in range(NUM_MICROBATCHES):
                model(seed_of(rank, step, index)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= DIVISOR
        adamw.step()
        with torch.no_grad():
            for number, (cut, parameter) in enumerate(matrices):
                assert parameter.grad is not None
                gradient, weight = cut(parameter.grad).clone(), cut(parameter).clone()
                left, right, *roots = state.get(number, (torch.zeros(()), torch.zeros(())))
                outer, inner = gradient @ gradient.T, gradient.T @ gradient
                left = left.expand_as(outer).clone().lerp_(outer, 1 - 0.9)
                right = right.expand_as(inner).clone().lerp_(inner, 1 - 0.9)
                if step % 2 == 0:
                    roots = [root(mean / (1 - 0.9 ** (step + 1))) for mean in (left, right)]
                state[number] = (left, right, *roots)
                update = roots[0] @ gradient @ roots[1]
                update = update * (gradient.norm() / update.norm().clamp(min=1e-30))
                weight.mul_(1 - 0.03 * 0.1).add_(update, alpha=-0.03)
                put_back(cut, parameter, weight)
        model.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def sharded(mesh_shape: tuple[int, ...], strategy: str) -> tuple[nn.Module, Shampoo]:
    placements = getattr(Placements, strategy)(*range(len(mesh_shape)))
    model = shard_matrices(make_matrices(), make_mesh(mesh_shape), placements)
    return model, Shampoo(param_groups(model), **OPTIONS)


def train_and_save(mesh_shape: tuple[int, ...], strategy: str, folder: str) -> tuple[Weights, int]:
    """Train for four steps, saving after three; return weights and how many matrices have factors here."""
    model, optimizer = sharded(mesh_shape, strategy)
    rank = dist.get_rank()
    train_sharded(model, optimizer, range(3), rank)
    save_checkpoint(model, optimizer, folder)
    train_sharded(model, optimizer, range(3, 4), rank)
    return whole_state(model), len(optimizer.solver_of({}).known)


@pytest.mark.parametrize(("mesh_shape", "strategy"), [((2,), "optim_grads_params"), ((2, 2), "hsdp")], ids=str)
def test_steps_equal_whole_matrices_and_each_has_its_factors_once(
    mesh_shape: tuple[int, ...], strategy: str, tmp_path: Any
) -> None:
    num_ranks = torch.Size(mesh_shape).numel()
    wanted = whole_run(4, num_ranks)
    ranks = run_ranks(num_ranks, train_and_save, mesh_shape, strategy, str(tmp_path / "checkpoint"))
    assert [differing(weights, wanted) for weights, _ in ranks] == [[]] * num_ranks
    counts = [count for _, count in ranks]
    assert sum(counts) == 32
    assert max(counts) < 32 / num_ranks + 4


def resume(folder: str) -> Weights:
    model, optimizer = sharded((3,), "optim_grads_params")
    load_checkpoint(model, optimizer, folder)
    rank = dist.get_rank()
    for index in range(NUM_MICROBATCHES):
        (model(seed_of(min(rank, 1), 3, index)) * float(rank < 2)).backward()
    optimizer.step()
    return whole_state(model)


def test_factors_go_to_who_owns_the_matrix_after_a_resume_on_other_ranks(tmp_path: Any) -> None:
    folder = str(tmp_path / "checkpoint")
    run_ranks(2, train_and_save, (2,), "optim_grads_params", folder)
    wanted = whole_run(4, 2)
    assert [differing(found, wanted) for found in run_ranks(3, resume, folder)] == [[]] * 3


def test_numbers_out_of_range_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    for options in ({"beta2": 1.0}, {"frequency": 0}):
        with pytest.raises(ConfigError, match="Shampoo"):
            Shampoo([weight], **options)
    assert issubclass(Shampoo, Muon)
