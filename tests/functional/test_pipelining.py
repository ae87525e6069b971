"""Schedules of torch.distributed.pipelining over sharded stages."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input

from megatron_fsdp import StateError
from tests.harness import on_ranks
from tests.harness.models import WIDTH, inputs
from tests.harness.oracle import sharded


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def started(name: str, parts: list[nn.Module], **options: Any) -> Any:
    """Return a schedule over this rank's parts, each sharded over the one rank of its data-parallel group."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))
    rank = dist.get_rank()
    stages = []
    for index in (rank, rank + 2):
        stage = sharded(parts[index], mesh=mesh["data"], **options)
        stages.append(PipelineStage(stage, index, 4, torch.device("cpu"), group=mesh["pipeline"].get_group()))
    return getattr(schedules, name)(stages, n_microbatches=4, loss_fn=squares)


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]


@on_ranks(2)
def test_interleaved_1f1b_gives_the_plain_models_gradients() -> None:
    parts, rank = blocks(), dist.get_rank()
    plain = nn.Sequential(*copy.deepcopy(parts))
    schedule = started("ScheduleInterleaved1F1B", parts, reshard_after_forward=True)
    x, target = inputs(0, 0, 8, WIDTH), inputs(0, 1, 8, WIDTH)
    schedule.step(*[x] if rank == 0 else [], **{"target": target} if rank == 1 else {})
    squares(plain(x), target).backward()
    for index in (rank, rank + 2):
        for mine, wanted in zip(parts[index].parameters(), plain[index].parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("reshard", [True, None, False])
@on_ranks(2)
def test_the_first_half_of_a_split_pipeline_backward_is_refused_by_name(reshard: bool | None) -> None:
    model = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), reshard_after_forward=reshard)
    x = inputs(dist.get_rank(), 0).requires_grad_()
    loss = model(x).square().mean()
    # Schedules that compute weight gradients separately do this: InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.
    # PyTorch puts the tensors of the stage around the error.
    with pytest.raises(RuntimeError, match="Failed to run stage backward input") as raised:
        stage_backward_input([loss], None, [x], model.parameters())
    assert isinstance(raised.value.__cause__, StateError)
    assert re.match(r"unit '.*weight' would get no gradient: .* fix: use ScheduleG", str(raised.value.__cause__))
