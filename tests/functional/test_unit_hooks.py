"""Meshes and switches that a user may bring: gradients equal a whole model's all the same.

Hooks, collectives and ways in are FSDP2's scenarios (``compatibility_communication``, ``compatibility_methods``).
"""

from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import memory_meter, observe_collectives
from megatron_fsdp import (
    Placements,
    fully_shard,
    fully_shard_optimizer,
    no_sync,
    share_comm_ctx,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Block, Made, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, compare, shard_each, shard_layers, units_of
from tests.harness.twins import Twins

BASE = Case(three_blocks, squared)


@on_ranks(2)
def test_one_communicator_for_both_directions_gives_the_same_gradients() -> None:
    def shard(model: nn.Module) -> None:
        shard_each(model)
        root = units_of(model)[0]
        root.set_separate_reduce_scatter_group(False)
        for unit in units_of(model):
            for group in unit.parameter_groups:
                assert all(axis.reduce_group is axis.gather_group for axis in group.main_weight.axes)

    result = compare(replace(BASE, shard=shard))
    assert result.is_exact


class Experts(nn.Module):
    """Half of the ranks' experts each: this rank's own, applied to what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 7, 7) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight[0]) @ self.weight[1]


def with_experts() -> nn.Module:
    return Stack(Block(), Experts(), Block())


def shard_experts_elsewhere(model: nn.Module) -> None:
    """Experts over half of the ranks, the rest over all: the divisor makes up for the other half."""
    whole_world = init_device_mesh("cpu", (dist.get_world_size(),))
    halves = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("expert", "expert_dp"))
    for layer in model.layers:
        if isinstance(layer, Experts):
            fully_shard(layer, halves, Placements.hfsdp())
        else:
            fully_shard(layer, whole_world)
    fully_shard(model, whole_world)


def test_units_on_other_meshes_and_placements_train_together() -> None:
    results = run_ranks(4, compare, Case(with_experts, squared, shard=shard_experts_elsewhere))
    assert all(result.is_exact for result in results), results


def looked() -> nn.Module:
    """Return an embedding, whose backward does not read its weights, and a block."""
    return Made(lambda m, tokens: m.block(m.embedding(tokens)), embedding=nn.Embedding(11, 7), block=Block())


def looked_up(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    tokens = torch.arange(5) * (rank + 2) % 11 + step % 2
    return model(tokens % 11).square().mean()


@on_ranks(2)
def test_an_embedding_is_not_gathered_for_a_backward_that_does_not_read_it() -> None:
    kinds: Counter[str] = Counter()

    def shard(model: nn.Module) -> None:
        fully_shard(model.embedding).set_unshard_in_backward(False)
        fully_shard(model.block)
        fully_shard(model)

    with observe_collectives(lambda call: kinds.update([call.kind])):
        result = compare(Case(looked, looked_up, shard=shard))
    num_gathers = kinds["all_gather"]
    assert result.worst_gradient < 2e-6
    # Two units in each of three forwards, none in backward; the comparison reads gradients and weights whole.
    without_reading = num_gathers - 3 * 7 - 7
    assert without_reading == 6


@on_ranks(2)
def test_two_roots_that_share_a_context_hold_one_packed_buffer_at_a_time() -> None:
    def shard(model: nn.Sequential) -> None:
        for block in model:
            fully_shard(block)
        share_comm_ctx(list(model))

    twins = Twins(lambda: nn.Sequential(Block(hidden=64), Block(hidden=64)), shard=shard)
    first, second = twins.model
    out = second(first(inputs(dist.get_rank(), 0)))
    memory_meter().reset_peak()
    rest = memory_meter().current_bytes
    out.square().mean().backward()
    peak = memory_meter().peak_bytes - rest
    twins.plain_backward()
    (group,) = units_of(first)[0].parameter_groups
    assert twins.gradients_apart() < 2e-6
    assert peak // group.gathered.nbytes == 1


@on_ranks(4)
def test_the_switches_for_accumulation_may_be_mixed() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    twins = Twins(shard=shard_layers, mesh=mesh)
    model = twins.model
    root = units_of(model)[0]
    fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for index in range(5):
        root.set_is_last_backward(index == 4)
        root.set_requires_all_reduce(index >= 3)
        if index == 1:
            with no_sync(model):
                squared(model, dist.get_rank(), index).backward()
        else:
            root.set_requires_gradient_sync(index != 2)
            squared(model, dist.get_rank(), index).backward()
        root.set_requires_gradient_sync(True)
        twins.plain_backward(index)
    assert twins.gradients_apart() < 5e-6
