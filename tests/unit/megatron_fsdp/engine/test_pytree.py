"""Tensors in nested arguments and outputs."""

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from megatron_fsdp.engine.outputs import iterate_tensors, map_tensors


@dataclass
class Output:
    logits: torch.Tensor
    extra: object = None
    label: str = "out"


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.value * 2)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


def found(value: object) -> list[float]:
    return [float(tensor) for tensor in iterate_tensors(value)]


TWICE = one(1)
MARKER = object()


@pytest.mark.parametrize(
    ("structure", "wanted"),
    [
        (one(1), [1]),
        ((one(1), (one(2), None)), [1, 2]),
        ([one(1), "text", 3, one(2)], [1, 2]),
        ({"a": one(1), "b": {"c": [one(2)]}}, [1, 2]),
        (collections.OrderedDict(z=one(1), a=one(2)), [1, 2]),
        (Pair(one(1), one(2)), [1, 2]),
        ((TWICE, {"again": TWICE, "marker": MARKER}), [1, 1]),
        (Output(one(1), {"more": (one(2),)}), [1, 2]),
        ([Frozen(one(1)), Output(one(2), Frozen(one(3)))], [1, 2, 2, 3, 6]),
        (None, []),
        (Output, []),
    ],
)
def test_every_tensor_is_found_in_order_and_changed_where_a_function_changes_it(structure: Any, wanted: Any) -> None:
    assert found(structure) == wanted
    assert map_tensors(lambda tensor: tensor, structure) is structure
    # A dataclass recomputes its computed fields.
    mapped = map_tensors(lambda tensor: tensor * 10, structure)
    assert type(mapped) is type(structure)
    assert found(mapped) == [10 * value for value in wanted]
    assert found(structure) == wanted
    if isinstance(mapped, tuple) and isinstance(mapped[-1], dict):
        assert mapped[-1]["marker"] is MARKER
