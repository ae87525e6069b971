"""The devices of a unit without a mesh."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers its backend
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but untyped
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.policy import mesh


@pytest.fixture(params=["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "fake", "cpu:gloo,cuda:fake"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    dist.init_process_group(name, store=HashStore(), rank=0, world_size=1)
    yield name
    dist.destroy_process_group()


def asked_device(has_gpu: bool) -> str:
    """Return the device type of the default mesh; the mesh itself is made for CPUs."""
    asked = []

    def make(device_type: str, *arguments: Any) -> DeviceMesh:
        asked.append(device_type)
        return init_device_mesh("cpu", *arguments)

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=has_gpu),
        mock.patch.object(mesh, "init_device_mesh", make),
    ):
        mesh.sharding_target(None, None, None)
    (device,) = asked
    return device


def test_the_default_mesh_is_on_gpus_if_the_group_has_a_gpu_backend_but_gloo(backend: str) -> None:
    assert asked_device(has_gpu=True) == ("cuda" if "fake" in backend else "cpu")


def test_the_default_mesh_is_on_the_cpu_without_a_gpu(backend: str) -> None:
    assert asked_device(has_gpu=False) == "cpu"
