"""Waiting for a gloo collective in such a way that the wait can be given up."""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["BoundedWaiter"]


class _Request:
    def __init__(self, work: dist.Work) -> None:
        self.work = work
        self.done = threading.Event()
        self.error: RuntimeError | None = None


class BoundedWaiter:
    """Waits for collectives and lets its user look around from time to time.

    Gloo's handles take a timeout, but those of its reduce-scatter, which is an all-reduce and a copy, ignore it and
    know no other way to ask. These are waited for on a thread.

    Args:
        poll_s: seconds between two looks.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._poll = datetime.timedelta(seconds=poll_s)
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, work: dist.Work, look: Callable[[], None]) -> None:
        """Wait for the collective.

        Args:
            look: called every ``poll_s`` seconds of waiting; an exception ends the wait.
        Raises:
            RuntimeError: the collective failed.
        """
        if _takes_timeout(work):
            self._wait_here(work, look)
        else:
            self._wait_on_thread(work, look)

    def close(self) -> None:
        """End the thread, unless it is stuck; no further ``wait``."""
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(self._poll_s)

    def _wait_here(self, work: dist.Work, look: Callable[[], None]) -> None:
        while True:
            try:
                work.wait(self._poll)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            look()

    def _wait_on_thread(self, work: dist.Work, look: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon: a collective that never ends must not keep the process.
            self._thread = threading.Thread(target=self._serve, name="megatron_fsdp waiter", daemon=True)
            self._thread.start()
        request = _Request(work)
        self._requests.put(request)
        while not request.done.wait(self._poll_s):
            look()
        if request.error is not None:
            raise request.error

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                request.work.wait()
            except RuntimeError as error:
                request.error = error
            request.done.set()


def _takes_timeout(work: dist.Work) -> bool:
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True
