"""Parameters and buffers that share memory without being one object are refused; slices of one storage are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import ConfigError, fully_shard
from tests.harness import on_ranks
from tests.harness.twins import Twins

WIDTH = 5


def two_layers() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def by_data(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data


def by_parameter(model: Any) -> None:
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)


def by_overlap(model: nn.Sequential) -> None:
    flat = torch.randn(2 * WIDTH - 1, WIDTH)
    model[0].weight.data, model[1].weight.data = flat[:WIDTH], flat[WIDTH - 1 :]


def by_buffer(model: nn.Sequential) -> None:
    model[1].register_buffer("transposed", model[0].weight.detach().t(), persistent=False)


def shard_as(model: nn.Sequential, units: str) -> None:
    for index in {"root": (), "first": (0,), "both": (0, 1), "second": (1,)}[units]:
        fully_shard(model[index])
    fully_shard(model)


@pytest.mark.parametrize("units", ["root", "first", "both", "second"])
@pytest.mark.parametrize("tie", [by_data, by_parameter, by_overlap, by_buffer])
@on_ranks(2)
def test_a_tie_by_memory_is_refused_by_both_names(tie: Callable[[nn.Sequential], None], units: str) -> None:
    model = two_layers()
    tie(model)
    with pytest.raises(ConfigError, match="share memory and are two objects") as refused:
        shard_as(model, units)
    message = str(refused.value)
    assert "parameter '0.weight'" in message
    assert ("buffer '1.transposed'" if tie is by_buffer else "parameter '1.weight'") in message
    assert "fix:" in message


@on_ranks(2)
def test_an_ignored_parameter_that_shares_a_weights_memory_is_refused() -> None:
    model = two_layers()
    by_data(model)
    with pytest.raises(ConfigError, match="share memory"):
        fully_shard(model, ignored_params=[model[1].weight])
    fully_shard(model, ignored_params=[model[0].weight, model[1].weight])
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def slices_of_one_storage(is_by_columns: bool) -> nn.Sequential:
    model = two_layers()
    flat = torch.randn(WIDTH, 2 * WIDTH) if is_by_columns else torch.randn(2 * WIDTH, WIDTH)
    for layer, part in zip(model, flat.chunk(2, dim=1 if is_by_columns else 0), strict=True):
        layer.weight.data = part  # type: ignore[union-attr]  # of a linear layer
    mask = torch.ones(WIDTH)
    model[0].register_buffer("mask", mask)
    model[1].register_buffer("mask", mask[1:])
    return model


@pytest.mark.parametrize("is_by_columns", [False, True])
@on_ranks(3)
def test_slices_of_one_storage_train_like_the_plain_model(is_by_columns: bool) -> None:
    torch.manual_seed(1)
    twins = Twins(two_layers)
    values = slices_of_one_storage(is_by_columns)
    twins.plain.load_state_dict(values.state_dict(), strict=False)
    fully_shard(values[0])
    twins.model = fully_shard(values)
    twins.backward(loss=lambda model, rank, step: model(torch.full((2, WIDTH), rank + 1.0)).square().mean())
    assert twins.gradients_apart() < 1e-5


@on_ranks(2)
def test_tensors_on_meta_and_empty_ones_are_no_tie() -> None:
    with torch.device("meta"):
        model = two_layers()
    by_data(model)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for index, layer in enumerate(model):
            layer.weight.fill_(index)
    # The weights are separate: if they were tied, both would have the second value.
    assert [float(layer.weight.detach().full_tensor().sum()) for layer in model] == [0.0, float(WIDTH * WIDTH)]
    model = two_layers()
    memory = torch.empty(0, WIDTH)
    for layer in model:
        layer.register_parameter("extra", nn.Parameter(memory))
    fully_shard(model)
    extras = [layer.extra for layer in model]
    assert extras[0] is not extras[1]
    assert [tuple(each.full_tensor().shape) for each in extras] == [(0, WIDTH)] * 2
