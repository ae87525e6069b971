"""A stack with tensor-parallel weights, for tests of transfers."""

import copy

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_fsdp import fully_shard
from tests.harness.models import Block, Stack


def tensor_parallel_stack(mesh: DeviceMesh, *blocks: Block) -> tuple[Stack, Stack]:
    """Return a plain stack and a copy whose weights are cut over the axis "tp" and sharded over the axis "dp"."""
    plain = Stack(*blocks)
    model = copy.deepcopy(plain)
    for layer in model.layers:
        for linear, dim in ((layer.up, 0), (layer.down, 1)):
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(dim)]))
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return plain, model
