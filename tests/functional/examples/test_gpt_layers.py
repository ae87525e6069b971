"""Options of the model, sharded: the gradients are those of replicas."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dbuffer.collectives import wait_for
from gpt.parallel import shard
from megatron_fsdp import FsdpConfig
from tests.harness import run_ranks
from tests.unit.examples.test_gpt_layers import OPTIONS, loss_of, make, make_text


def sharded_gradients(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's view of all gradients, sharded and replicated, after a step on different text."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plain, model = make(**OPTIONS[name]), make(**OPTIONS[name])
    shard(model, FsdpConfig(), mesh)
    text = make_text(seed=dist.get_rank())
    for each in (plain, model):
        loss_of(each, text, plain.config).backward()
    wanted = []
    for parameter in plain.parameters():
        assert parameter.grad is not None
        wait_for(dist.all_reduce(parameter.grad, async_op=True))
        wanted.append(parameter.grad / 2)
    found = [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]
    return found, wanted


@pytest.mark.parametrize("name", ["rope", "experts", "all"])
def test_sharded_over_two_ranks_the_gradients_are_those_of_replicas(name: str) -> None:
    for found, wanted in run_ranks(2, sharded_gradients, name):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
