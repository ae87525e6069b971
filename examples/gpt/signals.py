"""SIGTERM, Ctrl-C or the end of the time as a request: the step under way is finished and saved, on all ranks alike."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.collectives import wait_for

_STDERR = 2
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class StopSignal:
    """Notes SIGTERM and SIGINT (Ctrl-C) while its context is open; a second one of a kind does what it does without.

    torchrun sends SIGTERM to all ranks when it is stopped itself, and to the others when one rank has failed; cluster
    schedulers send it before they take a machine away. Ctrl-C reaches torchrun alone, which sends it on.
    """

    def __init__(self, minutes: float | None = None, *, on_interrupt: str = "") -> None:
        """Start the time; after ``minutes`` of it (None: never) the run is to stop as if a signal had come.

        Args:
            on_interrupt: what to say on stderr when Ctrl-C comes, as the step under way may take its time.
        """
        self._received = 0
        self._is_time_up = False
        self._on_interrupt = on_interrupt
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._previous: dict[int, Any] = {}
        # A flag on the host must not wait for the GPU, so it has a gloo group of its own.
        has_others = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
        self._group = dist.new_group(backend="gloo", group_desc="stop signal") if has_others else None

    @property
    def received(self) -> str:
        """The name of the signal that this rank, or at the last look any rank, got; empty for none."""
        return _NAMES[signal.Signals(self._received)] if self._received else ""

    @property
    def is_time_up(self) -> bool:
        """Whether, at the last look, the time was up on any rank."""
        return self._is_time_up

    def is_received_anywhere(self) -> bool:
        """Return whether any rank got the signal so far, or its time is up; all ranks call it and get one answer."""
        self._is_time_up = self._deadline is not None and time.monotonic() >= self._deadline
        if self._group is not None:
            # Clocks differ between ranks: without agreement some would go on alone into the next step.
            flags = torch.tensor([self._received, self._is_time_up], dtype=torch.int32)
            wait_for(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
            self._received, self._is_time_up = int(flags[0]), bool(flags[1])
        return self._received > 0 or self._is_time_up

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._receive) for number in _NAMES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, self._previous[number])
        if number == signal.SIGINT and self._on_interrupt:
            # Past Python's buffer, which may be in use by what the signal has interrupted.
            os.write(_STDERR, f"\n{self._on_interrupt}\n".encode())
