"""GradientSpec: what a gradient buffer is built from besides its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_fsdp.policy.strategy import Placements

__all__ = ["GradientSpec"]


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What a gradient buffer is built from besides its weights.

    Attributes:
        placements: the strategy. reduce_dtype: of the packed buffer and the wire. main_dtype: of ``main_grad``.
        divisor: the sum over ranks is divided by it.
        device: where gradients are produced and reduced.
        is_offloaded: ``main_grad`` lies in CPU memory, with the main weights. is_pinned: in pages that a GPU writes.
        fuses_weight_gradients: linear layers may multiply gradients into the packed buffer; "wide": of a wider dtype.
        accumulate_dtype: of the sum over ranks where that is wider than the wire; None: as the wire.
    """

    placements: Placements
    reduce_dtype: torch.dtype
    main_dtype: torch.dtype
    divisor: float
    device: torch.device
    is_offloaded: bool = False
    is_pinned: bool = False
    fuses_weight_gradients: bool | str = True
    accumulate_dtype: torch.dtype | None = None
