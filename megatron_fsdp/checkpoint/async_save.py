"""Saves that go on while training does: one at a time, with errors that do not get lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import torch.distributed as dist

__all__ = ["SaveHandle", "finish_pending_save", "run_save"]

_log = logging.getLogger(__name__)


class SaveHandle:
    """A save that is under way or over.

    Attributes:
        path: the folder, which is there and whole when ``wait`` has returned.

    Example:
        handle = save_checkpoint(model, optimizer, "runs/step_0000100", asynchronous=True)
        model(batch).square().mean().backward()  # training goes on
        handle.wait()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._result: Future[None] = Future()
        self._is_asked = False

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._result.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is on the disk under its name, and return that.

        Args:
            timeout: in seconds; None waits as long as it takes.
        Raises:
            CheckpointError: it could not be written; on every rank alike.
            TimeoutError: it is still under way after ``timeout``.
        """
        try:
            error = self._result.exception(timeout)
        except FutureTimeoutError:
            # Python 3.10 raises a class of its own here.
            raise TimeoutError(f"the save of {self.path} is still under way after {timeout} s") from None
        self._is_asked = True
        if error is not None:
            raise error
        return self.path

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            _log.error("the asynchronous save of %s failed: %s", self.path, error)
            self._result.set_exception(error)
        else:
            self._result.set_result(None)


# The save under way, with the process group of its time: one that failed because its group was destroyed under it
# concerns nobody who works in another.
_pending: list[tuple[SaveHandle, dist.ProcessGroup | None]] = []


def run_save(path: Path, work: Callable[[], None], *, in_background: bool) -> SaveHandle:
    """Run ``work`` here, or in a thread that the interpreter's end waits for."""
    handle = SaveHandle(path)
    if in_background:
        _pending[:] = [(handle, _world())]
        threading.Thread(target=handle._run, args=(work,), name=f"save {path.name}").start()
    else:
        work()
        handle._result.set_result(None)
    return handle


def finish_pending_save() -> None:
    """Wait for the save that is under way, if there is one.

    Raises:
        CheckpointError: it failed, and nobody has called ``wait`` to hear of it.
    """
    while _pending:
        handle, world = _pending.pop()
        handle._result.exception()
        if not handle._is_asked and world is _world():
            handle.wait()


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
