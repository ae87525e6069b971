"""BinaryCounter: a sum whose rounding depends on how many tensors there are, and on nothing else."""

from __future__ import annotations

import torch

from dbuffer.storage import FlatStorage

__all__ = ["BinaryCounter"]


class BinaryCounter:
    """A sum of tensors, added in the order in which a binary counter carries.

    Its memory, as many tensors as ``count`` has bits, stays for the next sum.

    Attributes:
        count: of the tensors that are in it.
    """

    def __init__(self, dtype: torch.dtype, name: str = "") -> None:
        self.count = 0
        self._dtype, self._name = dtype, name
        self._has_zeros = False
        # By the power of two of the tensors that each adds up; None where all of them were zeros.
        self._levels: dict[int, torch.Tensor | None] = {}
        self._memory: dict[int, FlatStorage] = {}
        self._free: list[torch.Tensor] = []

    def clear(self) -> None:
        """Hold nothing; memory stays for the next sum."""
        self._free += [level for level in self._levels.values() if level is not None]
        self._levels, self.count, self._has_zeros = {}, 0, False

    def push(self, *leaves: torch.Tensor | None) -> None:
        """Add the next tensors, 1-D, which are copied at the end if they are left; None stands for zeros."""
        for leaf in leaves:
            self._has_zeros = self._has_zeros or leaf is None
            carried, level = leaf, 0
            while self.count >> level & 1:
                carried = self._merged(self._levels.pop(level), carried)
                level += 1
            self._levels[level] = carried
            self.count += 1
        for level, held in self._levels.items():
            if held is not None and id(held) not in self._memory:
                self._levels[level] = self._take(held).copy_(held)

    def _merged(self, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
        """Return the sum of two, in the memory of one that has some; leaves stay as they are."""
        if first is None or second is None:
            return second if first is None else first
        if id(first) not in self._memory:
            first, second = second, first
        if id(first) in self._memory:
            if id(second) in self._memory:
                self._free.append(second)
            return first.add_(second)
        memory = self._take(first)
        if first.dtype is self._dtype:
            return torch.add(first, second, out=memory)
        return memory.copy_(first).add_(second)

    def _take(self, like: torch.Tensor) -> torch.Tensor:
        if not self._free:
            storage = FlatStorage(like.numel(), self._dtype, like.device, name=f"{self._name}: sums")
            self._memory[id(storage.tensor)] = storage
            return storage.tensor
        return self._free.pop()

    def write(self, out: torch.Tensor, scale: float) -> None:
        """Write what is left, added from the smallest up, times ``scale``."""
        held = [level for _, level in sorted(self._levels.items()) if level is not None]
        if not held:
            out.zero_()
            return
        is_direct = out.dtype is self._dtype and out.device == held[0].device
        total = out if is_direct else self._take(held[0])
        total.copy_(held[0])
        for level in held[1:]:
            total.add_(level)
        if self._has_zeros:
            # Zeros that another number of ranks would have packed make +0.0 of a sum of -0.0.
            total.add_(0.0)
        total.mul_(scale)
        if not is_direct:
            self._free.append(total)
            out.copy_(total)
