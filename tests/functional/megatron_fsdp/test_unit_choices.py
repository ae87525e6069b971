"""Gradients and weights equal a whole model's for each choice of one unit, each mesh and each switch.

FSDP2's programs (``compatibility.agreements``) test hooks, collectives and forward methods.
"""

import copy
import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import CollectiveCall, memory_meter, observe_collectives
from megatron_fsdp import (
    ConfigError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    clip_grad_norm_,
    fsdp_no_shard,
    fully_shard,
    replicate,
    share_comm_ctx,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Made, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, compare, sharded, units_of, whole
from tests.harness.twins import Twins

BASE = Case(three_blocks, squared)


AXES = {
    "one of two named": ((2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp"), [0, 2]),
    "two of three named": ((2, 1, 2), ("outer", "tp", "inner"), DataParallelMeshDims("inner", "outer"), [0, 1, 2, 3]),
    "all three": ((2, 1, 2), ("a", "b", "c"), None, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", AXES)
@on_ranks(4)
def test_replicate_keeps_weights_whole_and_averages_over_the_axes_it_is_given(name: str) -> None:
    shape, names, dims, group = AXES[name]
    model: Any = nn.Linear(3, 5, bias=False)
    replicate(model, init_device_mesh("cpu", shape, mesh_dim_names=names), dp_mesh_dims=dims)
    rank = dist.get_rank()
    model(torch.full((1, 3), float(rank))).sum().backward()
    group = group if rank in group else [1, 3]
    assert model.weight.to_local().shape == (5, 3)
    assert model.weight.grad.to_local().unique().tolist() == [sum(group) / len(group)]
    with pytest.raises(ConfigError, match=r"replicate\(placements=.*fix: leave placements out"):
        replicate(nn.Linear(3, 5), placements=Placements.optim())


GROUPS = [(4, 2), (4, 1), (4, 4), (2, 2), (1, 1)]


@pytest.mark.parametrize(("num_ranks", "size"), nightly_but([(4, 2), (2, 2)], GROUPS))
def test_gradients_are_exact_when_weights_are_resharded_to_groups(num_ranks: int, size: int) -> None:
    results = run_ranks(num_ranks, compare, replace(BASE, shard=functools.partial(sharded, reshard_after_forward=size)))
    assert all(result.is_exact or (num_ranks == 1 and result.worst_weight < 2e-6) for result in results), results


@on_ranks(4)
def test_backward_gathers_within_the_smaller_group_what_forward_kept() -> None:
    size = 2
    model = three_blocks()
    sharded(model, reshard_after_forward=size)
    numel = sum(group.plan.numel for unit in units_of(model) for group in unit.parameter_groups)
    kinds: Counter[tuple[int, int]] = Counter()
    phase = 0

    def count(call: CollectiveCall) -> None:
        if call.kind == "all_gather":
            kinds[phase, call.num_ranks] += 1

    rest = memory_meter().current_bytes
    with observe_collectives(count):
        loss = squared(model, dist.get_rank(), 0)
        kept = memory_meter().current_bytes - rest
        phase = 1
        loss.backward()
    model.zero_grad()
    assert memory_meter().current_bytes == rest
    part = numel * 4 // size
    assert sorted(kinds.elements()) == [(0, 4)] * 3 + [(1, 2)] * 3
    assert kept == part


@on_ranks(4)
def test_a_change_of_weights_voids_the_part_kept_after_forward() -> None:
    twins = Twins(reshard_after_forward=2)
    twins.model(inputs(0, 0))
    with torch.no_grad():
        for parameter in (parameter for model in twins for parameter in model.parameters()):
            parameter.mul_(1.5)
    again, wanted = (model(inputs(0, 0)).detach() for model in twins)
    assert float((again - wanted).abs().max()) < 1e-6


def scaled() -> Any:
    return Made(
        lambda m, x: m.blocks(x + m.router(x)) * m.scale, blocks=Stack(Block(), Block(hidden=5)),
        scale=nn.Parameter(torch.linspace(0.5, 1.5, 7)), router=nn.Linear(7, 7, bias=False),
    )  # fmt: skip


def keep_small_parts(model: Any) -> None:
    fsdp_no_shard(model.scale)
    fsdp_no_shard(model.router)
    for layer in model.blocks.layers:
        fsdp_no_shard(layer.norm)
        fully_shard(layer.norm)  # a marked module never becomes a unit
        fully_shard(layer)
    fully_shard(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_are_exact_with_replicated_parameters(num_ranks: int) -> None:
    results = run_ranks(num_ranks, compare, Case(scaled, squared, shard=keep_small_parts))
    assert all(result.worst_gradient < 2e-6 and result.worst_weight < 2e-6 for result in results), results


@on_ranks(3)
def test_replicated_parameters_are_whole_everywhere_and_reduced_without_a_gather() -> None:
    model = scaled()
    keep_small_parts(model)
    kinds: Counter[str] = Counter()
    with observe_collectives(lambda call: kinds.update([call.kind])):
        squared(model, dist.get_rank(), 0).backward()
    names = {name for name, value in model.named_parameters() if value.to_local().shape == value.shape}
    first, norms = model.blocks.layers[0], [torch.empty(()) for _ in range(3)]
    dist.all_gather(norms, clip_grad_norm_(model, float("inf")))
    assert names >= {"scale", "router.weight", "blocks.layers.0.norm.weight", "blocks.layers.0.norm.bias"}
    # Two blocks: three gathers, because the last one keeps its weights. One reduction each; three for replicated
    # groups.
    assert kinds == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 3}
    assert not isinstance(first.norm, FsdpModule)
    assert not first.norm._forward_pre_hooks
    assert norms[0] == norms[1] == norms[2]


MESHES = [((2,), "optim_grads_params"), ((2, 2), "hsdp"), ((2, 2), "hfsdp")]


@pytest.mark.parametrize(("mesh_shape", "strategy"), nightly_but([MESHES[0], MESHES[2]], MESHES), ids=str)
@on_ranks(lambda mesh_shape: torch.Size(mesh_shape).numel())
def test_gradients_are_exact_with_offload_under(mesh_shape: tuple[int, ...], strategy: str) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :])
    placements = getattr(Placements, strategy)(*range(len(mesh_shape)))
    options = {"mesh": mesh, "placements": placements, "offload_policy": CPUOffloadPolicy()}
    result = compare(replace(BASE, shard=functools.partial(sharded, **options)))
    assert result.is_exact, result


@on_ranks(2)
def test_offloaded_weights_and_gradients_have_memory_of_their_own() -> None:
    model = Block()
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    (group, *_) = units_of(model)[0].parameter_groups
    model.unshard()
    shares = group.gathered.local_buffer.data_ptr() <= group.main_weight.local_buffer.data_ptr()
    shares &= group.main_weight.local_buffer.data_ptr() < group.gathered.local_buffer.data_ptr() + group.gathered.nbytes
    model.reshard()
    squared(model, dist.get_rank(), 0).backward()
    assert (shares, group.spec.is_offloaded, group.main_grad.device.type) == (False, True, "cpu")


class Experts(nn.Module):
    """This rank's experts, two matrices applied to the tokens that the rank gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 7, 7) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight[0]) @ self.weight[1]


def with_experts() -> nn.Module:
    return Stack(Block(), Experts(), Block())


def shard_experts_elsewhere(model: nn.Module) -> None:
    """Shard experts over half of the ranks and the rest over all; the divisor accounts for the other half."""
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


def looked() -> nn.Module:
    """Return an embedding, whose backward does not read its weights, and a block."""
    return Made(lambda m, tokens: m.block(m.embedding(tokens)), embedding=nn.Embedding(11, 7), block=Block())


def looked_up(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    tokens = torch.arange(5) * (rank + 2) % 11 + step % 2
    return model(tokens % 11).square().mean()


@on_ranks(2)
def test_an_embedding_is_not_gathered_for_a_backward_that_does_not_read_it() -> None:
    kinds: Counter[str] = Counter()

    def shard(model: Any) -> None:
        fully_shard(model.embedding).set_unshard_in_backward(False)
        fully_shard(model.block)
        fully_shard(model)

    with observe_collectives(lambda call: kinds.update([call.kind])):
        result = compare(Case(looked, looked_up, shard=shard))
    num_gathers = kinds["all_gather"]
    assert result.worst_gradient < 2e-6
    # Two units in each of three forwards, none in backward; the comparison then gathers gradients and weights.
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


@on_ranks(3)
def test_a_group_gathers_and_releases_the_weights_of_its_unit() -> None:
    block: Any = Block()
    values = {name: value.detach().clone() for name, value in block.named_parameters()}
    policy = MixedPrecisionPolicy(torch.float64, param_dtype_override_fn=lambda p: p.dtype if p.ndim == 1 else None)
    fully_shard(block, mp_policy=policy)
    first, second = block.parameter_groups
    first.unshard()
    shown = dict(block.named_parameters())
    assert all(shown[name].equal(value.to(shown[name].dtype)) for name, value in values.items())
    assert {**first.parameters, **second.parameters}.keys() == values.keys()
    second.reshard()
    assert all(shown is not block.get_parameter(name) for name, shown in shown.items())
    assert not first.gathered.storage.is_allocated


def shard_across(model: Any) -> None:
    """Make one unit of a norm inside another unit and of the head outside."""
    for part in ([model.encoder[1], model.head], model.encoder, model):
        fully_shard(part)


@on_ranks(2)
def test_a_unit_may_have_modules_inside_and_outside_of_another_unit() -> None:
    def build() -> nn.Module:
        encoder = nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7))
        return Made(lambda m, x: m.head(m.encoder(x)), encoder=encoder, head=nn.Linear(7, 5))

    twins = Twins(build, shard=shard_across)
    twins.backward()
    assert twins.gradients_apart() < 1e-6
    for model in twins:
        model.encoder.zero_grad()
    assert twins.plain.head.weight.grad is not None
    assert twins.gradients_apart() < 1e-6
    twins.backward(1)
    assert twins.gradients_apart() < 1e-6
