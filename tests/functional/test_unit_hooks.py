"""Hooks, collectives, meshes and ways in that a user may bring: gradients equal a whole model's all the same."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
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
    register_fsdp_forward_method,
    share_comm_ctx,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, compare, shard_each, shard_layers, units_of, whole
from tests.harness.twins import Twins

BASE = Case(three_blocks, squared)


@pytest.mark.parametrize("strategy", nightly_but(["optim_grads_params"], ["optim", "optim_grads_params"]))
@on_ranks(4)
def test_a_hook_that_reduces_over_another_axis_makes_hybrid_sharding(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    calls = 0

    def reduce_outer(gradient: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        dist.all_reduce(gradient, group=mesh.get_group("outer"))
        gradient.div_(2)

    def shard(model: nn.Module) -> None:
        for layer in model.layers:
            fully_shard(layer, mesh["inner"], getattr(Placements, strategy)())
            layer.set_all_reduce_hook(reduce_outer)
        fully_shard(model, mesh["inner"], getattr(Placements, strategy)())

    result = compare(replace(BASE, shard=shard))
    assert result.is_exact, result
    assert calls == 3 * BASE.steps


class CountingComm:
    """An all-gather and a reduce-scatter as FSDP2's ``Comm`` protocols have them."""

    def __init__(self) -> None:
        self.num_gathers = self.num_reductions = 0

    def gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.num_gathers += 1
        chunks = list(output_tensor.chunk(group.size()))
        return dist.all_gather(chunks, input_tensor.clone(), group=group, async_op=async_op)

    def reduce(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.num_reductions += 1
        dist.all_reduce(input_tensor, op=op, group=group)
        return None


@on_ranks(2)
def test_custom_collectives_are_used_for_every_gather_and_reduction() -> None:
    comm = CountingComm()

    def shard(model: nn.Module) -> None:
        shard_each(model)
        for unit in units_of(model):
            unit.set_custom_all_gather(comm.gather)
            unit.set_custom_reduce_scatter(comm.reduce)

    result = compare(replace(BASE, shard=shard))
    assert result.is_exact
    assert (comm.num_gathers, comm.num_reductions) == (5 * BASE.steps, 3 * BASE.steps)


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


def packed_peak(num_buffers: int) -> int:
    model = Stack(Block(), Block(), Block())
    shard_each(model)
    units_of(model)[0].set_reduce_scatter_max_input_buffers(num_buffers)
    loss = squared(model, dist.get_rank(), 0)
    memory_meter().reset_peak()
    loss.backward()
    return memory_meter().peak_bytes


def test_more_packed_buffers_are_held_only_when_allowed() -> None:
    one, two = run_ranks(2, packed_peak, 1)[0], run_ranks(2, packed_peak, 2)[0]
    assert two > one


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


@on_ranks(4)
def test_expert_gradients_are_divided_by_all_ranks_with_grad_divisor() -> None:
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "expert_dp"))
    torch.manual_seed(dist.get_rank() // 2)
    plain = Experts()
    experts = copy.deepcopy(plain)
    fully_shard(experts, halves["expert_dp"], grad_divisor=2)
    experts(inputs(dist.get_rank(), 0)).square().mean().backward()
    for rank in (dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1):
        (plain(inputs(rank, 0)).square().mean() / 4).backward()
    mine = whole(experts.weight.grad, experts.weight)
    assert plain.weight.grad is not None
    worst = float((mine - plain.weight.grad).abs().max())
    size = float(mine.abs().max())
    assert worst < 1e-7
    assert size > 1e-4


class Encoder(Block):
    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return Block.forward(self, x) * scale


def encoders() -> nn.Module:
    return Stack(Encoder(), Encoder(hidden=5))


def shard_encoders(model: nn.Module) -> None:
    shard_each(model)
    for module in model.modules():
        register_fsdp_forward_method(module, "encode") if isinstance(module, Encoder) else None
    register_fsdp_forward_method(nn.Linear(2, 2), "no_such_method")  # nothing happens to what is not sharded


def encoded(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    first, second = model.layers
    assert isinstance(first, Encoder)
    assert isinstance(second, Encoder)
    return second.encode(first.encode(inputs(rank, step), scale=0.5), scale=2.0).square().mean()


def test_gradients_are_exact_through_a_registered_forward_method() -> None:
    results = run_ranks(2, compare, Case(encoders, encoded, shard=shard_encoders))
    assert all(result.is_exact for result in results), results


class Looked(nn.Module):
    """An embedding, whose backward does not read its weights, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.block = Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(self.embedding(tokens))


def looked_up(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    tokens = torch.arange(5) * (rank + 2) % 11 + step % 2
    return model(tokens % 11).square().mean()


@on_ranks(2)
def test_an_embedding_is_not_gathered_for_a_backward_that_does_not_read_it() -> None:
    kinds: Counter[str] = Counter()

    def shard(model: nn.Module) -> None:
        assert isinstance(model, Looked)
        fully_shard(model.embedding).set_unshard_in_backward(False)
        fully_shard(model.block)
        fully_shard(model)

    with observe_collectives(lambda call: kinds.update([call.kind])):
        result = compare(Case(Looked, looked_up, shard=shard))
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
