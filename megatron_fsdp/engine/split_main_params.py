"""Remainder: the low 16 bits of FP32 main weights whose high 16 bits are bf16 main weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dbuffer import DBuffer
from dbuffer_kernels import join_weight, split_weight

__all__ = ["Remainder"]


class Remainder:
    """The low halves of one group's FP32 main weights.

    The high halves are the group's ``main_weight``, a bf16 buffer that a load, an initialiser or a user may write to.
    After such a write the parameter has exactly the bf16 value, so ``current`` sets its low half to zero
    (docs/design/adamw.md, "FP32 weights in 4 bytes").

    Args:
        main: the bf16 main weights. pin_memory: pin the low halves too.
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
        """Notice changes through these parameters, DTensors over ``main`` in plan order."""
        self._params = tuple(params)
        self.accept()

    def accept(self) -> None:
        """Record that the low halves belong to the present high halves."""
        self._seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        """Return the version counters of the whole buffer and of each parameter; in-place changes increase them."""
        with torch._C.DisableTorchFunctionSubclass():
            own = [param._version + param._local_tensor._version for param in self._params]  # type: ignore[attr-defined]
        return self._main.local_buffer._version, *own

    def current(self) -> torch.Tensor:
        """Return this rank's low halves, 1-D, with zeros for parameters that were written since ``accept``."""
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
        """Write FP32 weights into both halves, bit for bit."""
        split_weight(values.local_buffer, self._main.local_buffer, self.buffer.local_buffer)
        self.accept()
