"""Meeting: ranks say in the job's store what they are about to do, and go on when all of them do the same.

No collective: a collective that one rank never joins can be neither ended nor taken back, and making a communicator for
it may be the very thing that hangs. In the store the others learn within a second why somebody does not come
(docs/design/watch.md).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from dbuffer import MeshError
from dbuffer.collectives import wait_for
from dbuffer.mesh import job_timeout
from megatron_fsdp.errors import AgreementError
from megatron_fsdp.verdict import rank_list

__all__ = ["Statement", "excuse", "meet"]

# How many meetings of just these ranks there were, by the job's process group. The next one is known by that number.
_NUM_HELD: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
_LOOK_S = 1.0
# For the ranks to say what they differ in. They are all there.
_GRACE_S = 10.0
_NO_TIMEOUT = datetime.timedelta(0)
_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Statement:
    """What a rank is about to do.

    Attributes:
        action: a verb phrase that follows "rank 3": "calls fully_shard on unit 'Block'".
        lines: details that have to be the same on all ranks, one fact each.
        complaint, advice: how a message about different details begins and ends.
    """

    action: str
    lines: tuple[str, ...] = ()
    complaint: str = ""
    advice: str = ""

    @property
    def digest(self) -> str:
        """The same for the same action and details."""
        return hashlib.sha256("\n".join((self.action, *self.lines)).encode()).hexdigest()[:32]


def meet(ranks: Sequence[int], statement: Statement) -> int:
    """Wait until all of ``ranks`` have come with the same statement; a few requests to the store each.

    Returns:
        The number of this meeting among those of the same ranks; 0 where nobody else can come.
    Raises:
        MeshError: on all of them, when any two statements differ.
        AgreementError: a rank was excused, or did not come before the job's timeout (or a watch's).
    """
    room = _Room.enter(ranks)
    if room is None:
        return 0
    first_rank, first_digest = room.get_or_set("first", f"{room.rank} {statement.digest}").split()
    if first_digest != statement.digest:
        room.get_or_set("verdict", f"differ {first_rank} {room.rank}")
    elif room.store.add(room.key("here"), 1) == len(room.ranks):
        room.get_or_set("verdict", "agreed")
    try:
        wait_for(_Arrival(room, statement))
    except BaseException as error:
        room.close(statement.action, error)
        raise
    verdict, _, rest = room.get("verdict").partition(" ")
    if verdict == "gone":
        raise AgreementError(f"rank {room.rank} {statement.action}, but {rest}")
    if verdict == "differ":
        raise MeshError(_difference(room, statement, sorted(int(rank) for rank in rest.split())))
    return room.number


def excuse(ranks: Sequence[int], action: str, error: BaseException) -> None:
    """Tell the others that this rank does not come to their next meeting, and why: they raise instead of waiting."""
    room = _Room.enter(ranks)
    if room is not None:
        room.close(action, error)


class _Room:
    """One meeting, as this rank sees it."""

    def __init__(self, store: Store, ranks: tuple[int, ...], number: int) -> None:
        self.store = store
        self.ranks = ranks
        self.number = number
        self.rank: int = dist.get_rank()
        listed = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
        self._prefix = f"megatron_fsdp meeting {listed} {number}/"

    @classmethod
    def enter(cls, ranks: Iterable[int]) -> _Room | None:
        """Return the next meeting of some ranks; None where this process is the only one, or stands for all."""
        ranks = tuple(sorted(ranks))
        if len(ranks) < 2 or not dist.is_initialized() or dist.get_rank() not in ranks:
            return None
        store = _store()
        if store is None:
            return None
        world: Any = dist.group.WORLD
        held = _NUM_HELD.setdefault(world, Counter())
        held[ranks] += 1
        return cls(store, ranks, held[ranks])

    def key(self, name: str) -> str:
        return self._prefix + name

    def get_or_set(self, name: str, value: str) -> str:
        """Return what was written first under a name: this value if nothing was."""
        return str(self.store.compare_set(self.key(name), "", value).decode())

    def close(self, action: str, error: BaseException) -> None:
        """Let everybody who is here, or comes later, know that this rank has given up."""
        # Where the store is out of reach, the error itself is all there is.
        with contextlib.suppress(RuntimeError):
            self.get_or_set("verdict", f"gone rank {self.rank}, which {action}, raised {type(error).__name__}: {error}")

    def get(self, name: str) -> str:
        return str(self.store.get(self.key(name)).decode())

    def is_set(self, name: str, timeout_s: float) -> bool:
        """Wait for something to be written under a name; tell whether it was."""
        try:
            self.store.wait([self.key(name)], datetime.timedelta(seconds=max(timeout_s, 0.001)))
        except dist.DistStoreError:
            return False
        return True


def _store() -> Store | None:
    """Return the job's store; None where one process stands for all ranks, so that nobody else would come."""
    store: Store = dist.distributed_c10d._get_default_store()
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    backend = dist.get_backend()
    # A HashStore is memory of this process. Threads as ranks share one.
    is_own = isinstance(inner, HashStore) and backend != "threaded"
    return None if inner is None or is_own or backend == "fake" else store


class _Arrival(dist.Work):
    """The wait for the others, in a form that a ``Watch`` can wait for too."""

    def __init__(self, room: _Room, statement: Statement) -> None:
        super().__init__()
        self._room = room
        self._statement = statement
        self._is_listed = False

    def is_completed(self) -> bool:
        """Whether there is a verdict."""
        return bool(self._room.store.check([self._room.key("verdict")]))

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the verdict; after the job's timeout, make one.

        Raises:
            RuntimeError: there is none within ``timeout``.
        """
        limit = timeout or job_timeout() or _DEFAULT_TIMEOUT
        deadline = time.monotonic() + limit.total_seconds()
        while not self._room.is_set("verdict", min(_LOOK_S, deadline - time.monotonic())):
            if not self._is_listed:
                self._room.store.set(self._room.key(f"waits {self._room.rank}"), "")
                self._is_listed = True
            if time.monotonic() < deadline:
                continue
            if timeout:
                raise RuntimeError("some ranks have not come yet")
            self._room.get_or_set("verdict", f"gone {self._absence(limit)}")
        return True

    def _absence(self, limit: datetime.timedelta) -> str:
        room = self._room
        missing = [rank for rank in room.ranks if not room.store.check([room.key(f"waits {rank}")])]
        return (
            f"{rank_list(missing)} did not within {limit.total_seconds():.0f} s. Every rank of the mesh "
            f"({rank_list(room.ranks)}) has to; look there for another number of units, for work that only one rank "
            "does, or for a process that ended"
        )


_NUM_SHOWN = 3


def _difference(room: _Room, statement: Statement, witnesses: Sequence[int]) -> str:
    """Return what is not the same on two ranks, in the words of both of them on every rank."""
    if room.rank in witnesses:
        room.store.set(room.key(f"said {room.rank}"), json.dumps([statement.action, statement.lines]))
    heard = {rank: json.loads(room.get(f"said {rank}")) for rank in witnesses if room.is_set(f"said {rank}", _GRACE_S)}
    if len({action for action, _ in heard.values()}) > 1:
        sides = "; ".join(f"rank {rank} {action}" for rank, (action, _) in heard.items())
        return (
            f"the ranks of a mesh do different things: {sides}. Look for a number or an order of units that depends on "
            "the rank"
        )
    facts = {rank: lines for rank, (_, lines) in heard.items()}
    sides = "; ".join(
        f"rank {rank} has {_beside(lines, [other for one, other in facts.items() if one != rank])}"
        for rank, lines in facts.items()
    )
    return f"{statement.complaint}: {sides}. {statement.advice}"


def _beside(lines: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Return the first lines that are not the same elsewhere."""
    own = [line for line in lines if any(line not in other for other in others)] or list(lines)
    more = f" and {len(own) - _NUM_SHOWN} more" if len(own) > _NUM_SHOWN else ""
    return (", ".join(own[:_NUM_SHOWN]) or "nothing") + more
