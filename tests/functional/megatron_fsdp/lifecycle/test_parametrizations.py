"""Parametrizations and arithmetic on .data of sharded parameters: errors that name the parameter and the fix."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from megatron_fsdp import StateError, fully_shard
from tests.harness import on_ranks


@pytest.mark.parametrize("moment", ["before a forward", "while gathered"])
@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("num_originals", [1, 2])
@on_ranks(2)
def test_a_parametrization_that_is_removed_after_fully_shard_is_named(
    num_originals: int, is_inner: bool, is_left: bool, moment: str
) -> None:
    # Orthogonal has one original, weight norm has two.
    parametrized = parametrizations.orthogonal if num_originals == 1 else parametrizations.weight_norm
    layer = parametrized(nn.Linear(3, 7))
    model = nn.Sequential(layer, nn.Linear(7, 2)) if is_inner else layer
    plain = copy.deepcopy(model)
    fully_shard(model)
    if moment == "while gathered":
        model.unshard()
    names = [name for name, _ in model.named_parameters()]
    original = f"{'0.' if is_inner else ''}parametrizations.weight.original"
    with pytest.raises(StateError, match=rf"{original}.*'weight' cannot be removed after fully_shard. fix: "):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=is_left)
    assert [name for name, _ in model.named_parameters()] == names
    inputs = torch.ones(2, 3)
    torch.testing.assert_close(model(inputs), plain(inputs))
    model(inputs).sum().backward()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(21.0).view(7, 3))
        self.register_buffer("scale", torch.full((7,), 2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self.weight) * self.scale


@pytest.mark.parametrize("is_inner", [False, True])
@on_ranks(2)
def test_a_parametrization_of_a_buffer_is_removed_from_an_inner_module_only(is_inner: bool) -> None:
    layer = Scaled()
    parametrize.register_parametrization(layer, "scale", nn.Tanh())
    model = nn.Sequential(layer) if is_inner else layer
    fully_shard(model)
    if is_inner:
        parametrize.remove_parametrizations(layer, "scale", leave_parametrized=False)
        assert layer.scale.tolist() == [2.0] * 7
    else:
        with pytest.raises(StateError, match=r"FSDPParametrizedScaled: .*'scale' cannot be removed.*fix: "):
            parametrize.remove_parametrizations(layer, "scale", leave_parametrized=False)
    model(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_a_compiled_parametrized_layer_is_the_plain_one() -> None:
    model = nn.Sequential(parametrizations.weight_norm(Scaled()))
    plain = copy.deepcopy(model)
    fully_shard(model)
    model[0].compile(backend="eager", fullgraph=True)
    inputs = torch.ones(2, 3)
    torch.testing.assert_close(model(inputs), plain(inputs))


@on_ranks(3)
def test_adding_a_plain_parameter_to_data_names_the_sharded_one() -> None:
    layer: Any = nn.Linear(3, 7)
    fully_shard(layer)
    before = layer.weight.full_tensor()
    with pytest.raises(RuntimeError, match=r"'weight'.*fix: "):
        layer.weight.data += nn.Parameter(torch.ones(7, 3))
    layer.weight.data += nn.Parameter(torch.ones_like(layer.weight))
    assert torch.equal(layer.weight.full_tensor(), before + 1)
