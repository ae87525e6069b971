"""Small models with byte counts worked out by hand, sharded in a world with one real rank."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp import MixedPrecisionPolicy, Placements, fully_shard
from megatron_fsdp.planning.estimate import Setup
from megatron_fsdp.planning.options import Options
from megatron_fsdp.planning.plan_arguments import add_plan_arguments
from megatron_fsdp.planning.played_step import StandIns
from megatron_fsdp.planning.stand_in import Axis, Sharding, shaped_stand_ins
from megatron_fsdp.planning.transformer import UnitWork

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
THREE = (16, 32, 8)


class Chain(nn.Module):
    """Units with one weight each, of ``rows`` rows of 4 elements; the root may have a weight too.

    A row has 16 bytes in FP32, which is the alignment, so nothing is padded if the ranks divide the rows.
    """

    def __init__(self, rows: Sequence[int], root_rows: int = 0) -> None:
        super().__init__()
        if root_rows:
            self.weight = nn.Parameter(torch.zeros(root_rows, 4))
        for number, each in enumerate(rows, start=1):
            unit = nn.Module()
            unit.weight = nn.Parameter(torch.zeros(each, 4))
            self.add_module(f"unit{number}", unit)

    def units(self) -> list[nn.Module]:
        return list(self.children())


@contextmanager
def world(*sizes: int, rank: int | None = None) -> Iterator[DeviceMesh]:
    """Run as one rank, by default the last, of a world without communication."""
    num_ranks = prod(sizes)
    dist.init_process_group(
        "fake", store=FakeStore(), rank=num_ranks - 1 if rank is None else rank, world_size=num_ranks
    )
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"axis{number}" for number in range(len(sizes))))
    finally:
        dist.destroy_process_group()


def sharded(model: Chain, mesh: DeviceMesh, placements: Placements | None = None, **options: Any) -> Any:
    """Shard a chain; by default units release their weights right after forward."""
    options = {"reshard_after_forward": True, **options}
    for unit in model.units():
        fully_shard(unit, mesh, placements, **options)
    options.pop("reshard_after_forward")
    return fully_shard(model, mesh, placements, **options)


def stand_ins_of(model: Chain, work: UnitWork, sharding: Sharding) -> StandIns:
    """Return stand-ins for a chain whose units each have this work per token."""
    return partial(shaped_stand_ins, model, model.units(), sharding, {"Chain": UnitWork(0), "Module": work})


def sharding_of(
    sizes: Sequence[int] = (4,), placements: Placements | None = None, policy: MixedPrecisionPolicy | None = None
) -> Sharding:
    """Return the sharding of the last rank of a mesh."""
    axes = tuple(Axis(f"axis{number}", size, size - 1) for number, size in enumerate(sizes))
    return Sharding(axes, placements or Placements.optim_grads_params(0), policy or MixedPrecisionPolicy())


def options_of(words: str) -> Options:
    """Return the options of a command line of ``plan``."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return Options(parser.parse_args(words.split()))


def setup_of(words: str) -> Setup:
    """Return the setup that a command line asks for."""
    options = options_of(words)
    sizes = options.data_parallel_sizes()
    return options.setup(sizes, options.strategy_for(sizes), options.workload())
