"""What the calling process and a worker say to each other, pickled: ready, task, outcome, release, clean, task, ...

Plain pickle and not ``Connection.send``: torch registers reductions with multiprocessing's pickler that pass tensors
as shared-memory handles, which die with the worker. Here a tensor travels by value.
"""

import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True)
class WarningFilter:
    """One entry of ``warnings.filters`` in the form that ``warnings.filterwarnings`` takes."""

    action: str
    message: str
    category: type[Warning]
    module: str
    lineno: int


@dataclass(frozen=True, slots=True)
class Call:
    """The function to run, pickled by reference, and the caller's warning filters for it to run under."""

    function: Callable[..., object]
    args: tuple[object, ...]
    filters: tuple[WarningFilter, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One rank's part of a call.

    Attributes:
        call: a pickled ``Call``; unpickled where the rank runs it, so that a test module that fails to import there
            is that rank's failure and not the worker's death.
        call_id: unique in the pool; keeps the keys of different calls apart in the store.
        timeout_s: seconds after which a collective of this call gives up.
    """

    call: bytes
    call_id: int
    world_size: int
    backend: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the function did on one rank: exactly one of ``value`` (pickled) and ``error`` (a traceback) is set.

    ``finished_at`` is on the clock that all processes of a machine share, so the earliest failure can be named first.
    """

    value: bytes | None
    error: str | None
    finished_at: float


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has imported torch and waits for its first task."""


@dataclass(frozen=True, slots=True)
class Release:
    """All ranks have reported: a rank may now close its connections without cutting off a peer."""


@dataclass(frozen=True, slots=True)
class Clean:
    """The worker is ready for the next task; complaints are exceptions that finalizers or threads swallowed."""

    complaints: tuple[str, ...]


def send(connection: Connection, message: object) -> None:
    """Send one message; raises OSError when the other side has gone."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> object:
    """Wait for one message and return it; raises EOFError or OSError when the other side has gone."""
    return pickle.loads(connection.recv_bytes())


def current_filters() -> tuple[WarningFilter, ...]:
    """Return this process's warning filters, the first match first."""
    return tuple(
        WarningFilter(action, _pattern(message), category, _pattern(module), lineno)
        for action, message, categories, module, lineno in warnings.filters
        for category in (categories if isinstance(categories, tuple) else (categories,))
    )


def apply_filters(filters: tuple[WarningFilter, ...]) -> None:
    """Replace this process's warning filters."""
    warnings.resetwarnings()
    for entry in reversed(filters):
        warnings.filterwarnings(
            entry.action,  # type: ignore[arg-type]  # a str here, a Literal of the same words there
            entry.message,
            entry.category,
            entry.module,
            entry.lineno,
        )


def _pattern(entry: str | re.Pattern[str] | None) -> str:
    """Return an entry's regular expression; the interpreter's built-in filters hold exact strings instead."""
    if entry is None:
        return ""
    return re.escape(entry) + r"\Z" if isinstance(entry, str) else entry.pattern
