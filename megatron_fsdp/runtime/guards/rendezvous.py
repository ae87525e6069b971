"""Rendezvous: ranks say in the job's store what they are about to do, and go on when all of them do the same.

No collective: a collective that one rank never joins can be neither ended nor taken back, and making a communicator for
it may be the very thing that hangs. In the store the others learn within a second why somebody does not come
(docs/design/watch.md).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import json
import sys
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from dbuffer import MeshError
from dbuffer.collectives import wait_for
from dbuffer.mesh import job_timeout
from megatron_fsdp.errors import AgreementError, ConfigError
from megatron_fsdp.formatting import rank_list

__all__ = ["Statement", "excuse", "job_store", "meet"]

_ABSENT = "-"
# Where processes that end with an exception say so.
_ENDED = "megatron_fsdp ended"
# The verdict wakes whoever waits for it; between looks nothing else is seen.
_LOOK_S, _LONGEST_LOOK_S = 2.0, 10.0
_LONGEST_PAUSE_S = 0.1
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


def meet(ranks: Sequence[int], statement: Statement) -> str:
    """Wait until all of ``ranks`` have come with the same statement; a few requests to the store each.

    Returns:
        A name of this rendezvous that no other one in the store has; empty where nobody else can come.
    Raises:
        MeshError: on all of them, when any two statements differ.
        AgreementError: a rank was excused, or did not come before the job's timeout (or a watch's).
        ConfigError: the job's store cannot serve for it.
    """
    room = _Room.enter(ranks)
    if room is None:
        return ""
    try:
        room.join(statement.digest)
        wait_for(_Arrival(room, statement))
    except BaseException as error:
        room.close(statement.action, error)
        raise
    verdict, _, rest = room.get("verdict").partition(" ")
    if verdict == "gone":
        raise AgreementError(f"rank {room.rank} {statement.action}, but {rest}")
    if verdict == "late":
        raise AgreementError(f"rank {room.rank} {statement.action}, but {_absence(room, *map(int, rest.split()))}")
    if verdict == "differ":
        raise MeshError(_difference(room, statement, sorted(int(rank) for rank in rest.split())))
    return room.token


def excuse(ranks: Sequence[int], action: str, error: BaseException) -> None:
    """Tell the others that this rank does not come to their next rendezvous, and why: they raise instead of waiting."""
    room = _Room.enter(ranks)
    if room is not None:
        room.close(action, error)


@dataclass(slots=True)
class _Era:
    """What this process remembers of the rendezvous of one process group of the job.

    Attributes:
        held: how many there were of which ranks; the next one is known by that number. since: records in the store that
            are older come from a run before, whose store was kept: torchrun keeps it when it restarts the ranks.
    """

    held: Counter[tuple[int, ...]]
    since: float


_ERAS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Era] = weakref.WeakKeyDictionary()
_latest = [time.time()]


class _Room:
    """One rendezvous, as this rank sees it.

    The first to come writes a record with a token, and all else is written under that token. Who takes the record of
    another rank, whose clock is late, for one of a run before replaces it; the other one notices and joins again.
    """

    def __init__(self, store: Store, ranks: tuple[int, ...], number: int, since: float) -> None:
        self.ranks = ranks
        self.rank: int = dist.get_rank()
        self.token = ""
        self._store = store
        self._since = since
        self._digest = _ABSENT
        listed = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
        self._record_key = f"megatron_fsdp rendezvous {listed} {number}"

    @classmethod
    def enter(cls, ranks: Iterable[int]) -> _Room | None:
        """Return the next rendezvous of some ranks; None where this process is the only one, or stands for all."""
        ranks = tuple(sorted(ranks))
        if len(ranks) < 2 or not dist.is_initialized() or dist.get_rank() not in ranks:
            return None
        store = job_store()
        if store is None:
            return None
        _check_store(store)
        world: Any = dist.group.WORLD
        era = _ERAS.get(world)
        if era is None:
            era = _ERAS[world] = _Era(Counter(), _latest[0])
        era.held[ranks] += 1
        return cls(store, ranks, era.held[ranks], era.since)

    def join(self, digest: str) -> None:
        """Take part, with the digest of a statement."""
        self._digest = digest
        mine = f"{self.rank} {digest} {uuid.uuid4().hex} {time.time()}"
        found = self._get_or_set(self._record_key, "", mine)
        if float(found.split()[3]) < self._since:
            found = self._get_or_set(self._record_key, found, mine)
        self._take(found)

    def _take(self, record: str) -> None:
        rank, digest, self.token, _ = record.split()
        if _ABSENT in (digest, self._digest):
            return
        if digest != self._digest:
            self.set_verdict(f"differ {rank} {self.rank}")
        elif self._store.add(self._key("here"), 1) == len(self.ranks):
            self.set_verdict("agreed")

    def follow(self) -> None:
        """Join the others where they have replaced the record, and see whether one of them has ended."""
        record = self._store.get(self._record_key).decode()
        if record.split()[2] != self.token:
            self._take(record)
        for line in self._store.get(_ENDED).decode().splitlines() if self._store.check([_ENDED]) else ():
            rank, moment, reason = line.split(" ", 2)
            if int(rank) in self.ranks and float(moment) >= self._since:
                self.set_verdict(f"gone rank {rank} has ended with {reason}")

    def close(self, action: str, error: BaseException) -> None:
        """Let everybody who is here, or comes later, know that this rank has given up."""
        # Where the store is out of reach, the error itself is all there is.
        with contextlib.suppress(RuntimeError):
            self._digest = _ABSENT
            if self.token:
                self.follow()
            else:
                self.join(_ABSENT)
            self.set_verdict(f"gone rank {self.rank}, which {action}, raised {type(error).__name__}: {error}")
        _latest[0] = time.time()

    def set_verdict(self, verdict: str) -> None:
        """Say how the rendezvous ends, unless somebody has."""
        self._get_or_set(self._key("verdict"), "", verdict)

    def _get_or_set(self, key: str, old: str, new: str) -> str:
        return str(self._store.compare_set(key, old, new).decode())

    def _key(self, name: str) -> str:
        return f"{self._record_key} {self.token} {name}"

    def set(self, name: str, value: str) -> None:
        """Write something under a name."""
        self._store.set(self._key(name), value)

    def get(self, name: str) -> str:
        """Return what was written under a name, once it was."""
        _latest[0] = time.time()
        return str(self._store.get(self._key(name)).decode())

    def has(self, name: str) -> bool:
        """Whether something was written under a name."""
        return bool(self._store.check([self._key(name)]))

    def comes(self, name: str, timeout_s: float) -> bool:
        """Wait for something to be written under a name; tell whether it was."""
        if timeout_s >= _LOOK_S:
            # A FileStore's wait that ends raises what a broken store's raises, too; to ask once more tells them apart.
            with contextlib.suppress(RuntimeError):
                self._store.wait([self._key(name)], datetime.timedelta(seconds=timeout_s))
            return self.has(name)
        # The store's own wait leaves two warnings in the log each time that nothing comes.
        deadline, pause_s = time.monotonic() + timeout_s, 0.001
        while not self.has(name):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True


@atexit.register
def _leave_word() -> None:
    """Tell ranks that wait for this one of the exception that ends its process, if it is one."""
    error = getattr(sys, "last_value", None)
    if error is None or not dist.is_initialized():
        return
    store: Any = job_store()
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    with contextlib.suppress(AttributeError, RuntimeError):
        store.append(_ENDED, f"{dist.get_rank()} {time.time()} {reason}\n")


def job_store() -> Store | None:
    """Return the job's store; None where one process stands for all ranks, so that nobody else would come."""
    store: Store = dist.distributed_c10d._get_default_store()
    inner = _innermost(store)
    backends = {name.rpartition(":")[2] for name in dist.get_backend().split(",")}
    # A HashStore is memory of this process. Threads as ranks share one.
    is_own = isinstance(inner, HashStore) and backends != {"threaded"}
    return None if inner is None or is_own or _keeps_nothing(inner) or backends == {"fake"} else store


def _innermost(store: Store) -> Any:
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return inner


def _check_store(store: Store) -> None:
    """Refuse a store written in Python that lacks the one operation by which one of several ranks is the first."""
    kind = type(_innermost(store))
    if kind not in (TCPStore, FileStore, HashStore) and kind.compare_set is Store.compare_set:
        raise ConfigError(
            f"torch.distributed runs on a store of class {kind.__name__}, which has no compare_set(key, expected, "
            "desired): the ranks agree in it on what they do. Give init_process_group an address, a TCPStore, a "
            f"FileStore or a HashStore, or write {kind.__name__}.compare_set"
        )


def _keeps_nothing(store: Store) -> bool:
    """Whether it is a ``FakeStore``; before PyTorch 2.15 one that only the process group holds is a bare ``Store``."""
    return type(store) is Store or type(store).__name__ == "FakeStore"


class _Arrival(dist.Work):
    """The wait for the others, in a form that a ``Watch`` can wait for too."""

    def __init__(self, room: _Room, statement: Statement) -> None:
        super().__init__()
        self._room = room
        self._statement = statement

    def is_completed(self) -> bool:
        """Whether there is a verdict."""
        return self._room.has("verdict")

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the verdict; after the job's timeout, make one.

        Raises:
            RuntimeError: there is none within ``timeout``.
        """
        room, limit = self._room, timeout or job_timeout() or _DEFAULT_TIMEOUT
        deadline = time.monotonic() + limit.total_seconds()
        look_s = _LOOK_S
        while not room.comes("verdict", min(look_s, deadline - time.monotonic())):
            look_s = min(2 * look_s, _LONGEST_LOOK_S)
            room.follow()
            room.set(f"waits {room.rank}", "")
            if time.monotonic() < deadline:
                continue
            if timeout:
                raise RuntimeError("some ranks have not come yet")
            missing = [str(rank) for rank in room.ranks if not room.has(f"waits {rank}")]
            room.set_verdict(f"late {limit.total_seconds():.0f} {' '.join(missing)}")
        return True


def _absence(room: _Room, limit_s: int, *missing: int) -> str:
    """Return who did not come in time, in the words of one who did, or of one who comes when it is too late."""
    others = [rank for rank in room.ranks if rank not in missing]
    what = f"{rank_list(missing)} did not within {limit_s} s"
    if room.rank in missing:
        what = f"only after {rank_list(others)} had waited for it for {limit_s} s and raised"
    return (
        f"{what}. Every rank of the mesh ({rank_list(room.ranks)}) has to; look at {rank_list(missing)} for another "
        "number of units, for work that only one rank does, or for a process that ended"
    )


_NUM_SHOWN = 3


def _difference(room: _Room, statement: Statement, witnesses: Sequence[int]) -> str:
    """Return what is not the same on two ranks, in the words of both of them on every rank."""
    if room.rank in witnesses:
        room.set(f"said {room.rank}", json.dumps([statement.action, statement.lines]))
    heard = {rank: json.loads(room.get(f"said {rank}")) for rank in witnesses if room.comes(f"said {rank}", _GRACE_S)}
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
    own = [line for line in lines if any(line not in other for other in others)]
    more = f" and {len(own) - _NUM_SHOWN} more" if len(own) > _NUM_SHOWN else ""
    return (", ".join(own[:_NUM_SHOWN]) or "nothing beside what both have") + more
