"""Largest magnitudes that ranks exchange before they quantize, those of all units at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dbuffer.collectives import Part
from dbuffer.collectives_together import all_reduce_together
from megatron_fsdp.runtime.step.freshness import MOMENTS
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.step.weight_handle import handle_of

__all__ = ["HasMagnitudes", "exchange_magnitudes"]


class HasMagnitudes:
    """Weights whose scales are of all ranks.

    Attributes:
        exchanges: whether there are any such. known_at: for what state of the weights they are those of all ranks.
    """

    exchanges = False
    known_at: tuple[int, int, int] | None = None

    def look(self) -> Part:
        """Find this rank's, and return the exchange."""
        raise NotImplementedError


def exchange_magnitudes(stale: Sequence[ParameterGroup]) -> None:
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


def _exchanging(groups: Iterable[ParameterGroup]) -> dict[HasMagnitudes, ParameterGroup]:
    pairs = [(group.weights, group) for group in groups if not group.is_meta]
    return {weights: group for weights, group in pairs if isinstance(weights, HasMagnitudes) and weights.exchanges}


def _state(group: ParameterGroup, call: int) -> tuple[int, int, int]:
    return call, MOMENTS[0], sum(tensor._version for tensor in group.fsdp_params.counted)
