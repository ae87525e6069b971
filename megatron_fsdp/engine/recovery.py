"""Recovery from a backward that raised: autograd never called its ``final_callback``.

A weak reference notices that the callback has died, and ``.grad`` refuses to be read from then on (``mark_raised``).
The engine's next call releases the memory (``recover``).
"""

from __future__ import annotations

import functools
import weakref

from megatron_fsdp.engine.final_callback import end_backward
from megatron_fsdp.engine.unit import Root, is_in_backward

__all__ = ["discard_dropped_sums", "mark_incomplete", "mark_raised", "recover", "reset", "settle"]


def mark_raised(root: weakref.ref[Root], ending: weakref.ref[functools.partial[None]]) -> None:
    """Make ``.grad`` refuse to be read, because the backward of this callback has raised.

    Runs before the caller of backward sees the error. ``recover`` releases memory later, because a release may wait for
    collectives of other ranks, which wait for this one.
    """
    found = root()
    if found is not None and found.backward.ending is ending:
        for buffer in found.gradient_buffers():
            buffer.mark_incomplete(found.backward.number)
        found.backward.has_sums = True


def recover(root: Root) -> None:
    """Clean up after a backward that raised: autograd never called its ``final_callback``.

    Outside of any backward the last one is over, even if a device's thread still holds its graph task.
    """
    ending = root.backward.ending
    if ending is not None and (ending() is None or not is_in_backward()):
        _discard_backward(root)


def _discard_backward(root: Root) -> None:
    """Drop the gradients of a backward that raised, and reshard all units."""
    state = root.backward
    if root.order is not None:
        root.order.forget()
    for unit in root.units():
        unit.open_call = None
        for buffer in unit.gradient_buffers if state.ending is not None else ():
            buffer.discard_backward(state.number)
            state.has_sums = state.has_sums or buffer.binding.sum is not None
        unit.reshard()
    end_backward(root)


def settle(root: Root) -> None:
    """End what earlier backwards have left: clean up after one that raised, and drop the sums that the user dropped.

    Raises:
        StateError: the user has dropped only a part of a sum, or has not dropped a sum that is incomplete because a
            backward raised.
    """
    recover(root)
    discard_dropped_sums(root)


def reset(root: Root) -> None:
    """Drop a forward or backward that raised, and all gradients that are incomplete or not finalized."""
    _discard_backward(root)
    for buffer in root.gradient_buffers():
        under_way = buffer.binding.sum
        if root.backward.is_unfinished or (under_way is not None and under_way.is_incomplete):
            buffer.discard_sum()
    root.backward.is_unfinished, root.backward.open_handle = False, 0


def discard_dropped_sums(root: Root) -> None:
    """Drop the sums of earlier microbatches whose ``.grad`` the user has set to None."""
    if root.backward.has_sums:
        for buffer in root.gradient_buffers():
            buffer.discard_if_dropped()
        root.backward.has_sums = False


def mark_incomplete(root: Root) -> None:
    """Make ``.grad`` of units whose gradients are not shown refuse to be read: ``complete_gradients`` has raised.

    For example in a post-accumulate-grad hook of another parameter. ``mark_raised`` does the same for a backward.
    """
    for buffer in root.gradient_buffers():
        if buffer.binding.sum is not None:
            buffer.binding.mark_incomplete()
    root.backward.has_sums, root.backward.is_unfinished = True, False
