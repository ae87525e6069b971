"""What some weights have besides the buffers of all: the part kept from forward to backward, and lower halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from dbuffer import DBuffer, SlotPool
from dbuffer.collectives import Part
from dbuffer.mesh import MeshAxis

__all__ = ["KeptPart", "Remainder"]


class KeptPart(Protocol):
    """See ``runtime/weights/post_forward_shard.py``."""

    @property
    def axis(self) -> MeshAxis:
        """The ranks that hold the whole together."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds between forward and backward."""

    def use_pool(self, pool: SlotPool | None) -> None:
        """Take its memory from a pool, or from the allocator again."""

    def keep(self, generation: int) -> None:
        """Copy this rank's part of the gathered weights, which are of a certain generation."""

    def holds(self, generation: int) -> bool:
        """Whether it holds weights of that generation."""

    def gather(self) -> Part:
        """Return the gather of the whole weights."""

    def drop(self) -> None:
        """Release the memory."""


class Remainder(Protocol):
    """See ``runtime/weights/split_weights.py``."""

    buffer: DBuffer

    def watch(self, params: Sequence[nn.Parameter]) -> None:
        """See changes of the main weights by these DTensors over them, in plan order."""

    def accept(self) -> None:
        """Say that both halves belong together as they are."""

    def current(self) -> torch.Tensor:
        """Return this rank's lower halves, 1-D, with zeros for what others changed since ``accept``."""

    def join(self) -> DBuffer:
        """Return the FP32 weights, a copy laid out like main weights."""

    def split(self, values: DBuffer) -> None:
        """Take FP32 weights over, to the bit."""
