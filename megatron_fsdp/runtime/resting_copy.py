"""Weights at rest that are a copy of main weights: brought up to date before use (docs/design/freshness.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dbuffer.collectives_together import gather_together
from dbuffer.events import listeners, tell

if TYPE_CHECKING:
    from megatron_fsdp.runtime.parameter_group import ParameterGroup

__all__ = ["catch_up_together", "expect_step", "refresh_together"]


def refresh_together(groups: Sequence[ParameterGroup]) -> None:
    """Bring ``model_weight`` of groups of one unit up to date: casts, and one gather where weights rest whole."""
    for group in groups if listeners else ():
        tell("refresh", group)
    parts = [part for group in groups for part in group.weights.start_refresh()]
    try:
        if parts:
            gather_together(parts)
    finally:
        # Where both share memory the gather writes the main weights' bytes too, with the values that they have.
        share_memory = [group for group in groups if group.weights.end_refresh()]
    for group in groups:
        group.freshness.refreshed()
    for group in share_memory:
        group.freshness.look_again()
    for group in groups if listeners else ():
        tell("refreshed", group)


def expect_step(groups: Iterable[ParameterGroup]) -> None:
    """Take notice that an optimizer is about to step main weights: a step that raises has changed some of them."""
    for group in groups:
        group.freshness.change()


def catch_up_together(groups: Iterable[ParameterGroup]) -> None:
    """Take notice of an optimizer step or a load: gather what rests whole, leave the rest to its next gather."""
    by_unit: dict[int, list[ParameterGroup]] = {}
    for group in groups:
        if group.refreshes_locally:
            group.freshness.change()
        else:
            group.freshness.is_changed()
            by_unit.setdefault(group.unit, []).append(group)
    for found in by_unit.values():
        refresh_together(found)
