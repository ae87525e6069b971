"""The states of gradients: which may follow which, and what is raised where another one is asked for."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp import StateError, fully_shard
from megatron_fsdp.runtime.step.grad_state import GradState
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup

GRADIENTS = {
    ("empty", "empty"), ("empty", "partial"), ("partial", "partial"), ("partial", "final"), ("partial", "empty"),
    ("final", "partial"), ("final", "empty"),
}  # fmt: skip


@pytest.fixture
def group() -> Iterator[ParameterGroup]:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = fully_shard(torch.nn.Linear(3, 2))
    yield model.parameter_groups[0]
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(GradState, repeat=2)))
def test_gradients_change_by_the_table(group: ParameterGroup, before: GradState, after: GradState) -> None:
    binding = group.gradients.binding
    binding.state = before
    if (before.value, after.value) in GRADIENTS:
        binding.become(after)
        assert binding.state is after
        return
    with pytest.raises(StateError, match=f"'Linear': main_grad is {before.value} and cannot become {after.value}"):
        binding.become(after)
    assert binding.state is before
