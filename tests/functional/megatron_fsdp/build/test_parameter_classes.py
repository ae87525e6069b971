"""Sharded parameters are of the user's subclass of nn.Parameter, and have the attributes set on the original."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import AdamW, ConfigError, fully_shard
from tests.harness import on_ranks
from tests.harness.twins import Twins, sharded


class Tagged(nn.Parameter):
    tag: str

    def doubled(self) -> torch.Tensor:
        return self * 2


class Calling(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def tagged_model() -> Any:
    model: Any = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3))
    for layer in model:
        layer.weight = Tagged(layer.weight.detach())
        layer.weight.tag = "matrix"
        layer.bias.tag = "vector"
    return model


def loss(model: Any, rank: int, step: int) -> torch.Tensor:
    result: torch.Tensor = model(torch.arange(6.0).view(2, 3) + rank + step).square().mean()
    return result


def first_layer(model: Any) -> list[nn.Module]:
    return [model[0]]


@pytest.mark.parametrize("kind", ["torch", "foreach", "ours"])
@on_ranks(2)
def test_groups_by_parameter_class_train_like_the_plain_model(kind: str) -> None:
    twins = Twins(tagged_model, units=first_layer)
    optimizers = []
    for model in twins:
        groups: list[dict[str, Any]] = [
            {"params": [one for one in model.parameters() if isinstance(one, Tagged)], "lr": 0.1},
            {"params": [one for one in model.parameters() if not isinstance(one, Tagged)], "lr": 0.01},
        ]
        assert [len(group["params"]) for group in groups] == [2, 2]
        is_ours = kind == "ours" and model is twins.model
        optimizers.append(AdamW(groups) if is_ours else torch.optim.AdamW(groups, foreach=kind == "foreach"))
    for step in range(3):
        twins.zero_grad()
        twins.backward(step, loss)
        for optimizer in optimizers:
            optimizer.step()
    assert twins.weights_apart() < 1e-4


@on_ranks(2)
def test_attributes_and_methods_of_a_parameter_survive() -> None:
    model = tagged_model()
    whole = model[0].weight.detach().clone()
    sharded(model, units=first_layer)
    assert [parameter.tag for parameter in model.parameters()] == ["matrix", "vector"] * 2
    assert torch.equal(model[0].weight.doubled().full_tensor(), whole * 2)
    model.load_state_dict(model.state_dict())
    model.double()
    assert isinstance(model[0].weight, Tagged)
    assert model[0].weight.tag == "matrix"


@on_ranks(2)
def test_a_class_stays_through_to_empty() -> None:
    with torch.device("meta"):
        model = tagged_model()
    sharded(model, units=first_layer)
    model.to_empty(device="cpu")
    assert isinstance(model[1].weight, Tagged)
    assert model[1].bias.tag == "vector"


@on_ranks(2)
def test_a_trained_tensor_subclass_with_torch_function_is_refused_by_name() -> None:
    model: Any = nn.Linear(3, 3)
    model.weight = Calling(model.weight.detach())
    with pytest.raises(ConfigError, match=r"parameter 'weight' is a Calling.*fix:.*ignored_params"):
        fully_shard(model)
