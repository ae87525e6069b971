"""GradMemory: when the memory of ``main_grad`` is allocated and released."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from dbuffer.dtensor.placed_tensor import GradDrops
from megatron_fsdp.engine.streams import compute_of

__all__ = ["GradMemory"]


# How often, and at which intervals, ``GradMemory`` looks again while a gloo thread may hold the memory.
_LOOKS, _PAUSE_S = 10, 0.001


class GradMemory:
    """The memory of ``main_grad``: allocated while gradients exist, released when every ``.grad`` is None.

    Gradients of a plain model live as long as a reference to them, and so does this memory: ``release_unless_held``
    compares reference counts with those that were counted when only the engine had references.

    Args:
        main_grad: the buffer.
        drops: reports when ``.grad`` is set to None; from an allocation on, for any parameter.
        is_sent_last: the last collective of a step sends ``main_grad`` itself.

    Attributes:
        keeps: the memory stays allocated without gradients too.
        is_captured: a graph writes to the memory whenever it is replayed, so it stays whatever the user keeps.
        is_held: ``release_unless_held`` found that the user holds a tensor that lies in the memory.
        gaps: views of the padding, which no gradient is written to and which stays zero.
    """

    def __init__(self, main_grad: DBuffer, drops: GradDrops, *, is_sent_last: bool) -> None:
        self._drops = drops
        self.keeps = self.is_captured = self.is_held = False
        self.gaps: Sequence[torch.Tensor] = ()
        self.is_sent_last = is_sent_last
        self._main_grad, self._compute = main_grad, compute_of(main_grad.device)
        self._counted: list[torch.Tensor] = []
        self._references: tuple[int, ...] = ()

    def allocate(self) -> bool:
        """Allocate the memory, with zeros in ``gaps`` alone; return whether it was released before."""
        storage = self._main_grad.storage
        if self._compute is not None and self._compute.streams.is_capturing():
            self.is_captured = True
        if storage.is_allocated:
            return False
        storage.reallocate()
        self._drops.last = None
        for gap in self.gaps:
            gap.zero_()
        if not self._references:
            self._references = self._count_references()
        return True

    def release_unless_held(self) -> bool:
        """Release the memory unless it is to stay or the user holds a tensor in it; return whether it was released."""
        storage = self._main_grad.storage
        if self.is_captured or not storage.is_allocated or not storage.nbytes:
            return False
        self.is_held = bool(self._references) and self._find_held()
        if self.is_held or self.keeps:
            return False
        storage.release()
        return True

    def count_references_to(self, gradients: Sequence[DTensor]) -> None:
        """Count the references to the tensors that ``.grad`` will show, before a user can have any."""
        self._counted = [*gradients, *[gradient._local_tensor for gradient in gradients]]
        self._references = self._count_references()

    def is_gradient_held(self, index: int) -> bool:
        """Return whether the user holds the gradient of parameter ``index``, or its local tensor."""
        found = self._count_references()
        return any(found[place] != self._references[place] for place in self._places(index))

    def replace_gradient(self, index: int, gradients: Sequence[DTensor]) -> None:
        """Count references to the new gradient of parameter ``index``, to which the user has none yet."""
        both = (gradients[index], gradients[index]._local_tensor)
        for place, tensor in zip(self._places(index), both, strict=True):
            self._counted[place - 1] = tensor

    def _places(self, index: int) -> tuple[int, int]:
        return 1 + index, 1 + index + len(self._counted) // 2

    def _find_held(self) -> bool:
        """Return whether the user holds a tensor that lies in the memory."""
        found = self._count_references()
        looks = _LOOKS if self.is_sent_last and self._main_grad.device.type == "cpu" else 0
        for _ in range(looks):
            if found == self._references or found[1:] != self._references[1:]:
                break
            # A gloo thread that ended the last reduction may not have dropped its tensors yet. Seen at 2 of 1,600
            # calls on two idle cores; one pause was enough.
            time.sleep(_PAUSE_S)
            found = self._count_references()
        return found != self._references

    def _count_references(self) -> tuple[int, ...]:
        """Return how many tensors lie in the memory, and the number of references to each that ``.grad`` shows."""
        storage = self._main_grad.storage.tensor.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata), *map(sys.getrefcount, self._counted)
