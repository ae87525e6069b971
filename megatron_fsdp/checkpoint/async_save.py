"""Background saves: one at a time; an error is raised by ``wait`` or by the next save or load."""

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
    """A save in progress or finished.

    Attributes:
        path: the folder; it exists and is complete once ``wait`` has returned.

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
        """True if the save has ended, with or without success."""
        return self._result.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is on disk under its name, and return its path.

        Args:
            timeout: in seconds; None: no limit.
        Raises:
            CheckpointError: the save failed; raised on every rank.
            TimeoutError: the save is still in progress after ``timeout``.
        """
        try:
            error = self._result.exception(timeout)
        except FutureTimeoutError:
            # In Python 3.10 this is not the builtin TimeoutError.
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


# The save in progress, with the job's process group at its start. If that group was destroyed, the save failed for that
# reason, and a job with another group need not be told.
_pending: list[tuple[SaveHandle, dist.ProcessGroup | None]] = []


def run_save(path: Path, work: Callable[[], None], *, in_background: bool) -> SaveHandle:
    """Run ``work`` here, or in a thread that Python waits for at exit."""
    handle = SaveHandle(path)
    if in_background:
        _pending[:] = [(handle, _world())]
        threading.Thread(target=handle._run, args=(work,), name=f"save {path.name}").start()
    else:
        work()
        handle._result.set_result(None)
    return handle


def finish_pending_save() -> None:
    """Wait for the save in progress, if there is one.

    Raises:
        CheckpointError: it failed, and the user has not called ``wait``.
    """
    while _pending:
        handle, world = _pending.pop()
        handle._result.exception()
        if not handle._is_asked and world is _world():
            handle.wait()


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
