"""``set_prefetch_bytes``: which units are gathered ahead of their use, and that training stays the plain model's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer.events import listen
from megatron_fsdp import ConfigError
from megatron_fsdp.lifecycle.module import unit_of
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, inputs
from tests.harness.twins import Twins

# Like experts and attention: every other unit is small.
HIDDEN = (17, 1, 17, 1, 17)


def uneven() -> nn.Module:
    return Stack(*(Block(hidden=hidden) for hidden in HIDDEN))


@pytest.mark.parametrize(("strategy", "num_ranks"), [("optim_grads_params", 3), ("hsdp", 4), ("optim_grads", 2)])
@on_ranks(lambda strategy, num_ranks: num_ranks)
def test_training_with_a_budget_equals_the_plain_model(strategy: str, num_ranks: int) -> None:
    twins = Twins(uneven, strategy)
    optimizers = twins.optimizers(torch.optim.AdamW, lr=1e-2)
    for step, num_bytes in enumerate((3000, 3000, 1 << 30, 1 << 30, 1, None, 3000)):
        twins.model.set_prefetch_bytes(num_bytes)
        twins.backward(step)
        assert twins.gradients_apart() < 1e-5
        twins.step(optimizers)
    assert twins.weights_apart() < 1e-4


def most_under_way(model: Any) -> int:
    """Return the largest number of gathers in flight in a forward."""
    under_way = set[str]()
    most = 0

    def hear(action: str, subject: Any) -> None:
        nonlocal most
        if action == "gather":
            under_way.add(subject.name)
        elif action == "use":
            under_way.discard(subject.name)
        most = max(most, len(under_way))

    with listen(hear):
        loss = model(inputs(dist.get_rank(), 0)).sum()
    loss.backward()
    return most


@on_ranks(2)
def test_as_many_units_are_gathered_ahead_as_fit_into_the_budget() -> None:
    model = Twins(uneven, "optim_grads_params").model
    # The first pass is recorded, and predicts the next ones.
    model(inputs(dist.get_rank(), 0)).sum().backward()
    small, large = (unit_of(model.layers[place]).gathered_bytes for place in (1, 0))
    # The root, which has no weights, runs before all five blocks.
    found, expected = [], []
    for num_bytes, wanted in ((1, 1), (large, 1), (large + small, 2), (2 * large + small, 3), (1 << 30, 5)):
        model.set_prefetch_bytes(num_bytes)
        found.append(most_under_way(model))
        expected.append(wanted)
    assert found == expected


@on_ranks(2)
def test_lists_of_units_to_prefetch_win_over_the_budget() -> None:
    model = Twins(uneven, "optim_grads_params").model
    model.set_prefetch_bytes(1 << 30)
    for layer, following in zip(model.layers, (*model.layers[1:], None), strict=True):
        layer.set_modules_to_forward_prefetch([] if following is None else [following])
        layer.set_modules_to_backward_prefetch([])
    model(inputs(dist.get_rank(), 0)).sum().backward()
    heard: list[list[str]] = []

    def hear(action: str, subject: Any) -> None:
        if action == "unsharded":
            heard.append([])
        elif action == "gather" and heard:
            heard[-1].append(subject.name)

    with listen(hear), torch.no_grad():
        model(inputs(dist.get_rank(), 1))
    assert max(map(len, heard)) <= 1


@on_ranks(1)
def test_a_budget_is_set_on_the_root_with_at_least_one_byte() -> None:
    model = Twins(uneven, "optim_grads_params").model
    with pytest.raises(ConfigError, match="root module"):
        model.layers[0].set_prefetch_bytes(1)
    with pytest.raises(ConfigError, match="at least one"):
        model.set_prefetch_bytes(0)
    with pytest.raises(TypeError, match="float"):
        model.set_prefetch_bytes(1e9)
    model.set_prefetch_bytes(None)
