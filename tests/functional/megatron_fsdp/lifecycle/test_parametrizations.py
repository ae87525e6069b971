"""Parametrizations and arithmetic on .data of sharded parameters: errors that name the parameter and the fix."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from megatron_fsdp import StateError, fully_shard
from tests.harness import on_ranks


@pytest.mark.parametrize("is_left", [False, True])
@on_ranks(2)
def test_a_parametrization_that_is_removed_after_fully_shard_is_named(is_left: bool) -> None:
    # Weight norm has two original tensors, so PyTorch can only keep the result on removal; orthogonal has one.
    layer = parametrizations.weight_norm(nn.Linear(3, 7)) if is_left else parametrizations.orthogonal(nn.Linear(3, 7))
    fully_shard(layer)
    names = [name for name, _ in layer.named_parameters()]
    with pytest.raises(StateError, match=r"'weight' cannot be removed after fully_shard.*fix: "):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=is_left)
    assert [name for name, _ in layer.named_parameters()] == names
    layer(torch.ones(2, 3)).sum().backward()


@on_ranks(3)
def test_adding_a_plain_parameter_to_data_names_the_sharded_one() -> None:
    layer = nn.Linear(3, 7)
    fully_shard(layer)
    before = layer.weight.full_tensor()
    with pytest.raises(RuntimeError, match=r"'weight'.*fix: "):
        layer.weight.data += nn.Parameter(torch.ones(7, 3))
    layer.weight.data += nn.Parameter(torch.ones_like(layer.weight))
    assert torch.equal(layer.weight.full_tensor(), before + 1)
