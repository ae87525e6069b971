"""MissingGradients: find out whether a parameter without a gradient on this rank has one on another rank.

If it has, this rank contributes zeros to the mean. If no rank has one, ``.grad`` is None as in a plain model. A rank
with missing gradients says so in the job's store. If all ranks do, they vote on which, until no gradient is missing
(docs/design/missing_gradients.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbuffer.collectives.all_reduce import all_reduce
from megatron_fsdp.checks.agreement import mesh_ranks
from megatron_fsdp.checks.rendezvous import job_store
from megatron_fsdp.engine.accumulation import Accumulation
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.streams import is_capturing, wait_on_host
from megatron_fsdp.engine.unit import Call, Unit
from megatron_fsdp.errors import AgreementError

__all__ = ["MissingGradients"]


class MissingGradients(StepHooks[Unit, Call]):
    """Finds out, for one model, which gradients are missing on all ranks.

    Args:
        tokens: for each set of ranks, the name of their agreement on this model; see ``FirstUse``.

    Attributes:
        number: the number of accumulations that were reduced.
        has_question: the ranks must find out at the end of the accumulation which gradients are missing on all ranks.
    """

    def __init__(self, tokens: Mapping[tuple[int, ...], str]) -> None:
        self.tokens = tokens
        self.number = 0
        self.has_question = False
        self._circles: dict[tuple[int, ...], _Circle] = {}

    def on_missing(self, groups: Iterable[ParameterGroup]) -> None:
        """Tell the other ranks, before gradients are reduced, that some are missing on this rank."""
        for group in groups:
            under_way = None if group.gradient_buffer is None else group.gradient_buffer.binding.sum
            if under_way is not None and 1 in under_way.missing:
                circle = self._circle(group)
                token, is_heard = self.tokens.get(circle.ranks), circle.has_said or circle.asks
                if token and not is_heard and not is_capturing(circle.device):
                    self.has_question = circle.has_said = True
                    store: Any = job_store()
                    store.add(f"{token} {self.number} missing", 1)

    def on_final(self, groups: Sequence[ParameterGroup], units: Sequence[Unit], *, is_missing: bool) -> None:
        """Find out which of the missing gradients are missing on all ranks, and count the accumulation."""
        if is_missing or self.has_question:
            self._settle(groups, units)
        self.number += bool(groups)

    def _settle(self, final: Sequence[ParameterGroup], units: Iterable[Unit]) -> None:
        """Reduce ``missing`` of the reduced buffers to the gradients that no rank has.

        A rank that misses none need not, unless it ``has_question``.

        Args:
            final: groups whose gradients are reduced. units: all units of the model, in the same order on every rank.
        """
        circles: dict[_Circle, list[GradientBuffer]] = {}
        for group in final:
            if group.gradient_buffer is not None:
                circles.setdefault(self._circle(group), []).append(group.gradient_buffer)
        for circle, reduced in circles.items():
            token = self.tokens.get(circle.ranks)
            if token == "":
                continue
            circle.asks = circle.asks or (circle.has_said and circle.all_have_said(f"{token} {self.number}"))
            circle.has_said = False
            if circle.asks:
                circle.vote(reduced, [one for unit in units for one in unit.groups if self._circle(one) is circle])
            else:
                # Other ranks had gradients here; this rank contributed zeros.
                for buffer in reduced:
                    under_way = buffer.binding.sum
                    assert under_way is not None
                    under_way.missing = bytearray(len(under_way.missing))
        self.has_question = any(circle.has_said or circle.asks for circle in self._circles.values())

    def _circle(self, group: ParameterGroup) -> _Circle:
        ranks = mesh_ranks(group.spec.mesh)
        if ranks not in self._circles:
            self._circles[ranks] = _Circle(ranks, group.spec.compute_device)
        return self._circles[ranks]


@dataclass(eq=False)
class _Circle:
    """Ranks that reduce groups together, and the state of their question about missing gradients.

    Attributes:
        has_said: this rank has said that gradients of the current accumulation are missing.
        asks: all ranks vote at the end of the accumulation in any case.
        old_keys: keys of the last question in the store.
    """

    ranks: tuple[int, ...]
    device: torch.device
    has_said: bool = False
    asks: bool = False
    old_keys: tuple[str, ...] = ()

    def all_have_said(self, name: str) -> bool:
        """Return whether every rank has reported missing gradients in this accumulation."""
        # A finished reduction has waited for every rank, and every rank reports before its own reduction.
        wait_on_host(self.device)
        store: Any = job_store()
        said, verdict = f"{name} missing", f"{name} verdict"
        # The first look counts for all who look. Who has said nothing does not, but then it is this very answer.
        found = store.compare_set(verdict, "", "all" if store.add(said, 0) == len(self.ranks) else "some").decode()
        # No rank reads the previous keys any more: all ranks have started this reduction.
        for key in self.old_keys:
            store.delete_key(key)
        self.old_keys = (said, verdict)
        return bool(found == "all")

    def vote(self, reduced: Sequence[GradientBuffer], groups: Sequence[ParameterGroup]) -> None:
        """Find out by one small collective which gradients of ``reduced`` are missing on all ranks.

        Args:
            groups: all groups that these ranks reduce, in the same order on all ranks. Several meshes may have the same
                ranks and different communicators, so the vote runs over those of the first group.
        """
        wanted = {id(buffer) for buffer in reduced}
        # For each group its number of parameters, and its sum if that is among the reduced ones.
        entries: list[tuple[int, Accumulation | None]] = []
        for group in groups:
            if group.gradient_buffer is not None:
                binding = group.gradient_buffer.binding
                entries.append((len(binding.parameters), binding.sum if id(group.gradient_buffer) in wanted else None))
        mine: list[int] = []
        for num_params, under_way in entries:
            mine += bytes(num_params) if under_way is None else under_way.missing
        # The maximum over ranks says whether any rank has a gradient; the last vote, whether any rank misses one.
        votes = torch.tensor([*(1 - one for one in mine), max(mine, default=0)], dtype=torch.int32, device=self.device)
        try:
            for axis in groups[0].main_weight.axes:
                all_reduce(votes, axis, "max")
            *is_there, self.asks = map(bool, votes.tolist())
        except RuntimeError as error:
            AgreementError.raise_for(groups[0].name, "the vote on its missing gradients", error)
        left = iter(is_there)
        for num_params, under_way in entries:
            missing = bytearray(not next(left) for _ in range(num_params))
            if under_way is not None:
                under_way.missing = missing
