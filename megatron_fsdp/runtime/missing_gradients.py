"""MissingGradients: whether a parameter that got no gradient on this rank got one on any.

If one did, this rank takes part in the mean with zeros; if none did, ``.grad`` is None as in any model, since an
optimizer with momentum or weight decay would move it. Nothing is asked while no gradient is missing: who misses some
says so in the job's store before they are reduced. When that is done all have passed that point, and unless all have
said so somebody has every gradient. Else all know that all miss some, and ask each other which by one small collective,
now and at the end of each accumulation until nobody misses any (docs/design/missing_gradients.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dbuffer.collectives import all_reduce
from megatron_fsdp.runtime.agreement import mesh_ranks
from megatron_fsdp.runtime.lanes import is_capturing, wait_on_host
from megatron_fsdp.runtime.rendezvous import job_store

if TYPE_CHECKING:
    from megatron_fsdp.runtime.gradients import GradientBuffer
    from megatron_fsdp.runtime.parameter_group import ParameterGroup
    from megatron_fsdp.runtime.unit import Unit

__all__ = ["MissingGradients"]


class MissingGradients:
    """What the ranks of one model know of each other's missing gradients.

    Args:
        tokens: by ranks, the names of their agreements on this model; see ``FirstUse``.
    """

    def __init__(self, tokens: Mapping[tuple[int, ...], str]) -> None:
        self._tokens = tokens
        self._circles: dict[Any, _Circle] = {}

    def say(self, groups: Iterable[ParameterGroup]) -> None:
        """Tell the other ranks, before gradients are reduced, if some are missing here."""
        for group in groups:
            if group.gradients is not None and 1 in group.gradients.binding.missing:
                self._circle(group).say()

    def settle(self, final: Sequence[ParameterGroup], units: Iterable[Unit]) -> None:
        """Leave in ``missing`` of reduced buffers what no rank has. Every rank calls it.

        Args:
            final: whose gradients are reduced. units: all of the model, in the same order on every rank.
        """
        circles: dict[_Circle, list[GradientBuffer]] = {}
        for group in final:
            circle = group.circle
            if circle is None:
                circle = group.circle = self._circle(group)
            assert group.gradients is not None
            if circle in circles:
                circles[circle].append(group.gradients)
            else:
                circles[circle] = [group.gradients]
        for circle, reduced in circles.items():
            if circle.is_quiet:
                circle.pass_over(reduced)
                continue
            groups = [group for unit in units for group in unit.groups if self._circle(group) is circle]
            circle.settle(reduced, [buffer for group in groups for buffer in _buffers(group)])

    def _circle(self, group: ParameterGroup) -> _Circle:
        mesh = group.spec.mesh
        if mesh not in self._circles:
            circle = _Circle(group, self._tokens)
            self._circles[mesh] = next((one for one in self._circles.values() if one.ranks == circle.ranks), circle)
        return self._circles[mesh]


def _buffers(group: ParameterGroup) -> Iterator[GradientBuffer]:
    if group.gradients is not None:
        yield group.gradients


class _Circle:
    """The ranks that reduce some groups together, and how far they are.

    Args:
        group: one of them.

    Attributes:
        ranks: of the mesh.
    """

    def __init__(self, group: ParameterGroup, tokens: Mapping[tuple[int, ...], str]) -> None:
        self.ranks = mesh_ranks(group.spec.mesh)
        self._axes = group.main_weight.axes
        self._device = group.spec.compute_device
        self._tokens = tokens
        # How many accumulations were reduced; whether this rank has said for the next one that it misses gradients, or
        # all ask each other at its end in any case.
        self._number = 0
        self._has_said = False
        self._asks = False
        self._old_keys: tuple[str, ...] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is to be found out."""
        return not (self._has_said or self._asks)

    @property
    def _token(self) -> str | None:
        # None before they agreed, and empty where nobody else can come.
        return "" if math.prod(axis.size for axis in self._axes) == 1 else self._tokens.get(self.ranks)

    def say(self) -> None:
        """Leave word that gradients are missing here, once an accumulation."""
        if self.is_quiet and self._token and not is_capturing(self._device):
            self._has_said = True
            self._store().add(self._key("missing"), 1)

    def pass_over(self, reduced: Iterable[GradientBuffer]) -> None:
        """Go on without asking: what is missing here was zeros for the others."""
        self._number += 1
        if self._token != "":
            _count_as_zeros(reduced)

    def settle(self, reduced: Sequence[GradientBuffer], known: Sequence[GradientBuffer]) -> None:
        """Find out which gradients of ``reduced`` are missing everywhere."""
        if self._has_said and not self._asks:
            self._asks = self._all_have_said()
        if self._asks:
            self._ask(reduced, known)
        else:
            _count_as_zeros(reduced)
        self._number += 1
        self._has_said = False

    def _all_have_said(self) -> bool:
        # Reductions that are done have waited for every rank, and every rank has spoken before its own.
        wait_on_host(self._device)
        store = self._store()
        have_all = store.add(self._key("missing"), 0) == len(self.ranks)
        # The first look counts for all who look. Who has said nothing does not, but then it is this very answer.
        found = store.compare_set(self._key("verdict"), "", "all" if have_all else "some").decode()
        # Nobody reads the last ones any more: this reduction has waited for all to have begun with it.
        for key in self._old_keys:
            store.delete_key(key)
        self._old_keys = (self._key("missing"), self._key("verdict"))
        return bool(found == "all")

    def _ask(self, reduced: Sequence[GradientBuffer], known: Sequence[GradientBuffer]) -> None:
        wanted = {id(buffer) for buffer in reduced}
        mine = [one if id(buffer) in wanted else 0 for buffer in known for one in buffer.binding.missing]
        # The maximum of "is there" is whether any rank has it. The last one: whether any misses something.
        votes = torch.tensor([*(1 - one for one in mine), max(mine, default=0)], dtype=torch.int32, device=self._device)
        for axis in self._axes:
            all_reduce(votes, axis, "max")
        *is_there, is_missed = votes.tolist()
        self._asks = bool(is_missed)
        position = 0
        for buffer in known:
            size = len(buffer.binding.missing)
            if id(buffer) in wanted:
                buffer.binding.missing = bytearray(1 - one for one in is_there[position : position + size])
            position += size

    def _key(self, name: str) -> str:
        return f"{self._token} {self._number} {name}"

    def _store(self) -> Any:
        store = job_store()
        assert store is not None
        return store


def _count_as_zeros(buffers: Iterable[GradientBuffer]) -> None:
    for buffer in buffers:
        if 1 in buffer.binding.missing:
            buffer.binding.missing = bytearray(len(buffer.binding.missing))
