"""Whereabouts: a rank that waits long writes where it waits into the job's store; other ranks quote it in errors.

Nothing here runs before a rank has waited for ``SOON``, so an undisturbed step never accesses the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import linecache
import os
import sys
import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from dbuffer.errors import MeshError

__all__ = [
    "ALARMS", "SOON", "is_from_backend", "job_store", "keep_groups", "others_stand", "place", "publish",
    "raise_difference", "reason_of", "refuse_after_difference", "wait_longer",
]  # fmt: skip

SOON = datetime.timedelta(seconds=2)
"""How long a rank waits before it writes to the store."""

ALARMS: set[str] = set()
"""Store keys under which a rank publishes a difference between ranks while other ranks may wait for it."""

# The difference found, keyed by the job's group: some ranks have issued collectives that other ranks never join.
_DIFFERENCES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *(_HERE + name + os.sep for name in ("dbuffer", "megatron_fsdp")),
)


def wait_longer(work: dist.Work, what: str = "weights or gradients of the engine") -> None:
    """Wait for a collective that failed, or did not complete within ``SOON``, and publish this rank's place meanwhile.

    Args:
        what: what the collective moves, for "waits for ...".
    Raises:
        RuntimeError: the collective failed.
        MeshError: another rank has published a difference between ranks.
    """
    is_late = not work.is_completed()
    if is_late:
        publish(f"waits for {what}, {place()}")
    while ALARMS and not work.is_completed():
        _look_at_alarms()
        with contextlib.suppress(RuntimeError):
            work.wait(SOON / 4)
    try:
        # Returns at once, or raises what failed, if the collective is complete.
        work.wait()
    except RuntimeError:
        _look_at_alarms()
        raise
    if is_late:
        publish("")


def raise_difference(words: str) -> NoReturn:
    """Raise that ranks issued different collectives, and record it for ``refuse_after_difference``."""
    _DIFFERENCES[dist.group.WORLD] = words
    keep_groups()
    raise MeshError(words)


def refuse_after_difference() -> None:
    """Raise if ranks of this job issued different collectives: the next one could pair with one still pending."""
    words = _DIFFERENCES.get(dist.group.WORLD)
    if words is not None:
        raise MeshError(
            f"the ranks of this job have issued different collectives, and one of them may still wait. fix: end this "
            f"process and start the job again. What was found: {words}"
        )


def keep_groups() -> None:
    """Keep the job's process groups from ever being destroyed.

    Python destroys them at exit. The destructor of a gloo group then waits, up to the group's timeout, for collectives
    that other ranks never join.
    """
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _look_at_alarms() -> None:
    store = job_store()
    for key in [] if store is None else list(ALARMS):
        # The store may be gone together with the rank that hosts it.
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check([key]):
                ALARMS.discard(key)
                raise_difference(store.get(key).decode())


def others_stand(ranks: Iterable[int]) -> str:
    """Return a clause for each other rank: the wait that it published, or that it published nothing."""
    known = {rank: _heard(rank) for rank in ranks if rank != dist.get_rank()}
    clauses = [f"rank {rank} {text}" for rank, text in known.items() if text]
    silent = [str(rank) for rank, text in known.items() if not text]
    if silent:
        which = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent[:8])}{' and more' if len(silent) > 8 else ''}"
        clauses.append(f"{which} went on, {'are' if len(silent) > 1 else 'is'} in a collective of the script's own "
                       "(a barrier, an all-reduce of a metric), or ended")  # fmt: skip
    return "; ".join(clauses)


# Gloo's message for collectives that were pending when another collective of the communicator timed out.
_CLOSED = "Application timeout caused pair closure"


def is_from_backend(error: BaseException) -> bool:
    """Return whether gloo or NCCL raised this because a collective failed or timed out."""
    text = str(error)
    return "gloo" in text or _CLOSED in text or type(error).__name__.startswith("Dist")


def reason_of(error: BaseException, timeout: datetime.timedelta | None) -> str:
    """Return why a collective failed, in the user's terms instead of gloo's."""
    text = str(error)
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "the process of another rank ended"
    if "Timed out" in text or "timed out" in text or _CLOSED in text:
        within = "" if timeout is None else f" within {timeout.total_seconds():.0f} s, the timeout of the job"
        return f"another rank did not take part{within}"
    return text.strip().partition("\n")[0].rstrip(".")


def place() -> str:
    """Return the innermost source line on the call stack that is outside PyTorch and this project."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen")):
        frame = frame.f_back
    name, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(name, line).strip()
    return f"at {os.path.basename(name)}:{line}" + (f" ({source[:120]})" if source else "")


def job_store() -> Store | None:
    """Return the job's store; None where one process simulates all ranks, because no other rank would answer."""
    store: Store = dist.distributed_c10d._get_default_store()
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    backends = {name.rpartition(":")[2] for name in dist.get_backend().split(",")}
    # A HashStore is memory of this process; other ranks see it only if they are threads of it.
    is_own = isinstance(inner, HashStore) and backends != {"threaded"}
    # A ``FakeStore`` keeps nothing; before PyTorch 2.15 one that only the process group holds is a bare ``Store``.
    is_fake = inner is None or type(inner) is Store or type(inner).__name__ == "FakeStore" or backends == {"fake"}
    return None if is_own or is_fake else store


def _key(rank: int) -> str:
    # The key has the attempt, because torchrun keeps its store when it restarts the ranks.
    return f"dbuffer whereabouts attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {rank}"


def publish(text: str) -> None:
    """Write into the job's store what this rank does, for the errors of other ranks; "" takes it back."""
    with contextlib.suppress(RuntimeError, ValueError):
        store = job_store()
        if store is not None:
            store.set(_key(dist.get_rank()), text)


def _heard(rank: int) -> str:
    with contextlib.suppress(RuntimeError, ValueError):
        store = job_store()
        if store is not None and store.check([_key(rank)]):
            return store.get(_key(rank)).decode()
    return ""
