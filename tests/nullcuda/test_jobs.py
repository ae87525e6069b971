"""The start of a job on GPUs: devices, options of communicators, backends, and warnings of the engine."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but untyped
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import CPUOffloadPolicy
from tests.functional.test_gpu_ranks import BF16, _symmetric, build, data, loss_of
from tests.harness import run_ranks
from tests.harness.models import Block
from tests.harness.twins import sharded
from tests.nullcuda import machine

# The number of this collective in ``c/nccl.c``.
ALL_GATHER = 1


def in_job(function: Callable[..., Any], *args: object) -> Any:
    """Call a function in a process that has no process group."""
    (found,) = run_ranks(1, function, *args, fresh=True, timeout=120)
    return found


def meshes() -> int:
    return init_device_mesh("cuda", (2, 1), mesh_dim_names=("outer", "inner")).size()


def test_one_test_after_another_makes_a_mesh_of_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLCUDA_DEVICES", "2")
    assert [run_ranks(2, meshes, backend="nccl") for _ in range(3)] == 3 * [[2, 2]]


def bound_to_another_device() -> set[torch.device]:
    """Train on the device that the group is bound to, which is not the current one."""
    dist.destroy_process_group()
    device = torch.device("cuda", 1)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=8, device_id=device)
    assert torch.cuda.current_device() == 0
    model: Any = sharded(build(Block).to(device), "optim_grads_params", mesh=init_device_mesh("cuda", (8,)))
    loss_of(model, data(0, 0, 0).to(device)).backward()
    found = [(parameter, parameter.grad) for parameter in model.parameters()]
    return {one.to_local().device for pair in found for one in pair}


def test_buffers_lie_on_the_device_that_the_group_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLCUDA_DEVICES", "2")
    assert in_job(bound_to_another_device) == {torch.device("cuda", 1)}


def most_ctas_of_communicators() -> list[int]:
    """Return what each communicator got as max_ctas, of a job whose user asked for 7."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 7
    device = torch.device("cuda", 0)
    with machine.logged():
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=8, device_id=device, pg_options=options)
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("outer", "inner"))
        for strategy in ("hsdp", "hfsdp"):
            model: Any = sharded(build(Block).to(device), strategy, mesh=mesh)
            loss_of(model, data(0, 0, 0).to(device)).backward()
    return [call.values[2] for call in machine.calls() if call.kind == "communicator"]


def test_every_communicator_has_the_options_of_the_job() -> None:
    found = in_job(most_ctas_of_communicators)
    # The job, two axes, reductions over each of them, and both axes as one.
    assert len(found) >= 6
    assert set(found) == {7}


def gathers_of_copy_engines() -> tuple[list[int], int, int]:
    """Train with NCCL's zero-CTA policy and slots in symmetric windows.

    Returns the CTA policy of each communicator of a gather, the number of gathers, and how many of them send from this
    rank's place in a window of their communicator and receive in the whole of it.
    """
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    with machine.logged():
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=8, device_id=device, pg_options=options)
        mesh = init_device_mesh("cuda", (8,))
        model: Any = sharded(build(Block).to(device), "optim_grads_params", mesh=mesh, mp_policy=BF16)
        _symmetric(model, "cuda")
        for _ in range(2):
            loss_of(model, data(0, 0, 0).to(device)).backward()
    found = machine.calls()
    policies = {call.object: call.values[1] for call in found if call.kind == "communicator"}
    windows = [(call.object, call.values[0], call.values[1]) for call in found if call.kind == "register"]
    gathers = [call for call in found if call.kind == "collective" and call.object % 256 == ALL_GATHER]
    inside = [
        call
        for call in gathers
        for address, size, communicator in windows
        if communicator == call.object // 256
        and call.values[0] == call.values[2]
        and address <= call.values[2]
        and call.values[2] + call.values[3] <= address + size
    ]
    return [policies[call.object // 256] for call in gathers], len(gathers), len(inside)


def test_gathers_can_use_copy_engines_where_the_user_asks_nccl_for_zero_ctas() -> None:
    policies, number, number_in_windows = in_job(gathers_of_copy_engines)
    assert number > 0
    nccl: Any = dist.ProcessGroupNCCL
    assert set(policies) == {nccl.NCCL_CTA_POLICY_ZERO}
    assert number_in_windows == number


def communicators_with_windows(is_bound: bool) -> tuple[set[int], set[int]]:
    """Return the communicators that collectives used, and the communicators that slots were registered with."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    with machine.logged():
        bound: dict[str, Any] = {"device_id": device} if is_bound else {}
        dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=8, **bound)
        model: Any = sharded(build(Block).to(device), "optim_grads_params", mesh=init_device_mesh("cuda", (8,)))
        _symmetric(model, "cuda")
        loss_of(model, data(0, 0, 0).to(device)).backward()
    found = machine.calls()
    used = {call.object // 256 for call in found if call.kind == "collective"}
    return used, {call.values[1] for call in found if call.kind == "register"}


@pytest.mark.parametrize("is_bound", [True, False], ids=["bound to a device", "connected later"])
def test_slots_are_registered_with_the_communicators_that_are_used(is_bound: bool) -> None:
    used, registered = in_job(communicators_with_windows, is_bound)
    assert used == registered
    assert len(used) == 2


def offloaded_without_gloo() -> tuple[list[str], str]:
    machine.become_rank_0_of(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = init_device_mesh("cuda", (8,))
        model: Any = sharded(nn.Sequential(nn.Linear(4, 16)), mesh=mesh, offload_policy=CPUOffloadPolicy())
    with pytest.raises(Exception, match="backend") as raised:
        next(model.parameters()).full_tensor()
    return [str(each.message) for each in caught], str(raised.value)


def test_offload_without_gloo_warns_and_names_the_backends() -> None:
    texts, error = in_job(offloaded_without_gloo)
    fix = 'fix: torch.distributed.init_process_group("cpu:gloo,cuda:nccl")'
    assert any(fix in text for text in texts)
    assert fix in error


def with_one_queue() -> list[str]:
    machine.become_rank_0_of(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded(build(Block).to("cuda"), mesh=init_device_mesh("cuda", (8,)))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("connections", ["1", "8"])
def test_one_queue_to_the_gpu_is_warned_about(connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    texts = in_job(with_one_queue)
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in text for text in texts) is (connections == "1")
