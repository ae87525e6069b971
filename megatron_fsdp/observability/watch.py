"""Watch: ranks that do different things, or nothing, raise an error that names the unit instead of hanging.

Two means. Every step the ranks compare a checksum of what they did: 16 bytes each way on a gloo communicator of its
own, looked at one step later, so nothing waits for it. And a thread per rank looks whether the rank has waited for a
collective for longer than a limit; if so all ranks write where they stand into the job's store, one of them puts it
together, and all raise that.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import os
import sys
import threading
import time
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

import dbuffer
from dbuffer.collectives_rare import start_maximum, wait_with
from dbuffer.events import listen
from dbuffer.mesh import new_group
from dbuffer.whereabouts import keep_groups
from megatron_fsdp.checks.rendezvous import job_store, meet
from megatron_fsdp.engine.streams import latest_submission
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import AgreementError, ConfigError
from megatron_fsdp.observability.flight_recorder import Journal, RankState, verdict
from megatron_fsdp.observability.replicas import Gathered, find_difference, gather_checksums

__all__ = ["Watch"]

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.001
_NOWHERE = 1 << 62
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (torch, dbuffer, threading)
)


class Watch:
    """Watches over the collectives of a sharded model while a ``with`` block runs.

    Every rank of the model's mesh enters it, at the same time; it may be entered once. Inside, every rank raises an
    ``AgreementError`` that names the units concerned, what each side did last and what it waits for

    - one step after the ranks' collectives were not the same, even if these were of the same size and ended;
    - one step after weights that several ranks hold alike (the outer axis of HSDP, ZeRO-0, what tensor parallelism
      leaves whole) were found to differ: memory or arithmetic of a rank is broken, or somebody wrote on one rank alone;
    - when a rank has waited for ``timeout`` in a collective of the engine;
    - when a collective fails because another rank is gone.

    A rank that is stuck in code of its own raises as soon as Python runs there again, and logs the error at once. A
    wait in a collective that the engine did not issue (``dist.all_reduce(loss)``) is not interrupted: give it to
    ``wait`` with ``async_op=True``. On CUDA, where the host does not wait for collectives, the thread looks at the
    newest event of the lanes, and the error is raised where Python runs next.

    Args:
        model: has units below it, or is one.
        timeout: how long a rank may wait; longer than any checkpoint or evaluation that one rank does alone.
        interval: steps from one comparison to the next; 0 compares only when somebody waits too long.
        replica_interval: steps from one comparison of replicas to the next, of which each reads main weights once; 0
            never compares them. Moments count as soon as they have made a weight differ.
    Raises:
        ConfigError: no module of the model is sharded.

    Example:
        with Watch(model, timeout=timedelta(minutes=5)):
            model(batch).square().mean().backward()
            optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        timeout: datetime.timedelta = datetime.timedelta(minutes=5),
        *,
        interval: int = 1,
        replica_interval: int = 0,
    ) -> None:
        units = [unit for unit in units_below(model) if unit.groups]
        if not units:
            raise ConfigError("Watch: no module of the model has parameters that fully_shard took")
        mesh = max((unit.groups[0].main_weight.mesh for unit in units), key=lambda mesh: mesh.size())
        self._units = units
        self._root = units[0].root
        self._ranks: list[int] = mesh.mesh.flatten().tolist()
        # Or in a job of fake ranks, where nobody else can come.
        self._is_alone = len(self._ranks) == 1 or job_store() is None
        self._timeout_s = timeout.total_seconds()
        self._poll_s = min(1.0, self._timeout_s / 10)
        self._poll = datetime.timedelta(seconds=self._poll_s)
        self._looks = mesh.device_type != "cpu"
        self._interval = interval
        self._replica_interval = replica_interval
        self._journal = Journal()
        self._prefix = ""
        self._waiting_since: float | None = None
        self._verdict: str | None = None
        self._has_verdict = threading.Event()
        self._wake = threading.Event()
        self._is_stopped = False
        # What the thread that trains has to say. It never asks the store itself, which may not answer.
        self._alarm: str | None = None
        self._departure: str | None = None
        self._steps = 0
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._replicas: list[Gathered] | None = None
        self._open = contextlib.ExitStack()

    # ------------------------------------------------------------------ begin, end

    def __enter__(self) -> Watch:
        if self._is_alone:
            return self
        token = meet(self._ranks, "enters a Watch")
        self._group = new_group(self._ranks, "megatron_fsdp watch", backend="gloo")
        self._prefix = f"megatron_fsdp watch {token}/"
        # A clone has a connection of its own: the thread must not keep others from the store.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._watched = threading.get_ident()
        self._open.enter_context(listen(self._hear))
        self._open.enter_context(wait_with(self.wait))
        self._thread = threading.Thread(target=self._run, name="megatron_fsdp watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._is_alone:
            return
        try:
            if error is None:
                self._compare()
                self._compare_replicas()
        finally:
            self._open.close()
            if error is None:
                self._departure = f"out of its Watch, which it left {_place(self._watched).removeprefix('standing ')}"
            elif self._verdict is None:
                self._departure = f"gone with {type(error).__name__}: {_first_line(error)}"
            self._is_stopped = True
            self._wake.set()
            # Not for ever: a store that cannot be reached does not answer.
            self._thread.join(2 * self._grace_s)

    # ------------------------------------------------------------------ on the thread that trains

    def wait(self, work: dist.Work) -> None:
        """Let the host wait for a collective, at most until the ranks are found to differ.

        Raises:
            AgreementError: they do, or the collective failed.
        """
        self._waiting_since = time.monotonic()
        deadline = self._waiting_since + self._timeout_s + 4 * self._grace_s
        try:
            while not self._is_done(work):
                if self._has_verdict.is_set():
                    raise AgreementError(self._verdict)
                if time.monotonic() > deadline:
                    self._fail(f"a rank has waited for {self._timeout_s:.0f} s:")
        except RuntimeError as error:
            self._fail(f"a collective failed: {_first_line(error)}", error)
        finally:
            self._waiting_since = None

    def _fail(self, reason: str | None, cause: BaseException | None = None) -> NoReturn:
        """Raise what the ranks find together, or what is known here where the store does not answer.

        ``reason`` is None where another rank says it.
        """
        self._alarm = reason
        self._wake.set()
        if not self._has_verdict.wait(4 * self._grace_s):
            what = reason or "another rank found a difference"
            alone = f"{what}\n  the job's store cannot be reached: rank 0 or its machine ended, or the network is cut"
            self._end(verdict({dist.get_rank(): self._state()}, alone))
        raise AgreementError(self._verdict) from cause

    def _is_done(self, work: dist.Work) -> bool:
        """Wait for a while; tell whether the collective is complete."""
        if self._looks and type(work) is dist.Work:
            # NCCL aborts its communicator when a wait's time is over; to look does nothing.
            if not work.is_completed():
                time.sleep(_LOOK_S)
                return False
            work.wait()
            return True
        try:
            work.wait(self._poll)
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def check(self) -> None:
        """Compare what the ranks did so far, now, and the replicas if asked for; every rank calls it between steps.

        Raises:
            AgreementError: it was not the same.
        """
        if not self._is_alone:
            self._compare()
            self._start_comparison()
            self._compare()
            if self._replica_interval:
                self._replicas = gather_checksums(self._units)
                self._compare_replicas()

    def _hear(self, action: str, subject: Any) -> None:
        self._journal.hear(action, subject)
        if action != "backward" or subject is not self._root:
            return
        self._steps += 1
        if self._interval and self._steps % self._interval == 0:
            self._compare()
            self._start_comparison()
        if self._replica_interval:
            self._compare_replicas()
            if self._steps % self._replica_interval == 0:
                self._replicas = gather_checksums(self._units)

    def _start_comparison(self) -> None:
        mine = self._journal.digest << 32 | self._journal.count & 0xFFFFFFFF
        # The largest of x and of -x are the same number but for the sign only where all ranks have one x.
        extremes = torch.tensor([mine >> 1, -(mine >> 1)])
        self._pending = start_maximum(extremes, self._group), extremes

    def _compare(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        work, extremes = pending
        self.wait(work)
        highest, lowest = extremes.tolist()
        if highest != -lowest:
            self._fail("the ranks did not issue the same collectives, so gradients or weights may be wrong:")

    def _compare_replicas(self) -> None:
        """Look at what was gathered, if anything; ranks whose replicas agree raise what the others say."""
        gathered, self._replicas = self._replicas, None
        if gathered is None:
            return
        mine, text = find_difference(gathered) or (_NOWHERE, "")
        first = torch.tensor([-mine])
        self.wait(start_maximum(first, self._group))
        if text and mine == -first.item():
            self._fail(f"replicas differ, so what a rank computes is wrong, or was written on it alone: {text}")
        if first.item() != -_NOWHERE:
            self._fail(None)

    # ------------------------------------------------------------------ on the thread that watches

    @property
    def _grace_s(self) -> float:
        return 2.0 + 3 * self._poll_s

    def _run(self) -> None:
        while True:
            self._wake.wait(self._poll_s)
            self._wake.clear()
            try:
                if self._is_stopped:
                    if self._departure is not None:
                        # Ranks that will wait for this one are told why it does not come.
                        state = self._journal.state(waits=False, place=self._departure)
                        self._store.set(self._key(f"rank {dist.get_rank()}"), state.to_json())
                    return
                if self._alarm is None and self._is_stuck():
                    self._alarm = f"a rank has waited for {self._timeout_s:.0f} s:"
                if self._alarm is not None:
                    self._store.compare_set(self._key("alarm"), "", self._alarm)
                if self._store.check([self._key("alarm")]):
                    self._conclude()
                    return
            except RuntimeError as error:
                if not self._is_stopped:
                    self._end(f"the job's store cannot be reached ({_first_line(error)}): rank 0 or its machine ended")
                return

    def _is_stuck(self) -> bool:
        since = self._waiting_since
        if since is not None:
            return time.monotonic() - since > self._timeout_s
        event = latest_submission()
        return event is not None and self._journal.idle_s > self._timeout_s and not event.query()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _conclude(self) -> None:
        """Say where this rank stands, let one rank put it together, and raise the result."""
        self._store.set(self._key(f"rank {dist.get_rank()}"), self._state().to_json())
        if self._store.add(self._key("reporter"), 1) == 1:
            reason = self._store.get(self._key("alarm")).decode()
            self._store.set(self._key("verdict"), verdict(self._collect(), reason))
        try:
            self._store.wait([self._key("verdict")], datetime.timedelta(seconds=3 * self._grace_s))
            text = self._store.get(self._key("verdict")).decode()
        except RuntimeError:
            text = verdict({dist.get_rank(): self._state()}, "a rank stopped while it reported:")
        self._end(text)

    def _collect(self) -> dict[int, RankState | None]:
        deadline = time.monotonic() + self._grace_s
        states: dict[int, RankState | None] = {}
        for rank in self._ranks:
            key = self._key(f"rank {rank}")
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self._store.wait([key], datetime.timedelta(seconds=left))
                states[rank] = RankState.from_json(self._store.get(key).decode())
            except RuntimeError:
                states[rank] = None
        return states

    def _state(self) -> RankState:
        waits = self._waiting_since is not None
        return self._journal.state(waits=waits, place=_place(self._watched))

    def _end(self, text: str) -> None:
        if self._has_verdict.is_set():
            return
        self._verdict = text
        keep_groups()
        _LOG.error("rank %d: %s", dist.get_rank(), text)
        is_waiting = self._waiting_since is not None
        self._has_verdict.set()
        if not is_waiting:
            _raise_in(self._watched, text)


def _place(thread: int) -> str:
    """Return where a thread stands: the innermost line outside of PyTorch and this package."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "at no line of Python"
    return f"standing at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_library(path: str) -> bool:
    package = os.path.dirname(os.path.abspath(__file__)) + os.sep
    return path.startswith((package, *_LIBRARIES, "<frozen"))


def _raise_in(thread: int, text: str) -> None:
    """Make a thread raise an AgreementError when it runs Python next."""
    # What is raised so is made without arguments.
    stalled = type("AgreementError", (AgreementError,), {"__init__": lambda self: AgreementError.__init__(self, text)})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(stalled))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
