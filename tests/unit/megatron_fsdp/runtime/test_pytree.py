"""Tensors in nested arguments and outputs."""

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

from megatron_fsdp.runtime.step.pytree import iterate_tensors, map_tensors


@dataclass
class Output:
    logits: torch.Tensor
    extra: object = None
    label: str = "out"


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


@dataclass
class Derived:
    value: torch.Tensor
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.value * 2


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


def found(value: object) -> list[float]:
    return [float(tensor) for tensor in iterate_tensors(value)]


@pytest.mark.parametrize(
    ("structure", "wanted"),
    [
        (one(1), [1]),
        ((one(1), (one(2), None)), [1, 2]),
        ([one(1), "text", 3, one(2)], [1, 2]),
        ({"a": one(1), "b": {"c": [one(2)]}}, [1, 2]),
        (collections.OrderedDict(z=one(1), a=one(2)), [1, 2]),
        (Pair(one(1), one(2)), [1, 2]),
        (Output(one(1), {"more": (one(2),)}), [1, 2]),
        ([Frozen(one(1)), Output(one(2), Frozen(one(3)))], [1, 2, 3]),
        (None, []),
        ("text", []),
        (Output, []),
    ],
)
def test_every_tensor_is_found_in_order(structure: object, wanted: list[float]) -> None:
    assert found(structure) == wanted


def test_the_same_tensor_in_two_places_is_found_twice() -> None:
    tensor = one(1)
    assert found((tensor, {"again": tensor})) == [1, 1]


@pytest.mark.parametrize(
    "structure",
    [
        one(1),
        (one(1), [one(2)]),
        {"a": one(1), "b": None},
        Pair(one(1), one(2)),
        Output(one(1), {"more": (one(2),)}),
        [Frozen(one(1))],
    ],
)
def test_mapping_keeps_the_structure_and_changes_every_tensor(structure: object) -> None:
    mapped = map_tensors(lambda tensor: tensor + 10, structure)
    assert type(mapped) is type(structure)
    assert found(mapped) == [value + 10 for value in found(structure)]


def test_mapping_leaves_the_original_alone() -> None:
    original = Output(one(1), [one(2)])
    map_tensors(lambda tensor: tensor + 10, original)
    assert found(original) == [1, 2]


@pytest.mark.parametrize("structure", [one(1), (one(1), [one(2)]), {"a": one(1)}, Output(one(1)), "text", None])
def test_nothing_is_built_where_nothing_changes(structure: object) -> None:
    assert map_tensors(lambda tensor: tensor, structure) is structure


def test_what_is_no_tensor_stays_the_same_object() -> None:
    marker = object()
    mapped = map_tensors(lambda tensor: tensor + 1, {"marker": marker, "tensor": one(1)})
    assert mapped["marker"] is marker


def test_fields_that_a_dataclass_computes_itself_are_computed_again() -> None:
    mapped = map_tensors(lambda tensor: tensor + 10, Derived(one(1)))
    assert float(mapped.value) == 11
    assert float(mapped.doubled) == 22
