"""The pickled messages between the calling process and a worker: ready, task, outcome, release, clean, task, ...

Plain pickle and not ``Connection.send``: torch registers reductions with multiprocessing's pickler that pass tensors
as shared-memory handles, which die with the worker. Here a tensor travels by value.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """The function to run, pickled by reference, and the caller's ``warnings.filters`` for it to run under."""

    function: Callable[..., object]
    args: tuple[object, ...]
    filters: list[Any]


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
    """The outcome of the function on one rank: exactly one of ``value`` (pickled) and ``error`` (a traceback) is set.

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
    """Tell a rank that all ranks have reported, so that it may close its connections."""


@dataclass(frozen=True, slots=True)
class Clean:
    """The worker is ready for the next task.

    Attributes:
        complaints: exceptions that finalizers or threads swallowed.
        num_groups_left: process groups of the call that live on; the threads of each wake up a hundred times a second.
    """

    complaints: tuple[str, ...]
    num_groups_left: int


def send(connection: Connection, message: object) -> None:
    """Send one message; raises OSError when the other side has gone."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> object:
    """Wait for one message and return it; raises EOFError or OSError when the other side has gone."""
    return pickle.loads(connection.recv_bytes())
