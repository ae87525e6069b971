"""A thread that issues collectives on CPU tensors, so that what c10d keeps of each lies in a heap of its own.

PyTorch's flight recorder keeps small blocks of the last 2,000 collectives. Made by the thread that trains, they lie
between its activations, no two of which can become one free block again, and the process grows by megabytes a step
(docs/design/storage.md, "Memory on CPU"). glibc gives each thread an arena; elsewhere it does no harm.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import profiler


@dataclass(slots=True)
class _Order:
    """A call to make, and what became of it."""

    call: Callable[[], Any] | None
    in_inference_mode: bool
    result: Any = None
    error: BaseException | None = None
    # A queue of its own: an exception that interrupts the wait leaves nothing behind for the next order.
    done: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)


_threads: list[queue.SimpleQueue[_Order]] = []
_hiring = threading.Lock()
# Threads do not survive a fork.
os.register_at_fork(after_in_child=_threads.clear)


def issue(call: Callable[[], Any]) -> Any:
    """Let the comm thread make a call that does not block, and return what it returns or raise what it raises.

    Under a dispatch mode or a profiler, which see the thread alone that they were entered on, the call is made here.
    """
    if torch._C._len_torch_dispatch_stack() or profiler._is_profiler_enabled:
        return call()
    order = _Order(call, torch.is_inference_mode_enabled())
    _orders().put(order)
    order.done.get()
    result, error = order.result, order.error
    # The comm thread may hold the order a moment longer, and what it refers to with it.
    order.result = order.error = None
    if error is None:
        return result
    try:
        raise error
    finally:
        # It refers to this frame, which must not refer back to it: tensors are freed by no collector.
        del order, error


def _orders() -> queue.SimpleQueue[_Order]:
    if not _threads:
        with _hiring:
            if not _threads:
                orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
                threading.Thread(target=_serve, args=(orders,), name="dbuffer comm", daemon=True).start()
                _threads.append(orders)
    return _threads[0]


def _serve(orders: queue.SimpleQueue[_Order]) -> None:
    while True:
        _fill(orders.get())


def _fill(order: _Order) -> None:
    # Taken out: the tensors of a call are let go before the caller hears of it, not when this thread next runs.
    call, order.call = order.call, None
    assert call is not None
    try:
        # inference_mode(False) would turn gradients on.
        with torch.inference_mode() if order.in_inference_mode else torch.no_grad():
            order.result = call()
    except BaseException as error:
        order.error = error
    del call
    order.done.put(None)
