"""SIGTERM, or the end of the time, as a request: the step under way is finished and saved, on all ranks alike."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dbuffer.gloo import wait_for


class StopSignal:
    """Notes SIGTERM while its context is open; a second one ends the process at once, as without it.

    torchrun sends SIGTERM to all ranks when it is stopped itself, and to the others when one rank has failed; cluster
    schedulers send it before they take a machine away.
    """

    def __init__(self, minutes: float | None = None) -> None:
        """Start the time; after ``minutes`` of it (None: never) the run is to stop as if the signal had come."""
        self._is_received = False
        self._is_time_up = False
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._previous: Any = signal.SIG_DFL
        # A flag on the host must not wait for the GPU, so it has a gloo group of its own.
        has_others = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
        self._group = dist.new_group(backend="gloo", group_desc="stop signal") if has_others else None

    @property
    def is_received(self) -> bool:
        """Whether this rank, or at the last look any rank, got the signal."""
        return self._is_received

    @property
    def is_time_up(self) -> bool:
        """Whether, at the last look, the time was up on any rank."""
        return self._is_time_up

    def is_received_anywhere(self) -> bool:
        """Return whether any rank got the signal so far, or its time is up; all ranks call it and get one answer."""
        self._is_time_up = self._deadline is not None and time.monotonic() >= self._deadline
        if self._group is not None:
            # Clocks differ between ranks: without agreement some would go on alone into the next step.
            flags = torch.tensor([self._is_received, self._is_time_up], dtype=torch.int32)
            wait_for(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
            self._is_received, self._is_time_up = (bool(flag) for flag in flags.tolist())
        return self._is_received or self._is_time_up

    def __enter__(self) -> StopSignal:
        self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._is_received = True
        signal.signal(signal.SIGTERM, self._previous)
