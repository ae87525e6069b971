"""Weights at rest that are a copy of main weights: brought up to date before use (docs/design/freshness.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dbuffer.collectives import Part
from dbuffer.collectives_together import all_reduce_together, gather_together
from dbuffer.events import listeners, tell
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.freshness import MOMENTS
from megatron_fsdp.runtime.step.fsdp_params import handle_of
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, WeightBuffers

__all__ = ["RestingCopy", "announce_step"]


class RestingCopy(WeightBuffers):
    """Weight buffers, of which a copy of main weights may rest.

    Attributes:
        exchanges: whether ranks exchange the largest magnitudes of weights before they make it.
        known_at: for what state of the weights those are of all ranks.
    """

    exchanges = False
    known_at: tuple[int, int, int] | None = None

    def look(self) -> Part:
        """Find this rank's largest magnitudes, and return their exchange."""
        raise NotImplementedError

    def refresh(self, groups: Sequence[ParameterGroup]) -> None:
        """Bring weights at rest of groups of one unit up to date, this one's among them: casts, and one gather.

        On a CPU the host waits for it: who looks for changes of main weights sees nothing of a gather into their
        memory.

        Raises:
            StateError: their parameters are on the meta device still.
        """
        for group in groups:
            if group.is_meta:
                raise StateError(
                    f"unit {group.name!r}: parameters {', '.join(map(repr, group.parameters))} are on the meta device "
                    "still. Call materialize(model), or model.to_empty(device=...) and initialise it, or load a "
                    "checkpoint."
                )
        for group in groups if listeners else ():
            tell("refresh", group)
        _exchange_magnitudes(groups)
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
        group.freshness.has_changed = True


def _exchange_magnitudes(stale: Sequence[ParameterGroup]) -> None:
    """Let groups that are about to be quantized have the largest magnitudes of all ranks.

    The first one in a forward of the root asks for all units that will be quantized in it, by one all-reduce; of a
    group that has changed since they are asked for again.
    """
    asking = _exchanging(stale)
    if not asking:
        return
    unit = handle_of(next(iter(asking.values())).fsdp_params.unsharded_params[0]).unit()
    root = None if unit is None else unit.schedule.root_ref()
    call = None if root is None else root.open_call
    together = asking
    if unit is not None and call is not None:
        if all(weights.known_at == _state(group, call.begin) for weights, group in asking.items()):
            together = {}
        else:
            served = _exchanging(group for each in unit.schedule.units() for group in each.groups)
            in_evaluation = not torch.is_grad_enabled()
            together = asking | {w: g for w, g in served.items() if in_evaluation or g.freshness.is_changed()}
    if together:
        all_reduce_together([weights.look() for weights in together])
    for weights, group in together.items():
        weights.known_at = None if call is None else _state(group, call.begin)
    for weights in asking:
        # For once: PyTorch does not count every change that may follow.
        weights.known_at = None


def _exchanging(groups: Iterable[ParameterGroup]) -> dict[RestingCopy, ParameterGroup]:
    pairs = [(group.weights, group) for group in groups if not group.is_meta]
    return {weights: group for weights, group in pairs if isinstance(weights, RestingCopy) and weights.exchanges}


def _state(group: ParameterGroup, call: int) -> tuple[int, int, int]:
    return call, MOMENTS[0], sum(tensor._version for tensor in group.fsdp_params.counted)
