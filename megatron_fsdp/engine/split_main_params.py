"""Remainder: the 16 bits that bf16 main weights lack of the FP32 weights that the optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dbuffer import DBuffer
from dbuffer_kernels import join_weight, split_weight

__all__ = ["Remainder"]


class Remainder:
    """The lower halves of one group's FP32 main weights, and whether they still belong to the upper ones.

    The upper halves are the group's ``main_weight``, which a load, an initialiser or a user may write to. What is
    written is bf16 and meant as it is, so the lower half of a parameter that anything but the optimizer changed counts
    as zero from then on (docs/design/adamw.md, "FP32 weights in 4 bytes").

    Args:
        main: the bf16 main weights. pin_memory: as theirs.
    Attributes:
        buffer: int16, laid out like ``main``.
    """

    def __init__(self, main: DBuffer, *, pin_memory: bool = False) -> None:
        self._main = main
        self.buffer = self._like(torch.int16, pin_memory=pin_memory).zero_()
        self._params: tuple[nn.Parameter, ...] = ()
        self._seen: tuple[int, ...] = ()

    def _like(self, dtype: torch.dtype, *, pin_memory: bool = False) -> DBuffer:
        main = self._main
        placed = main.plan, main.mesh, main.placements
        return DBuffer.from_plan(*placed, dtype, main.device, name=main.name, pin_memory=pin_memory)

    def watch(self, params: Sequence[nn.Parameter]) -> None:
        """See changes of the parameters' memory by these DTensors over it, in plan order, from now on."""
        self._params = tuple(params)
        self.accept()

    def accept(self) -> None:
        """Say that both halves belong together as they are."""
        self._seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        """Return the version counters of the whole buffer and of each parameter, which in-place changes move."""
        with torch._C.DisableTorchFunctionSubclass():
            own = [param._version + param._local_tensor._version for param in self._params]  # type: ignore[attr-defined]
        return self._main.local_buffer._version, *own

    def current(self) -> torch.Tensor:
        """Return this rank's lower halves, 1-D, with zeros for what others changed since ``accept``."""
        found = self._versions()
        if found[:1] != self._seen[:1]:
            self.buffer.zero_()
        elif found != self._seen:
            for index, (now, before) in enumerate(zip(found[1:], self._seen[1:], strict=True)):
                if now != before:
                    self.buffer.get_local_tensor(index).zero_()
        self._seen = found
        return self.buffer.local_buffer

    def join(self) -> DBuffer:
        """Return the FP32 weights, a copy laid out like ``main``."""
        values = self._like(torch.float32)
        join_weight(self._main.local_buffer, self.current(), values.local_buffer)
        return values

    def split(self, values: DBuffer) -> None:
        """Take FP32 weights over, to the bit."""
        split_weight(values.local_buffer, self._main.local_buffer, self.buffer.local_buffer)
        self.accept()
