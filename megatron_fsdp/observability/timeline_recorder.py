"""The recorder of a timeline: puts together what the hooks of an open ``Timeline`` see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.autograd import profiler
from torch.profiler import record_function

from dbuffer import CollectiveCall
from megatron_fsdp.observability.timeline_clock import Clock
from megatron_fsdp.observability.timeline_record import COMPUTE, RECORDING, WAITS, Span
from megatron_fsdp.runtime.lanes import Operation, Ticket
from megatron_fsdp.runtime.unit import Call, Unit

__all__ = ["Recorder"]


class _Bar:
    """A span under way; its times are marks of the clock.

    Attributes:
        waited_until: the end of the wait for it, on CPU; a thread that looks for its end may see that a little later.
    """

    __slots__ = ("action", "lane", "num_bytes", "start", "stop", "unit", "waited_until")

    def __init__(self, lane: str, action: str, unit: str, start: Any) -> None:
        self.lane, self.action, self.unit = lane, action, unit
        self.start = start
        self.stop: Any = None
        self.waited_until: Any = None
        self.num_bytes = 0

    def end(self, mark: Any) -> None:
        """Note when it was over, once."""
        if self.stop is None:
            self.stop = mark


class Recorder:
    """Puts together what the hooks see.

    Compute is what is on top: a forward under way (or an optimizer's step), else the unit that backward is in.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._whole = _range(RECORDING)
        self._start = self._stop = clock.mark()
        self._bars: list[_Bar] = []
        self._segment: _Bar | None = None
        self._range: AbstractContextManager[Any] | None = None
        self._calls: list[tuple[str, str]] = []
        self._backward: list[Unit] = []
        # Whose collectives are being issued: on a lane, or one after the other while compute waits.
        self._owner: Unit | None = None
        self._submitted: _Bar | None = None
        self._blocking: tuple[str, str] | None = None
        self._blocking_bar: _Bar | None = None
        self._is_over = False

    def begin(self) -> None:
        """Begin to record, and with it the range that tells in a profiler's trace where the record's time begins."""
        self._whole.__enter__()
        self._start = self._clock.mark()

    # ------------------------------------------------------------------ compute

    def push(self, action: str, unit: str) -> None:
        """Compute does something else from here until ``pop``."""
        self._calls.append((action, unit))
        self._resume()

    def pop(self) -> None:
        """Compute goes on with what it did before ``push``."""
        if self._calls:
            self._calls.pop()
        self._resume()

    def _resume(self) -> None:
        if self._calls:
            self._switch(*self._calls[-1])
        elif self._backward:
            self._switch("backward", self._backward[-1].name)
        else:
            self._switch()

    def _switch(self, action: str | None = None, unit: str = "") -> Any:
        mark = self._clock.mark()
        if self._segment is not None and self._range is not None:
            self._segment.end(mark)
            self._range.__exit__(None, None, None)
        self._segment = self._range = None
        if action is not None and not self._is_over:
            self._segment = self._begin(COMPUTE, action, unit, mark)
            self._range = _range(f"{action} {unit}".rstrip())
            self._range.__enter__()
        return mark

    def _begin(self, lane: str, action: str, unit: str, mark: Any) -> _Bar:
        bar = _Bar(lane, action, unit, mark)
        self._bars.append(bar)
        return bar

    # ------------------------------------------------------------------ backward

    def entering(self, method: Callable[..., Any], call: Call) -> Any:
        """Backward reaches an output of a unit: what it left are the units that do not lie around this one."""
        unit = call.unit
        around = [other for other in self._backward if other is not unit and _lies_around(other, unit)]
        self._backward = [*around, unit]
        self._resume()
        return method(call)

    def closing(self, unit: Unit) -> Callable[..., Any]:
        """Gradients of a unit are complete: backward goes on in what lies around it."""

        def close(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
            with self._owned_by(unit):
                result = method(*args, **options)
            if unit in self._backward:
                self._backward.remove(unit)
                self._resume()
            return result

        return close

    def finishing(self, method: Callable[..., Any]) -> Any:
        """Backward is done, but for the reductions."""
        self._backward = []
        self._resume()
        return method()

    # ------------------------------------------------------------------ communication

    def owning(self, unit: Unit) -> Callable[..., Any]:
        """What is submitted inside is the unit's."""

        def call(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
            with self._owned_by(unit):
                return method(*args, **options)

        return call

    @contextlib.contextmanager
    def _owned_by(self, unit: Unit) -> Iterator[None]:
        outer, self._owner = self._owner, unit
        try:
            yield
        finally:
            self._owner = outer

    def submitting(self, name: str) -> Callable[..., Any]:
        """Record what is submitted to the lane of that name, and the waits for it."""

        def submit(
            method: Callable[..., Ticket],
            operation: Operation,
            then: Callable[[], None] | None = None,
            on_host: Callable[[], None] | None = None,
        ) -> Ticket:
            if self._owner is None:
                return method(operation, then, on_host)
            bar = _Bar(name, name, self._owner.name, None)
            with _range(f"{name} {bar.unit}"):
                ticket = method(self._timed(operation, bar), self._after(bar, then), on_host)
            return _TimedTicket(ticket, self, bar)

        return submit

    def _timed(self, operation: Operation, bar: _Bar) -> Operation:
        def run(works: list[dist.Work] | None) -> None:
            bar.start = self._clock.mark()
            self._bars.append(bar)
            self._submitted = bar
            try:
                operation(works)
            finally:
                self._submitted = None
            if works is not None:
                self._clock.follow(works, bar.end)

        return run

    def _after(self, bar: _Bar, then: Callable[[], None] | None) -> Callable[[], None]:
        """Return what follows the collectives: on the lane's stream, or on the host when it has waited for them."""

        def run() -> None:
            if not self._clock.is_device:
                self.has_waited(bar)
            elif not self._is_over:
                bar.end(self._clock.mark())
            if then is not None:
                then()

        return run

    def wait(self, bar: _Bar) -> None:
        """Compute waits for what a bar stands for."""
        self._switch(WAITS[bar.lane], bar.unit)

    def has_waited(self, bar: _Bar) -> None:
        """Compute goes on. On CPU, where it waited, what follows the collective is compute."""
        waiting = self._segment
        if waiting is not None and waiting.action == WAITS[bar.lane]:
            self._resume()
            if not self._clock.is_device:
                bar.waited_until = waiting.stop

    def blocking(self, unit: Unit, name: str) -> Callable[..., Any]:
        """Compute waits for collectives that are issued inside, from the first one to the end."""

        def call(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
            outer, self._blocking = self._blocking, (name, unit.name)
            try:
                return method(*args, **options)
            finally:
                self._blocking = outer
                if self._blocking_bar is not None:
                    self._resume()
                    self._blocking_bar.end(self._clock.mark())
                    self._blocking_bar = None

        return call

    def issued(self, call: CollectiveCall) -> None:
        """A collective is about to be issued."""
        if self._submitted is not None:
            self._submitted.num_bytes += call.num_bytes
        elif self._blocking is not None:
            name, unit = self._blocking
            mark = self._switch(WAITS[name], unit)
            if self._blocking_bar is not None:
                self._blocking_bar.end(mark)
            self._blocking_bar = self._begin(name, name, unit, mark)
            self._blocking_bar.num_bytes = call.num_bytes

    # ------------------------------------------------------------------ end

    def end(self) -> None:
        """End the recording; tickets may be waited for when nobody records any more."""
        self._stop = self._switch()
        self._is_over = True
        self._whole.__exit__(None, None, None)

    def spans(self) -> tuple[float, tuple[Span, ...]]:
        """Return how long the recording lasted, in seconds, and its spans; what was under way ends with it."""
        clock, self._is_over = self._clock, True
        clock.finish()
        start = clock.seconds(self._start)
        seconds = clock.seconds(self._stop) - start
        spans = []
        for bar in self._bars:
            first = clock.seconds(bar.start) - start
            stops = [clock.seconds(mark) - start for mark in (bar.stop, bar.waited_until) if mark is not None]
            last = min([seconds, *stops])
            spans.append(Span(bar.lane, bar.action, bar.unit, first, max(first, last), bar.num_bytes))
        self._bars = []
        return seconds, tuple(sorted(spans, key=lambda span: span.start))


class _TimedTicket:
    """A ticket whose first wait is recorded."""

    __slots__ = ("_bar", "_recorder", "_ticket")

    def __init__(self, ticket: Ticket, recorder: Recorder, bar: _Bar) -> None:
        self._ticket = ticket
        self._recorder: Recorder | None = recorder
        self._bar = bar

    def wait(self) -> None:
        """Wait as the ticket does."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            self._ticket.wait()
            return
        recorder.wait(self._bar)
        self._ticket.wait()
        recorder.has_waited(self._bar)


def _lies_around(outer: Unit, inner: Unit) -> bool:
    return any(reference() is inner for reference in outer.inner)


def _range(name: str) -> AbstractContextManager[Any]:
    """Return a range for a profiler's trace; without a profiler it costs nothing, where PyTorch's takes 10 us."""
    return record_function(name) if profiler._is_profiler_enabled else contextlib.nullcontext()
