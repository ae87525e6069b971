"""Rendezvous: ranks write their next action to the job's store, and continue when all of them agree.

No collective: a collective that one rank never joins can be neither ended nor taken back, and making a communicator for
it may be the very thing that hangs. In the store the others learn within a second why a rank does not come
(docs/design/watch.md).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from dbuffer import MeshError
from dbuffer.collectives.waits import waiters
from dbuffer.mesh import job_timeout
from dbuffer.whereabouts import is_from_backend, job_store, others_stand, reason_of
from megatron_fsdp.errors import DIFFERENT_PASSES, AgreementError
from megatron_fsdp.formatting import rank_list

__all__ = ["job_store", "meet", "report_failure"]

_LOOK_S, _LONGEST_LOOK_S = 2.0, 10.0
_LONGEST_PAUSE_S = 0.5
_NO_TIMEOUT = datetime.timedelta(0)
_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
_NUM_SHOWN = 3
_KEYS = ("first", "said", "here", "verdict")
"""What a rendezvous writes; the next one of the same ranks deletes it."""


def meet(ranks: Sequence[int], action: str, lines: Sequence[str] = (), complaint: str = "", advice: str = "") -> str:
    """Wait until all of ``ranks`` have arrived with the same action. Takes a few requests to the store.

    Args:
        action: a verb phrase that follows "rank 3": "calls fully_shard on unit 'Block'".
        lines: details that have to be the same on all ranks, one fact each.
        complaint, advice: how a message about different details begins and ends.
    Returns:
        A name of this rendezvous that no other one in the store has; empty where nobody else can come.
    Raises:
        MeshError: on all of them, when what any two are about to do differs.
        AgreementError: a rank raised or ended instead, or did not come before the job's timeout (or a watch's).
    """
    rendezvous = _Rendezvous.enter(ranks)
    if rendezvous is None:
        return ""
    try:
        rendezvous.join([action, *lines], complaint, advice)
        if waiters:
            waiters[-1](rendezvous)
        else:
            rendezvous.wait()
    except BaseException as error:
        rendezvous.fail(action, error)
        raise
    verdict, _, words = rendezvous.store.get("verdict").decode().partition(" ")
    if verdict == "gone":
        raise AgreementError(f"rank {rendezvous.rank} {action}, but {words}")
    if verdict == "differ":
        raise MeshError(words)
    return rendezvous.name


def report_failure(ranks: Sequence[int], action: str, error: BaseException) -> None:
    """Report to the other ranks why this rank skips their next rendezvous; they raise instead of waiting."""
    # If the store is unreachable, the caller still cleans up, and only the error itself is reported.
    with contextlib.suppress(RuntimeError):
        rendezvous = _Rendezvous.enter(ranks)
        if rendezvous is not None:
            rendezvous.fail(action, error)


class _Rendezvous(dist.Work):
    """This rank's side of a rendezvous. It is a ``Work``, so that a ``Watch`` can wait for the verdict too.

    Args:
        number: the number of rendezvous of exactly these ranks in the store, including this one.
    """

    def __init__(self, store: Store, ranks: tuple[int, ...], number: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.rank: int = dist.get_rank()
        self.name = f"{_prefix(ranks)} {number}"
        self.store: Store = PrefixStore(self.name, store)
        self._number, self._job_store = number, store

    @classmethod
    def enter(cls, ranks: Iterable[int]) -> _Rendezvous | None:
        """Return the next rendezvous of ``ranks``; None if this process is the only one or represents all of them."""
        ranks = tuple(sorted(ranks))
        if len(ranks) < 2 or not dist.is_initialized() or dist.get_rank() not in ranks:
            return None
        store = job_store()
        # Each rank counts its rendezvous in the store, which survives new process groups.
        return None if store is None else cls(store, ranks, store.add(_count_of(ranks, dist.get_rank()), 1))

    def join(self, said: Sequence[str], complaint: str, advice: str) -> None:
        """Take part. The last rank to arrive, or the first rank that differs, writes the verdict."""
        digest = hashlib.sha256("\n".join(said).encode()).hexdigest()[:32]
        rank, first = self.store.compare_set("first", "", f"{self.rank} {digest}").decode().split()
        if int(rank) == self.rank:
            self.store.set("said", json.dumps(said))
        if first != digest:
            heard = {int(rank): json.loads(self.store.get("said")), self.rank: list(said)}
            self.end(f"differ {_difference(dict(sorted(heard.items())), complaint, advice)}")
        elif self.store.add("here", 1) == len(self.ranks):
            self.end("agreed")
            # All ranks have come here, so no rank reads the last rendezvous any more.
            for key in _KEYS:
                self._job_store.delete_key(f"{_prefix(self.ranks)} {self._number - 1}/{key}")

    def fail(self, action: str, error: BaseException) -> None:
        """Report to all ranks that this rank has failed."""
        # If the store is unreachable, only the error itself is reported.
        with contextlib.suppress(RuntimeError):
            text = f"rank {self.rank}, which {action}, raised {type(error).__name__}: {error}"
            self.end(f"gone {_with_fix(text, self.rank)}")

    def end(self, verdict: str) -> None:
        """Write how the rendezvous ends, unless another rank has."""
        self.store.compare_set("verdict", "", verdict)

    def is_completed(self) -> bool:
        """Return whether a verdict exists."""
        return bool(self.store.check(["verdict"]))

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the verdict; after the job's timeout, make one.

        Raises:
            RuntimeError: no verdict within ``timeout``.
        """
        limit_s = (timeout or job_timeout() or _DEFAULT_TIMEOUT).total_seconds()
        begin = time.monotonic()
        look_s, pause_s = _LOOK_S, 0.001
        # The store's own wait logs a warning at each timeout.
        while not self.is_completed():
            waited_s = time.monotonic() - begin
            if waited_s >= min(look_s, limit_s):
                look_s = waited_s + min(waited_s, _LONGEST_LOOK_S)
                self.look_for_ended()
            if waited_s < limit_s:
                time.sleep(min(pause_s, limit_s - waited_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            elif timeout:
                raise RuntimeError("some ranks have not come yet")
            else:
                missing = rank_list([rank for rank in self.ranks if not self._has_come(rank)])
                self.end(
                    f"gone {missing} did not come within {limit_s:.0f} s of rank {self.rank}. Every rank of the mesh "
                    f"({rank_list(self.ranks)}) has to. fix: look at {missing} for another number of units, for work "
                    "that only one rank does, or for a process that ended"
                )
        return True

    def _has_come(self, rank: int) -> bool:
        return bool(self._job_store.add(_count_of(self.ranks, rank), 0) >= self._number)

    def look_for_ended(self) -> None:
        """See whether the process of one of the ranks has ended with an exception."""
        store, ended = self._job_store, f"megatron_fsdp ended{_attempt()}"
        for line in store.get(ended).decode().splitlines() if store.check([ended]) else ():
            rank, reason = line.split(" ", 1)
            if int(rank) in self.ranks:
                self.end(f"gone {_with_fix(f'rank {rank} has ended with {reason}', int(rank))}")


def _prefix(ranks: Sequence[int]) -> str:
    listed = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    return f"megatron_fsdp rendezvous {listed}{_attempt()}"


def _count_of(ranks: Sequence[int], rank: int) -> str:
    """Return the key that counts the rendezvous of ``ranks`` that a rank has entered."""
    return f"{_prefix(ranks)} of {rank}"


def _attempt() -> str:
    # torchrun keeps its store when it restarts the ranks.
    return f" attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


@atexit.register
def _leave_word() -> None:
    """Report the exception that ends this process, if any, to ranks that wait for it."""
    error = getattr(sys, "last_value", None)
    if error is None or not dist.is_initialized():
        return
    store: Any = job_store()
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    with contextlib.suppress(AttributeError, RuntimeError):
        store.append(f"megatron_fsdp ended{_attempt()}", f"{dist.get_rank()} {reason}\n")
        if isinstance(error, RuntimeError) and is_from_backend(error):
            _explain(reason_of(error, job_timeout()))


def _explain(reason: str) -> None:
    """Print where the other ranks stand, below a traceback of gloo or NCCL from a collective of the script's own."""
    rank = dist.get_rank()
    others = [other for other in range(dist.get_world_size()) if other != rank]
    stand = others_stand(others)
    if "weights or gradients" in stand:
        sys.stderr.write(
            f"megatron_fsdp: rank {rank} ended in a collective of the script's own: {reason}. Of the others, {stand}. "
            f"{DIFFERENT_PASSES}\n"
        )


def _with_fix(text: str, rank: int) -> str:
    """Return a sentence about a failed rank that ends with a fix: that of its own error, if it has one."""
    return text if "fix:" in text else f"{text.rstrip('.')}. fix: look at the traceback of rank {rank}"


def _difference(heard: dict[int, list[str]], complaint: str, advice: str) -> str:
    """Return the first difference between two ranks, in their actions or in their details."""
    if len({action for action, *_ in heard.values()}) > 1:
        sides = "; ".join(f"rank {rank} {action}" for rank, (action, *_) in heard.items())
        return (
            f"the ranks of a mesh do different things: {sides}. fix: look for a number or an order of units that "
            "depends on the rank, and make it the same on all ranks"
        )
    if len({tuple(sorted(said)) for said in heard.values()}) == 1:
        position = next(number for number, lines in enumerate(zip(*heard.values(), strict=True)) if len({*lines}) > 1)
        sides = "; ".join(f"rank {rank} has {said[position]} as number {position}" for rank, said in heard.items())
        return f"{complaint}: they have the same in another order: {sides}. {advice}"
    same = set.intersection(*map(set, heard.values()))
    sides = "; ".join(
        f"rank {rank} has {_listed([line for line in said if line not in same])}" for rank, said in heard.items()
    )
    return f"{complaint}: {sides}. {advice}"


def _listed(lines: Sequence[str]) -> str:
    more = f" and {len(lines) - _NUM_SHOWN} more" if len(lines) > _NUM_SHOWN else ""
    return (", ".join(lines[:_NUM_SHOWN]) or "nothing beside what both have") + more
