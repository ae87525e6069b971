"""What a user may choose for one unit: gradients and weights equal a whole model's all the same."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import CollectiveCall, memory_meter, observe_collectives
from megatron_fsdp import (
    CPUOffloadPolicy,
    FsdpModule,
    Placements,
    clip_grad_norm_,
    fsdp_no_shard,
    fully_shard,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Made, Stack, inputs, squared, three_blocks
from tests.harness.oracle import Case, compare, shard_layers, units_of
from tests.harness.twins import Twins

BASE = Case(three_blocks, squared)


def each(**options: Any) -> Callable[[nn.Module], None]:
    """Return a function that shards every block, and the model, with the same options."""
    return functools.partial(shard_layers, **options)


@on_ranks(4)
def test_backward_gathers_within_the_smaller_group_what_forward_kept() -> None:
    size = 2
    model = three_blocks()
    each(reshard_after_forward=size)(model)
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
    kinds = sorted(kinds.elements())
    part = numel * 4 // size
    assert kinds == [(0, 4)] * 3 + [(1, 2)] * 3
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


def scaled() -> nn.Module:
    return Made(
        lambda m, x: m.blocks(x + m.router(x)) * m.scale, blocks=Stack(Block(), Block(hidden=5)),
        scale=nn.Parameter(torch.linspace(0.5, 1.5, 7)), router=nn.Linear(7, 7, bias=False),
    )  # fmt: skip


def keep_small_parts(model: nn.Module) -> None:
    fsdp_no_shard(model.scale)
    fsdp_no_shard(model.router)
    for layer in model.blocks.layers:
        fsdp_no_shard(layer.norm)
        fully_shard(layer.norm)  # what is marked never becomes a unit
        fully_shard(layer)
    fully_shard(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_are_exact_with_replicated_parameters(num_ranks: int) -> None:
    results = run_ranks(num_ranks, compare, Case(scaled, squared, shard=keep_small_parts))
    assert all(result.worst_gradient < 2e-6 and result.worst_weight < 2e-6 for result in results), results


def replicated_faces() -> tuple[list[str], dict[str, int], bool, float]:
    model = scaled()
    keep_small_parts(model)
    kinds: Counter[str] = Counter()
    with observe_collectives(lambda call: kinds.update([call.kind])):
        squared(model, dist.get_rank(), 0).backward()
    names = [name for name, value in model.named_parameters() if value.to_local().shape == value.shape]
    first = model.blocks.layers[0]
    has_hooks = isinstance(first.norm, FsdpModule) or bool(first.norm._forward_pre_hooks)
    return names, dict(kinds), has_hooks, float(clip_grad_norm_(model, float("inf")))


def test_replicated_parameters_are_whole_everywhere_and_reduced_without_a_gather() -> None:
    results = run_ranks(3, replicated_faces)
    for names, kinds, has_hooks, norm in results:
        assert set(names) >= {"scale", "router.weight", "blocks.layers.0.norm.weight", "blocks.layers.0.norm.bias"}
        # Two blocks: three gathers, because the last one keeps its weights. A reduction each; three groups replicated.
        assert kinds == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 3}
        assert not has_hooks
        assert norm == results[0][3]


MESHES = [((2,), "optim_grads_params"), ((2, 2), "hsdp"), ((2, 2), "hfsdp")]


@pytest.mark.parametrize(("mesh_shape", "strategy"), nightly_but([MESHES[0], MESHES[2]], MESHES), ids=str)
@on_ranks(lambda mesh_shape: torch.Size(mesh_shape).numel())
def test_gradients_are_exact_with_offload_under(mesh_shape: tuple[int, ...], strategy: str) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :])
    placements = getattr(Placements, strategy)(*range(len(mesh_shape)))
    options = {"mesh": mesh, "placements": placements, "offload_policy": CPUOffloadPolicy()}
    result = compare(replace(BASE, shard=each(**options)))
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
