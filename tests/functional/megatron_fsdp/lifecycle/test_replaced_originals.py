"""The original tensor of a parameter, from before fully_shard: uses without an effect are refused, in lists too."""

import copy
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


# Nothing changes when they are done to a frozen parameter.
HARMLESS = ("clipping by norm", "reading gradients", "dropping gradients", "freezing", "freezing by attribute")
# Not for frozen parameters: PyTorch raises its own errors, for plain ones too.
OF_TRAINED = ("hooking", "clipping by value")


@on_ranks(2)
def test_of_a_replaced_frozen_parameter_only_changes_are_refused() -> None:
    _, old = sharded_with_old(is_frozen=True)
    for words, use in WITHOUT_EFFECT.items():
        if words in HARMLESS:
            use(old[:2])
        elif words not in OF_TRAINED:
            with torch.no_grad(), pytest.raises(StateError, match=r"parameter 'weight'.*before fully_shard"):
                use(old[:2])
    for unfreeze in (lambda: old[0].requires_grad_(), lambda: setattr(old[0], "requires_grad", True)):
        with pytest.raises(StateError, match=r"parameter 'weight'.*before fully_shard"):
            unfreeze()
    assert not old[0].requires_grad


@on_ranks(2)
def test_a_teacher_may_share_a_frozen_weight_with_a_sharded_student() -> None:
    student, teacher = (nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3)) for _ in range(2))
    student[0].requires_grad_(False)
    teacher[0].weight = student[0].weight
    tokens = torch.arange(5)
    wanted = teacher(tokens).detach()
    fully_shard(student)
    optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], lr=0.1)
    student(tokens).sum().backward()
    optimizer.step()
    teacher.to("cpu").eval().requires_grad_(False)
    duplicate = copy.deepcopy(teacher)
    assert torch.equal(teacher(tokens), wanted)
    assert torch.equal(duplicate(tokens), wanted)
    duplicate[0].weight.data.mul_(2)
    assert torch.equal(teacher(tokens), wanted)
    assert type(duplicate[0].weight) is nn.Parameter
    with pytest.raises(StateError, match=r"parameter '0\.weight'.*before fully_shard"):
        teacher.double()
    # From now on the student's values are others.
    student.requires_grad_(True)
    student(tokens).sum().backward()
    torch.optim.SGD(student.parameters(), lr=0.1).step()
    with pytest.raises(StateError, match=r"parameter '0\.weight'.*before fully_shard"):
        teacher(tokens)


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
