"""Weights at rest that are a copy of main weights: brought up to date before use (docs/design/freshness.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dbuffer.collectives_together import gather_together
from dbuffer.events import listeners, tell
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.weights.magnitudes import exchange_magnitudes

__all__ = ["announce_step", "refresh_together"]


def refresh_together(groups: Sequence[ParameterGroup]) -> None:
    """Bring ``model_weight`` of groups of one unit up to date: casts, and one gather where weights rest whole.

    On a CPU the host waits for it: who looks for changes of main weights sees nothing of a gather into their memory.

    Raises:
        StateError: their parameters are on the meta device still.
    """
    for group in groups:
        if group.is_meta:
            raise StateError(
                f"unit {group.name!r}: parameters {', '.join(map(repr, group.parameters))} are on the meta device "
                "still. Call materialize(model), or model.to_empty(device=...) and initialise it, or load a checkpoint."
            )
    for group in groups if listeners else ():
        tell("refresh", group)
    exchange_magnitudes(groups)
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


def announce_step(groups: Iterable[ParameterGroup]) -> None:
    """Take notice that main weights are changed, or about to be: what rests is made again before its next use.

    An optimizer says so before it steps: one that raises has changed some of them.
    """
    for group in groups:
        group.freshness.change()
