"""The first forward names non-persistent buffers from the meta device that have no values."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import StateError, fully_shard, materialize
from tests.harness import on_ranks


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(1.0, 5.0), persistent=False)
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("shift", torch.full((4,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.frequencies[self.positions] + self.shift  # type: ignore[operator, index]  # tensors


def whole_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Rotary(), Rotary())


def on_meta() -> Any:
    with torch.device("meta"):
        model = nn.Sequential(Rotary(), Rotary())
    fully_shard(model[0])
    return fully_shard(model)


def write(model: Any, is_by_data: bool) -> None:
    for layer in model:
        if is_by_data:
            layer.frequencies.data.copy_(torch.arange(1.0, 5.0))
            layer.positions.data.copy_(torch.arange(4))
        else:
            layer.frequencies, layer.positions = torch.arange(1.0, 5.0), torch.arange(4)


@pytest.mark.parametrize("is_assigned", [False, True])
@on_ranks(2)
def test_unwritten_buffers_are_listed_once(is_assigned: bool) -> None:
    model = on_meta()
    model.to_empty(device="cpu")
    model.load_state_dict(whole_model().state_dict(), assign=is_assigned)
    for layer in model:
        layer.positions.copy_(torch.arange(4))
    with pytest.warns(UserWarning, match=r"buffers '0\.frequencies', '1\.frequencies' were allocated by to_empty"):
        assert model(torch.ones(2, 4)).isnan().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4))


@pytest.mark.parametrize("is_by_data", [False, True])
@on_ranks(2)
def test_written_buffers_need_no_warning(is_by_data: bool) -> None:
    model, plain = on_meta(), whole_model()
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    write(model, is_by_data)
    assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@on_ranks(2)
def test_loading_onto_meta_names_the_buffers_that_are_left_there() -> None:
    model, plain = on_meta(), whole_model()
    model.load_state_dict(plain.state_dict())
    for _ in range(2):
        with pytest.raises(StateError, match=r"'0\.frequencies', '0\.positions', .* are on the meta device.*fix:"):
            model(torch.ones(2, 4))
    write(model, is_by_data=False)
    assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@on_ranks(2)
def test_materialize_says_which_buffers_no_initializer_wrote() -> None:
    model = on_meta()
    materialize(model, lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    for layer in model:
        layer.positions.fill_(0)
    with pytest.warns(UserWarning, match=r"'0\.frequencies', .*'1\.shift' were allocated by to_empty or materialize"):
        model(torch.ones(2, 4))
