"""Clocks of a timeline: the host's on CPU, timing events on the streams of a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Clock", "DeviceClock", "HostClock", "clock_for"]

# How exactly the end of a collective on CPU is known that nobody waits for.
_POLL_S = 3e-4


class Clock(Protocol):
    """Marks points in time, to be read when the recording is over.

    Attributes:
        is_device: whether marks lie on the current stream rather than on the host's time.
    """

    is_device: bool

    def mark(self) -> Any:
        """Mark now: when the current stream reaches this point, or the host's time."""

    def follow(self, works: Sequence[dist.Work], done: Callable[[Any], None]) -> None:
        """Call ``done`` with a mark, on some thread, when collectives on CPU tensors are over."""

    def finish(self) -> None:
        """End the recording. Waits for the device, and for nothing else."""

    def seconds(self, mark: Any) -> float:
        """Return the seconds from the clock's start to a mark; after ``finish``."""


def clock_for(device: torch.device) -> Clock:
    """Return the clock for compute on a device, started."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """The host's clock, and a thread that looks when collectives end."""

    is_device = False

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._pending: list[tuple[list[dist.Work], Callable[[Any], None]]] = []
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="megatron_fsdp timeline", daemon=True)
        self._thread.start()

    def mark(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def follow(self, works: Sequence[dist.Work], done: Callable[[Any], None]) -> None:
        """Call ``done`` with the time at which all of them were seen to be over."""
        with self._changed:
            self._pending.append((list(works), done))
            self._changed.notify()

    def finish(self) -> None:
        """End the thread; what is not over by now is no longer looked for."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    def seconds(self, mark: float) -> float:
        """Return the seconds since the clock was made."""
        return mark - self._start

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._is_stopped:
                    self._changed.wait()
                if self._is_stopped:
                    return
                now = time.perf_counter()
                left = []
                for works, done in self._pending:
                    if all(work.is_completed() for work in works):
                        done(now)
                    else:
                        left.append((works, done))
                self._pending = left
                self._changed.wait(_POLL_S)


class DeviceClock:
    """Timing events on whatever stream is current; nothing orders after them, and the host waits for them at the end.

    Only lanes.py orders streams. These events are read, never waited for by a stream.
    """

    is_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._start = self.mark()

    def mark(self) -> Any:
        """Return an event that the current stream records when it gets here."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def follow(self, works: Sequence[dist.Work], done: Callable[[Any], None]) -> None:
        """Do nothing: the end of a collective is marked on its own stream."""

    def finish(self) -> None:
        """Wait until the device has reached all marks."""
        self._module.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        """Return the seconds between the two events, which CUDA knows to about half a microsecond."""
        return float(self._start.elapsed_time(mark)) / 1e3
