"""What a GradientBuffer is built from, the states it goes through, and who is told about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_fsdp.strategy import Placements

__all__ = ["GradState", "GradientObserver", "GradientSpec"]


class GradState(enum.Enum):
    """What ``main_grad`` holds: nothing, a sum not reduced over all axes yet, or what the optimizer may read."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What a gradient buffer is built from besides its weights.

    Attributes:
        placements: the strategy. reduce_dtype: of the packed buffer and the wire. main_dtype: of ``main_grad``.
        divisor: the sum over ranks is divided by it.
        device: where gradients are produced and reduced.
        is_offloaded: ``main_grad`` lies in CPU memory, with the main weights. is_pinned: in pages that a GPU writes.
        fuses_weight_gradients: linear layers may multiply gradients into the packed buffer; "wide": of a wider dtype.
    """

    placements: Placements
    reduce_dtype: torch.dtype
    main_dtype: torch.dtype
    divisor: float
    device: torch.device
    is_offloaded: bool = False
    is_pinned: bool = False
    fuses_weight_gradients: bool | str = True


class GradientObserver(Protocol):
    """Who is told about a buffer's gradients."""

    def begin_backward(self) -> int:
        """Note that a backward is under way, and return its number."""

    def follow_gradients(self) -> None:
        """Parameters were frozen since forward."""

    def before_packing(self) -> None:
        """A packed buffer is about to be allocated."""

    def gradients_missing(self) -> None:
        """A buffer is about to be reduced without gradients of some parameters."""

    def gradient_arrived(self) -> None:
        """A gradient was packed."""
