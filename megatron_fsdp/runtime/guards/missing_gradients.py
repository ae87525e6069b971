"""MissingGradients: whether a parameter that got no gradient on this rank got one on any.

If one did, this rank takes part in the mean with zeros; if none did, ``.grad`` is None as in any model. Who misses some
says so in the job's store; if all have, they vote on which, now and until nobody misses any
(docs/design/missing_gradients.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dbuffer.collectives import all_reduce
from megatron_fsdp.runtime.guards.agreement import mesh_ranks
from megatron_fsdp.runtime.guards.rendezvous import job_store
from megatron_fsdp.runtime.step.streams import is_capturing, wait_on_host

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
        self._circles: dict[tuple[int, ...], _Circle] = {}

    def say(self, groups: Iterable[ParameterGroup]) -> None:
        """Tell the other ranks, before gradients are reduced, if some are missing here."""
        for group in groups:
            if group.gradients is not None and 1 in group.gradients.binding.missing:
                circle = self._circle(group)
                if circle.is_quiet and self.tokens.get(circle.ranks) and not is_capturing(circle.device):
                    circle.has_said = True
                    circle.store.add(f"{self._name_for(circle)} missing", 1)
        self._look()

    def settle(self, final: Sequence[ParameterGroup], units: Iterable[Unit]) -> None:
        """Leave in ``missing`` of reduced buffers what no rank has.

        A rank that misses none calls it where it ``has_question``, and else need not.

        Args:
            final: whose gradients are reduced. units: all of the model, in the same order on every rank.
        """
        circles: dict[_Circle, list[GradientBuffer]] = {}
        for group in final:
            if group.gradients is not None:
                circles.setdefault(self._circle(group), []).append(group.gradients)
        for circle, reduced in circles.items():
            if self.tokens.get(circle.ranks) == "":
                continue
            circle.asks = circle.asks or (circle.has_said and circle.all_have_said(self._name_for(circle)))
            circle.has_said = False
            if circle.asks:
                circle.vote(
                    reduced, [group for unit in units for group in unit.groups if self._circle(group) is circle]
                )
                continue
            # What is missing here was zeros for the others.
            for buffer in reduced:
                if 1 in buffer.binding.missing:
                    buffer.binding.missing = bytearray(len(buffer.binding.missing))
        self._look()

    def _look(self) -> None:
        self.has_question = not all(circle.is_quiet for circle in self._circles.values())

    def _name_for(self, circle: _Circle) -> str:
        return f"{self.tokens.get(circle.ranks)} {self.number}"

    def _circle(self, group: ParameterGroup) -> _Circle:
        ranks = mesh_ranks(group.spec.mesh)
        if ranks not in self._circles:
            self._circles[ranks] = _Circle(ranks, group.spec.compute_device)
        return self._circles[ranks]


class _Circle:
    """The ranks that reduce some groups together, and how far they are.

    Attributes:
        has_said: this rank has said of the accumulation under way that it misses gradients. asks: all of them vote at
            its end in any case.
    """

    def __init__(self, ranks: tuple[int, ...], device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.has_said = self.asks = False
        self._old_keys: tuple[str, ...] = ()

    @property
    def store(self) -> Any:
        """The job's, which is there for who has others."""
        return job_store()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is to be found out."""
        return not (self.has_said or self.asks)

    def all_have_said(self, name: str) -> bool:
        """Whether every rank has left word in the accumulation of that name."""
        # Reductions that are done have waited for every rank, and every rank has spoken before its own.
        wait_on_host(self.device)
        store, said, verdict = self.store, f"{name} missing", f"{name} verdict"
        have_all = store.add(said, 0) == len(self.ranks)
        # The first look counts for all who look. Who has said nothing does not, but then it is this very answer.
        found = store.compare_set(verdict, "", "all" if have_all else "some").decode()
        # Nobody reads the last ones any more: this reduction has waited for all to have begun with it.
        for key in self._old_keys:
            store.delete_key(key)
        self._old_keys = (said, verdict)
        return bool(found == "all")

    def vote(self, reduced: Sequence[GradientBuffer], groups: Sequence[ParameterGroup]) -> None:
        """Find out by one small collective which gradients of ``reduced`` are missing on all ranks.

        Args:
            groups: all that these ranks reduce. Of meshes of the same ranks each has communicators of its own, and
                which one a rank met first is its own affair: the vote runs over those of the first group.
        """
        wanted = {id(buffer) for buffer in reduced}
        known = [group.gradients for group in groups if group.gradients is not None]
        mine = [one if id(buffer) in wanted else 0 for buffer in known for one in buffer.binding.missing]
        # The maximum of "is there" is whether any rank has it. The last one: whether any misses something.
        votes = torch.tensor([*(1 - one for one in mine), max(mine, default=0)], dtype=torch.int32, device=self.device)
        for axis in groups[0].main_weight.axes:
            all_reduce(votes, axis, "max")
        *is_there, is_missed = votes.tolist()
        self.asks = bool(is_missed)
        left = iter(is_there)
        for buffer in known:
            missing = bytearray(1 - next(left) for _ in buffer.binding.missing)
            if id(buffer) in wanted:
                buffer.binding.missing = missing
