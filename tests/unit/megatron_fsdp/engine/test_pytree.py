"""Tensors in nested arguments and outputs."""

import collections
import collections.abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

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


class Batch(dict[str, object]):
    """A mapping that PyTorch's pytree does not know."""


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
        (Batch(a=one(1), b=[one(2), "text"]), [1, 2]),
        (collections.UserDict(a=one(1)), [1]),
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


def test_lengths_of_a_packed_sequence_stay_on_the_cpu() -> None:
    packed = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([2, 3]), enforce_sorted=False)
    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert isinstance(moved, PackedSequence)
    on_meta = (moved.data, moved.sorted_indices, moved.unsorted_indices)
    assert all(each is not None and each.is_meta for each in on_meta)
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
    assert map_tensors(lambda tensor: tensor, packed) is packed


class Shared(collections.abc.MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its members."""

    def __init__(self, members: dict[str, Any]) -> None:
        self.members = members

    def __getitem__(self, key: str) -> Any:
        return self.members[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.members[key] = value

    def __delitem__(self, key: str) -> None:
        del self.members[key]

    def __iter__(self) -> collections.abc.Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)


def test_a_mapping_that_may_share_its_members_with_a_copy_is_left_as_it_is() -> None:
    given = Shared({"a": one(1)})
    assert found(given) == [1]
    assert map_tensors(lambda tensor: tensor * 10, given) is given
    assert found(given) == [1]
