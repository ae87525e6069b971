"""A rank's memory and work do not grow with the number of ranks: one process plays rank 0 of 16,384.

Process groups are PyTorch's fake ones, which send nothing, so values mean nothing here and other tests see to them.
Construction time is compared as Python and C calls: on a shared machine two medians of some milliseconds differ by more
than the 20% that matter, while the calls of equal work are equal. The fake groups themselves spend C++ time on every
rank's chunk, and no calls.
"""

import gc
import math
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp import MixedPrecisionPolicy, explain, fully_shard, fully_shard_optimizer

# A small model cut into 16,384 shards is mostly padding.
pytestmark = pytest.mark.filterwarnings("ignore::dbuffer.errors.PaddingWarning")
FEW_RANKS = {1: (8,), 2: (4, 2)}
MANY_RANKS = {1: (16_384,), 2: (2_048, 8)}
TOLERANCE = 0.2


class Block(nn.Module):
    """Two linear layers; rows of the second are longer than the minimal shard."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@contextmanager
def rank_zero_of(shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def build(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(4)]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in blocks:
        fully_shard(block, mesh, mp_policy=policy)
    return fully_shard(nn.Sequential(*blocks, nn.Linear(8, 3)), mesh, mp_policy=policy)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def calls_of(work: Callable[[], object]) -> int:
    """Return how many Python and C functions ``work`` calls, directly and indirectly."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return num_calls


@dataclass(frozen=True)
class Footprint:
    """One rank's cost of a sharded model without its buffers: Python objects and bytes, calls to build and train it."""

    num_objects: int
    num_bytes: int
    build_calls: int
    step_calls: int


def footprint(shape: tuple[int, ...]) -> Footprint:
    """Build and train on one shard of weights, and measure after everything made once per process or mesh exists."""
    with rank_zero_of(shape) as mesh:
        for _ in range(3):
            model = build(mesh)
            train(model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
        del model
        gc.collect()
        before = len(gc.get_objects())
        tracemalloc.start()
        model = build(mesh)
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        num_objects = len(gc.get_objects()) - before
        group = model.parameter_groups[0]  # type: ignore[operator, index]
        assert group.plan.num_shards == shape[-1]
        assert group.model_weight.local_buffer.numel() == group.plan.shard_numel
        old = group.main_weight.local_buffer.clone()
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer)
        assert torch.isfinite(group.main_weight.local_buffer).all()
        assert not torch.equal(group.main_weight.local_buffer, old)
        assert explain(model).persistent_bytes < 100_000
        step_calls = calls_of(lambda: train(model, optimizer))
        return Footprint(num_objects, num_bytes, calls_of(lambda: build(mesh)), step_calls)


@pytest.mark.parametrize("num_axes", [1, 2], ids=["ZeRO-3", "HSDP"])
def test_rank_0_of_16384_trains_and_takes_as_much_as_one_of_8(num_axes: int) -> None:
    few, many = astuple(footprint(FEW_RANKS[num_axes])), astuple(footprint(MANY_RANKS[num_axes]))
    assert all(found > least for found, least in zip(few, (100, 10_000, 1_000, 1_000), strict=True))
    assert many == pytest.approx(few, rel=TOLERANCE)
