"""How ranks that miss gradients tell each other: word in the job's store, then a vote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dbuffer.collectives import all_reduce
from megatron_fsdp.runtime.guards.rendezvous import job_store
from megatron_fsdp.runtime.step.cuda_lane import is_capturing, wait_on_host

if TYPE_CHECKING:
    from megatron_fsdp.runtime.guards.missing_gradients import Circle
    from megatron_fsdp.runtime.step.gradients import GradientBuffer

__all__ = ["all_have_said", "ask", "say"]


def all_have_said(circle: Circle, number: int) -> bool:
    """Whether every rank has left word that it misses gradients."""
    # Reductions that are done have waited for every rank, and every rank has spoken before its own.
    wait_on_host(circle.device)
    store = _store()
    have_all = store.add(_key(circle, number, "missing"), 0) == len(circle.ranks)
    # The first look counts for all who look. Who has said nothing does not, but then it is this very answer.
    found = store.compare_set(_key(circle, number, "verdict"), "", "all" if have_all else "some").decode()
    # Nobody reads the last ones any more: this reduction has waited for all to have begun with it.
    for key in circle.old_keys:
        store.delete_key(key)
    circle.old_keys = (_key(circle, number, "missing"), _key(circle, number, "verdict"))
    return bool(found == "all")


def ask(circle: Circle, reduced: Sequence[GradientBuffer], known: Sequence[GradientBuffer]) -> None:
    """Ask the other ranks which gradients are missing everywhere, by one small collective."""
    wanted = {id(buffer) for buffer in reduced}
    mine = [one if id(buffer) in wanted else 0 for buffer in known for one in buffer.binding.missing]
    # The maximum of "is there" is whether any rank has it. The last one: whether any misses something.
    votes = torch.tensor([*(1 - one for one in mine), max(mine, default=0)], dtype=torch.int32, device=circle.device)
    for axis in circle.axes:
        all_reduce(votes, axis, "max")
    *is_there, is_missed = votes.tolist()
    circle.asks = bool(is_missed)
    position = 0
    for buffer in known:
        size = len(buffer.binding.missing)
        if id(buffer) in wanted:
            buffer.binding.missing = bytearray(1 - one for one in is_there[position : position + size])
        position += size


def say(circle: Circle, number: int) -> None:
    """Leave word that gradients are missing here, once an accumulation."""
    if circle.is_quiet and circle.token and not is_capturing(circle.device):
        circle.has_said = True
        _store().add(_key(circle, number, "missing"), 1)


def _key(circle: Circle, number: int, name: str) -> str:
    return f"{circle.token} {number} {name}"


def _store() -> Any:
    store = job_store()
    assert store is not None
    return store
