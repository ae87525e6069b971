"""The original tensor of a parameter, from before fully_shard: uses without an effect are refused, in lists too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import StateError, fully_shard
from tests.harness import on_ranks

Use = Callable[[list[Any]], object]

WITHOUT_EFFECT: dict[str, Use] = {
    "clipping by norm": lambda old: torch.nn.utils.clip_grad_norm_(old, 1.0),
    "clipping by value": lambda old: torch.nn.utils.clip_grad_value_(old, 1.0),
    "reading gradients": lambda old: [one.grad for one in old],
    "dropping gradients": lambda old: setattr(old[0], "grad", None),
    "scaling": lambda old: old[0].mul_(0.5),
    "scaling a list": lambda old: torch._foreach_mul_(old, 0.5),
    "scaling .data": lambda old: old[0].data.mul_(0.5),
    "writing rows": lambda old: old[0].__setitem__(0, 1.0),
    "writing as out": lambda old: torch.add(torch.ones(3, 3), 1, out=old[0]),
    "initializing": lambda old: nn.init.zeros_(old[0]),
    "freezing": lambda old: old[0].requires_grad_(False),
    "freezing by attribute": lambda old: setattr(old[0], "requires_grad", False),
    "hooking": lambda old: old[0].register_hook(print),
}
READING: dict[str, Use] = {
    "an average": lambda old: torch._foreach_lerp_([torch.zeros(3, 3)], [old[0]], 0.1),
    "a copy": lambda old: old[0].detach().clone(),
    "a sum": lambda old: old[0].sum(),
    "a vector": torch.nn.utils.parameters_to_vector,
}


def sharded_with_old(*, is_frozen: bool = False) -> tuple[Any, list[Any]]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(not is_frozen)
    old = list(model.parameters())
    fully_shard(model[0])
    fully_shard(model)
    model(torch.ones(2, 3)).sum().backward()
    return model, old


@pytest.mark.parametrize("use", WITHOUT_EFFECT)
@on_ranks(2)
def test_a_use_without_effect_of_a_replaced_parameter_is_refused(use: str) -> None:
    _, old = sharded_with_old()
    with torch.no_grad(), pytest.raises(StateError, match=r"parameter 'weight'.*before fully_shard") as refused:
        WITHOUT_EFFECT[use](old)
    assert "fix:" in str(refused.value)


@on_ranks(2)
def test_uses_without_effect_of_a_replaced_frozen_parameter_are_refused() -> None:
    _, old = sharded_with_old(is_frozen=True)
    for words, use in WITHOUT_EFFECT.items():
        if words != "hooking":
            with torch.no_grad(), pytest.raises(StateError, match=r"parameter 'weight'.*before fully_shard"):
                use(old[:2])
    with pytest.raises(StateError, match=r"parameter 'weight'.*before fully_shard"):
        old[0].requires_grad_(True)
    assert not old[0].requires_grad


@pytest.mark.parametrize("use", READING)
@on_ranks(2)
def test_a_replaced_parameter_is_read_until_the_weights_change(use: str) -> None:
    model, old = sharded_with_old()
    with torch.no_grad():
        READING[use](old)
        assert torch.equal(old[0], model[0].weight.full_tensor())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(StateError, match=r"parameter 'weight'.*before fully_shard"):
            READING[use](old)
    assert old[0].shape == (3, 3)
    assert "Parameter" in repr(type(old[0]))


@on_ranks(2)
def test_loading_other_values_makes_a_replaced_parameter_old() -> None:
    model, old = sharded_with_old()
    model.load_state_dict({name: torch.ones(value.shape) for name, value in model.state_dict().items()})
    with torch.no_grad(), pytest.raises(StateError, match="before fully_shard"):
        old[0].sum()


@on_ranks(2)
def test_a_frozen_parameter_shared_with_another_model_stays_readable() -> None:
    student, teacher = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
    teacher.weight = student.weight
    wanted = teacher(torch.ones(1, 3))
    fully_shard(student)
    assert torch.equal(teacher(torch.ones(1, 3)), wanted)
