"""An optimizer over tensors whose changes would be lost is refused in its first step, before it changes anything."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_fsdp import StateError, fully_shard
from tests.harness import on_ranks
from tests.harness.models import Block, Stack


def built_before_sharding() -> None:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def built_between_forward_and_backward() -> None:
    model = nn.Linear(3, 5)
    fully_shard(model)
    loss = model(torch.ones(2, 3)).sum()
    optimizer = torch.optim.SGD(model.parameters())
    loss.backward()
    optimizer.step()


def given_gathered_weights_later() -> None:
    model = Stack(Block(), Block())
    fully_shard(model.layers[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.layers[0].parameters())
    optimizer.step()
    model(torch.ones(2, 7))
    optimizer.add_param_group({"params": list(model.layers[1].parameters())})
    optimizer.step()


MISTAKES: dict[Callable[[], None], str] = {
    built_before_sharding: r"SGD holds parameter 'weight' as it was before fully_shard.*Build the optimizer after",
    built_between_forward_and_backward: r"SGD holds the gathered weights of parameter 'weight'.*before the",
    given_gathered_weights_later: r"SGD holds the gathered weights of parameter 'layers.1.norm.*reset_iter_state",
}


@on_ranks(2)
def test_the_step_of_an_optimizer_over_tensors_that_nobody_uses_raises() -> None:
    for mistake, message in MISTAKES.items():
        with pytest.raises(StateError, match=message):
            mistake()
