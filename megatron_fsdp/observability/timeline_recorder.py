"""The recorder of a timeline: puts together what the hooks of an open ``Timeline`` see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

from dbuffer import CollectiveCall
from megatron_fsdp.observability.timeline_clock import Clock
from megatron_fsdp.observability.timeline_record import COMPUTE, GATHER, RECORDING, REDUCE, WAITS, Span
from megatron_fsdp.runtime.lanes import Ticket
from megatron_fsdp.runtime.parameter_group import ParameterGroup
from megatron_fsdp.runtime.unit import Unit

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
        # The units' names, by the identity of whatever the engine tells of.
        self._names: dict[int, str] = {}
        self._num_backwards: dict[int, int] = {}
        self._tickets: dict[int, _Bar] = {}
        # Whose collectives are being issued: on a lane, or one after the other while compute waits.
        self._submission: AbstractContextManager[Any] = contextlib.nullcontext()
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

    # ------------------------------------------------------------------ what the engine tells

    def follow(self, unit: Unit) -> None:
        """Record what becomes of a unit."""
        self._names |= {id(each): unit.name for each in (unit, *unit.groups, *unit.gradients)}

    def hear(self, action: str, subject: Any) -> None:
        """Take notice of an event of the engine (``dbuffer.events``)."""
        if action in _OF_TICKETS:
            if subject.owner in self._names:
                _OF_TICKETS[action](self, subject)
        elif action == "enter":
            self._enter(subject.unit)
        elif action == "collective":
            self._issued(subject)
        elif action == "finish":
            self._backward = []
            self._resume()
        elif action == "backward":
            self._num_backwards[id(subject)] = self._num_backwards.get(id(subject), 0) + 1
        elif id(subject) in self._names and action in _OF_UNITS:
            _OF_UNITS[action](self, subject)

    @property
    def num_steps(self) -> int:
        """How many accumulations ended, of the model's root that had most."""
        return max(self._num_backwards.values(), default=0)

    def _enter(self, unit: Unit) -> None:
        """Backward reaches an output of a unit: what it left are the units that do not lie around this one."""
        if id(unit) in self._names:
            around = [other for other in self._backward if other is not unit and _lies_around(other, unit)]
            self._backward = [*around, unit]
            self._resume()

    def _closed(self, unit: Unit) -> None:
        """Gradients of a unit are complete: backward goes on in what lies around it."""
        if unit in self._backward:
            self._backward.remove(unit)
            self._resume()

    # ------------------------------------------------------------------ communication on lanes

    def _issue(self, ticket: Ticket) -> None:
        bar = self._begin(ticket.lane, ticket.lane, self._names[ticket.owner], self._clock.mark())
        self._tickets[id(ticket)] = self._submitted = bar
        self._submission = _range(f"{bar.lane} {bar.unit}")
        self._submission.__enter__()

    def _has_issued(self, ticket: Ticket) -> None:
        if self._submitted is not None:
            self._submission.__exit__(None, None, None)
            if ticket.works:
                self._clock.follow(ticket.works, self._submitted.end)
            self._submitted = None

    def _landed(self, ticket: Ticket) -> None:
        """What follows the collectives comes now: on the lane's stream, or on the host when it has waited for them."""
        bar = self._tickets.get(id(ticket))
        if bar is not None:
            if not self._clock.is_device:
                self.has_waited(bar)
            elif not self._is_over:
                bar.end(self._clock.mark())

    def _wait(self, ticket: Ticket) -> None:
        bar = self._tickets.get(id(ticket))
        if bar is not None:
            self.wait(bar)

    def _waited(self, ticket: Ticket) -> None:
        bar = self._tickets.pop(id(ticket), None)
        if bar is not None:
            self.has_waited(bar)

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

    # ------------------------------------------------------------------ communication that compute waits for at once

    def _block(self, group: ParameterGroup, lane: str) -> None:
        """Compute waits for collectives that are issued from here on, from the first one to ``_unblock``."""
        self._blocking = lane, self._names[id(group)]

    def _unblock(self) -> None:
        self._blocking = None
        if self._blocking_bar is not None:
            self._resume()
            self._blocking_bar.end(self._clock.mark())
            self._blocking_bar = None

    def _issued(self, call: CollectiveCall) -> None:
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


_OF_TICKETS = {
    "issue": Recorder._issue,
    "issued": Recorder._has_issued,
    "landed": Recorder._landed,
    "wait": Recorder._wait,
    "waited": Recorder._waited,
}
_OF_UNITS: dict[str, Callable[[Recorder, Any], None]] = {
    "closed": Recorder._closed,
    "refresh": lambda recorder, group: recorder._block(group, GATHER),
    "refreshed": lambda recorder, _: recorder._unblock(),
    "final": lambda recorder, group: recorder._block(group, REDUCE),
    "completed": lambda recorder, _: recorder._unblock(),
}


def _lies_around(outer: Unit, inner: Unit) -> bool:
    return any(reference() is inner for reference in outer.inner)


def _range(name: str) -> AbstractContextManager[Any]:
    """Return a range for a profiler's trace; without a profiler it costs nothing, where PyTorch's takes 10 us."""
    return record_function(name) if profiler._is_profiler_enabled else contextlib.nullcontext()
