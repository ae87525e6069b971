"""Weights that are used outside of their unit's forward: by a parent, in a loss, after forward has returned."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dbuffer import PlacementError
from megatron_fsdp import ConfigError, StateError, fully_shard
from tests.harness import on_ranks
from tests.harness.models import Product, inputs
from tests.harness.twins import Twins


class Lazy(nn.Linear):
    """A layer whose forward returns before it uses the weight."""

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:  # type: ignore[override]  # on purpose
        for row in x:
            yield functional.linear(row, self.weight, self.bias)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.lazy = nn.Linear(6, 6), nn.LayerNorm(6), Lazy(6, 3)
        self.attention = nn.MultiheadAttention(6, 2)
        self.head = nn.Linear(6, 5)


USES: dict[str, Any] = {
    "linear": lambda m, h: functional.linear(h, m.head.weight, m.head.bias),
    "matmul": lambda m, h: h @ m.head.weight.t(),
    "one row": lambda m, h: functional.linear(h[:1], m.head.weight),
    "one element": lambda m, h: h[:1] @ m.head.weight.t() @ m.head.bias[:, None] * m.head.weight.t(),
    "norm": lambda m, h: functional.layer_norm(h, (6,), m.norm.weight, m.norm.bias),
    "gain": lambda m, h: h * m.norm.weight + m.norm.bias,
    "in place": lambda m, h: h.clone().add_(m.norm.bias),
    "attention": lambda m, h: m.attention(h, h, h, need_weights=False)[0],
    "generator": lambda m, h: torch.stack(list(m.lazy(h))),
    "function": lambda m, h: Product.apply(h, m.head.weight),
}


def units(model: Net) -> list[nn.Module]:
    return [model.first, model.norm, model.lazy, model.attention.out_proj, model.head]


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "optim", "no_shard"])
@on_ranks(lambda strategy: 3 if strategy == "optim_grads_params" else 2)
def test_weights_used_outside_of_their_units_forward_train_like_the_plain_model(strategy: str) -> None:
    for name, use in USES.items():

        def loss(model: Any, rank: int, step: int, use: Any = use) -> torch.Tensor:
            found: torch.Tensor = use(model, model.first(inputs(rank, step, 4, 6).double())).square().sum()
            return found

        twins = Twins(lambda: Net().double(), strategy, units=units)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*outside of its unit's forward")
            twins.backward(0, loss)
            losses: Any = [loss(model, dist.get_rank(), 0).detach() for model in twins]
        assert torch.allclose(*losses), name
        assert twins.gradients_apart() < 1e-12, name


@on_ranks(2)
def test_a_weight_used_outside_of_its_units_forward_is_named_once_with_the_fix() -> None:
    model = Net()
    fully_shard(model.head)
    fully_shard(model)
    for expected in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            functional.linear(torch.ones(4, 6), model.head.weight)
        assert len(caught) == expected
        for each in caught:
            assert "unit 'head': parameter 'weight' was used by linear outside" in str(each.message)
            assert "fix: make the module whose forward reads the weight the unit" in str(each.message)


@on_ranks(2)
def test_a_plain_mask_times_a_weight_is_refused_by_the_parameters_name() -> None:
    model = fully_shard(nn.Linear(6, 5))
    with pytest.raises(PlacementError, match=r"unit '.*': parameter 'weight'\. fix:"):
        model.weight * torch.ones(5, 6)


@on_ranks(2)
def test_a_traced_forward_is_refused_by_the_units_name() -> None:
    model = fully_shard(nn.Linear(6, 5))
    inputs = torch.ones(2, 6)
    with pytest.raises(StateError, match=r"unit 'Linear' is sharded.*fix: count or trace before fully_shard"):
        torch.jit._get_trace_graph(model, inputs)  # type: ignore[attr-defined]  # as fvcore does
    assert model(inputs).shape == (2, 5)


@on_ranks(2)
def test_torch_jit_on_a_sharded_model_is_refused() -> None:
    model = fully_shard(nn.Linear(6, 5))
    # The whole of torch.jit is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    with pytest.raises(ConfigError, match=r"torch\.jit\.trace and torch\.jit\.script cannot compile"):
        torch.jit.trace(model, torch.ones(2, 6), check_trace=False)
