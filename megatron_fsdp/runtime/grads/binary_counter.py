"""BinaryCounter: a sum whose rounding depends on how many tensors there are, and on nothing else."""

from __future__ import annotations

import torch

from dbuffer.storage import FlatStorage

__all__ = ["BinaryCounter"]


class BinaryCounter:
    """A sum of tensors, added in the order in which a binary counter carries.

    Its memory, at most ``num_counters`` of its tensors, stays for the next sum.

    Attributes:
        count: of the tensors that are in it.
    """

    def __init__(self, dtype: torch.dtype, name: str = "") -> None:
        self.count = 0
        self._dtype, self._name = dtype, name
        self._has_zeros = False
        # By the power of two of the tensors that each adds up; None where all of them were zeros. Tensors are leaves
        # that are pushed, and copied at the end of that if they are left.
        self._levels: dict[int, FlatStorage | torch.Tensor | None] = {}
        self._free: list[FlatStorage] = []

    def clear(self) -> None:
        """Hold nothing; memory stays for the next sum."""
        self._free += [level for level in self._levels.values() if isinstance(level, FlatStorage)]
        self._levels, self.count, self._has_zeros = {}, 0, False

    def push(self, *leaves: torch.Tensor | None) -> None:
        """Add the next tensors, 1-D; None stands for zeros."""
        for leaf in leaves:
            self._has_zeros = self._has_zeros or leaf is None
            carried: FlatStorage | torch.Tensor | None = leaf
            level = 0
            while self.count >> level & 1:
                carried = self._merged(self._levels.pop(level), carried)
                level += 1
            self._levels[level] = carried
            self.count += 1
        for level, held in self._levels.items():
            if isinstance(held, torch.Tensor):
                self._levels[level] = memory = self._memory(held)
                memory.tensor.copy_(held)

    def _merged(
        self, first: FlatStorage | torch.Tensor | None, second: FlatStorage | torch.Tensor | None
    ) -> FlatStorage | torch.Tensor | None:
        """Return the sum of two, in the memory of one that has some; leaves stay as they are."""
        if first is None or second is None:
            return second if first is None else first
        if isinstance(first, torch.Tensor):
            first, second = second, first
        if isinstance(second, FlatStorage):
            self._free.append(second)
            second = second.tensor
        if isinstance(first, FlatStorage):
            first.tensor.add_(second)
            return first
        memory = self._memory(first)
        if first.dtype is not self._dtype:
            first = memory.tensor.copy_(first)
        torch.add(first, second, out=memory.tensor)
        return memory

    def _memory(self, like: torch.Tensor) -> FlatStorage:
        if self._free:
            return self._free.pop()
        return FlatStorage(like.numel(), self._dtype, like.device, name=f"{self._name}: sums")

    def write(self, out: torch.Tensor, scale: float) -> None:
        """Write what is left, added from the smallest up, times ``scale``."""
        levels = (level for _, level in sorted(self._levels.items()))
        held = [level.tensor for level in levels if isinstance(level, FlatStorage)]
        if not held:
            out.zero_()
            return
        memory = None if out.dtype is self._dtype and out.device == held[0].device else self._memory(held[0])
        total = out if memory is None else memory.tensor
        total.copy_(held[0])
        for level in held[1:]:
            total.add_(level)
        if self._has_zeros:
            # Zeros that another number of ranks would have packed make +0.0 of a sum of -0.0.
            total.add_(0.0)
        total.mul_(scale)
        if memory is not None:
            self._free.append(memory)
            out.copy_(total)
