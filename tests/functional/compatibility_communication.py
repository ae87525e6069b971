"""Scenarios: methods of ``FSDPModule`` that change how gradients are divided, and who moves the data."""

import importlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.functional.compatibility import Outcome, layers, outcome, raises, scenario, shard, train
from tests.harness.models import inputs

__all__: list[str] = []


# ---------------------------------------------------------------- the divisor


def divided(fsdp: Any, setter: str) -> Outcome:
    model = shard(fsdp)
    for module in (model, *layers(model)):
        # gloo has no op that multiplies before it sums.
        module.set_force_sum_reduction_for_comms(True)
    getattr(layers(model)[0], setter)(5.0)
    getattr(layers(model)[2], setter)(0.5)
    return outcome(model, train(model))


@scenario("set_gradient_divide_factor, set_force_sum_reduction_for_comms")
def divide(fsdp: Any) -> Outcome:
    return divided(fsdp, "set_gradient_divide_factor")


@scenario("set_reduce_scatter_divide_factor")
def divide_by_the_old_name(fsdp: Any) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return divided(fsdp, "set_reduce_scatter_divide_factor")


@scenario("set_force_sum_reduction_for_comms")
def sum_and_divide(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    for module in (model, *layers(model)):
        module.set_force_sum_reduction_for_comms(enable=True)
    return outcome(model, train(model))


# ---------------------------------------------------------------- hooks


@scenario("set_all_reduce_hook", num_ranks=4)
def hybrid_by_hand(fsdp: Any) -> Outcome:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = shard(fsdp, mesh=mesh["inner"])
    group, calls = mesh.get_group("outer"), []

    def average(gradient: torch.Tensor) -> None:
        calls.append(gradient.ndim)
        dist.all_reduce(gradient, group=group)
        gradient.div_(2)

    for layer in layers(model):
        layer.set_all_reduce_hook(average)
    return outcome(model, train(model), calls)


@scenario("set_post_optim_event")
def step_event(fsdp: Any) -> Outcome:
    model = shard(fsdp)

    def announce(model: Any, is_last: bool) -> None:
        model.set_post_optim_event(Event())

    return outcome(model, train(model, before=announce))


class Event:
    """Stands for an event on a device without streams."""

    def record(self) -> None:
        """Nothing is waited for."""

    wait = synchronize = record


# ---------------------------------------------------------------- who communicates


def comm_base(kind: str) -> type:
    """Return FSDP2's ``AllGather`` or ``ReduceScatter``."""
    return getattr(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_api"), kind)


class Allocating:
    """The allocating half of FSDP2's ``Comm``."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Allocating, comm_base("AllGather")):
    """Gathers with a list of tensors, and counts."""

    calls = 0

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.calls += 1
        parts = list(output_tensor.chunk(group.size()))
        return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)


class Reduce(Allocating, comm_base("ReduceScatter")):
    """Reduces everything everywhere, and counts."""

    calls = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return None


@scenario("set_custom_all_gather")
def own_gather(fsdp: Any) -> Outcome:
    model, comm = shard(fsdp), Gather()
    for layer in layers(model):
        layer.set_custom_all_gather(comm)
    return outcome(model, train(model), comm.calls > 0)


@scenario("set_custom_reduce_scatter")
def own_reduction(fsdp: Any) -> Outcome:
    model, comm = shard(fsdp), Reduce()
    for layer in layers(model):
        layer.set_custom_reduce_scatter(comm)
    return outcome(model, train(model), comm.calls)


@scenario("set_reduce_scatter_max_input_buffers", needs="FSDPModule.set_reduce_scatter_max_input_buffers")
def more_buffers(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    model.set_reduce_scatter_max_input_buffers(2)
    layers(model)[0].set_reduce_scatter_max_input_buffers(3, recurse=False)
    refuses = raises(lambda: model.set_reduce_scatter_max_input_buffers(0), ValueError)
    return outcome(model, train(model), refuses)


@scenario("set_separate_reduce_scatter_group", needs="FSDPModule.set_separate_reduce_scatter_group")
def one_group_or_two(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    model.set_separate_reduce_scatter_group()
    losses = train(model, steps=2)
    model.set_separate_reduce_scatter_group(enable=False, recurse=True)
    return outcome(model, losses + train(model, steps=1))


@scenario("set_allocate_memory_from_process_group_for_comm(False)")
def own_memory(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    model.set_allocate_memory_from_process_group_for_comm(False)
    return outcome(model, train(model))


@scenario("set_allocate_memory_from_process_group_for_comm(True)")
def memory_of_the_group(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    model.set_allocate_memory_from_process_group_for_comm(True)
    losses = train(model, steps=2)
    model.set_allocate_memory_from_process_group_for_comm(False)
    return outcome(model, losses + train(model, steps=1))


# ---------------------------------------------------------------- parameters without a gradient


class Branches(nn.Module):
    """Two ways through a block; each rank may take another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return torch.tanh((self.left if left else self.right)(x))


@scenario("set_reduce_scatter_unused_params", needs="FSDPModule.set_reduce_scatter_unused_params")
def ranks_differ(fsdp: Any) -> Outcome:
    model = fsdp.fully_shard(Branches())
    model.set_reduce_scatter_unused_params(True)

    def uneven(model: Any, step: int) -> torch.Tensor:
        rank = dist.get_rank()
        return model(inputs(rank, step), left=(rank + step) % 2 == 0).square().mean()

    return outcome(model, train(model, loss_of=uneven))
