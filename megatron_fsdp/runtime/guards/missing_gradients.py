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

from megatron_fsdp.runtime.guards.agreement import mesh_ranks
from megatron_fsdp.runtime.guards.missing_votes import all_have_said, ask, say

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.gradients import GradientBuffer
    from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
    from megatron_fsdp.runtime.step.unit import Unit

__all__ = ["MissingGradients"]


class MissingGradients:
    """What the ranks of one model know of each other's missing gradients.

    Args:
        tokens: by ranks, the names of their agreements on this model; see ``FirstUse``.

    Attributes:
        number: how many accumulations were reduced. has_question: something is to be found out at its end.
    """

    def __init__(self, tokens: Mapping[tuple[int, ...], str]) -> None:
        self.tokens = tokens
        self.number = 0
        self.has_question = False
        self._circles: dict[Any, Circle] = {}

    def say(self, groups: Iterable[ParameterGroup]) -> None:
        """Tell the other ranks, before gradients are reduced, if some are missing here."""
        for group in groups:
            if group.gradients is not None and 1 in group.gradients.binding.missing:
                say(self._circle(group), self.number)
        self._look()

    def settle(self, final: Sequence[ParameterGroup], units: Iterable[Unit]) -> None:
        """Leave in ``missing`` of reduced buffers what no rank has.

        A rank that misses none calls it where it ``has_question``, and else need not.

        Args:
            final: whose gradients are reduced. units: all of the model, in the same order on every rank.
        """
        circles: dict[Circle, list[GradientBuffer]] = {}
        for group in final:
            circles.setdefault(self._circle(group), []).extend(_buffers(group))
        for circle, reduced in circles.items():
            if circle.is_quiet:
                circle.pass_over(reduced)
                continue
            groups = [group for unit in units for group in unit.groups if self._circle(group) is circle]
            # Of meshes of the same ranks each has communicators of its own, and which one a rank met first is its own
            # affair: the vote runs over those of the first unit.
            circle.axes = groups[0].main_weight.axes
            circle.settle(reduced, [buffer for group in groups for buffer in _buffers(group)], self.number)
        self._look()

    def _look(self) -> None:
        self.has_question = not all(circle.is_quiet for circle in self._circles.values())

    def _circle(self, group: ParameterGroup) -> Circle:
        mesh = group.spec.mesh
        if mesh not in self._circles:
            circle = Circle(group, self.tokens)
            self._circles[mesh] = next((one for one in self._circles.values() if one.ranks == circle.ranks), circle)
        return self._circles[mesh]


def _buffers(group: ParameterGroup) -> Iterator[GradientBuffer]:
    if group.gradients is not None:
        yield group.gradients


class Circle:
    """The ranks that reduce some groups together, and how far they are.

    Args:
        group: one of them.

    Attributes:
        ranks: of the mesh.
    """

    def __init__(self, group: ParameterGroup, tokens: Mapping[tuple[int, ...], str]) -> None:
        self.ranks = mesh_ranks(group.spec.mesh)
        self.axes = group.main_weight.axes
        self.device = group.spec.compute_device
        self.tokens = tokens
        # Whether this rank has said for the next accumulation that it misses gradients, or all ask each other at its
        # end in any case.
        self.has_said = False
        self.asks = False
        self.old_keys: tuple[str, ...] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is to be found out."""
        return not (self.has_said or self.asks)

    @property
    def token(self) -> str | None:
        """The name of the ranks' agreement; None before they agreed, and empty where nobody else can come."""
        return "" if math.prod(axis.size for axis in self.axes) == 1 else self.tokens.get(self.ranks)

    def pass_over(self, reduced: Iterable[GradientBuffer]) -> None:
        """Go on without asking: what is missing here was zeros for the others."""
        if self.token != "":
            _count_as_zeros(reduced)

    def settle(self, reduced: Sequence[GradientBuffer], known: Sequence[GradientBuffer], number: int) -> None:
        """Find out which gradients of ``reduced`` are missing everywhere, in the accumulation of that number."""
        if self.has_said and not self.asks:
            self.asks = all_have_said(self, number)
        if self.asks:
            ask(self, reduced, known)
        else:
            _count_as_zeros(reduced)
        self.has_said = False


def _count_as_zeros(buffers: Iterable[GradientBuffer]) -> None:
    for buffer in buffers:
        if 1 in buffer.binding.missing:
            buffer.binding.missing = bytearray(len(buffer.binding.missing))
