"""Watch: ranks that issue different collectives, or stall, raise an error that names the unit instead of hanging.

It works in two ways. First, in every step the ranks compare a checksum of their actions: 16 bytes each way on a gloo
communicator of its own. The result is read one step later, so no rank waits for it. Second, a thread on each rank
checks whether the rank has waited for a collective longer than a limit. If so, all ranks write their state to the job's
store, one rank combines the states into an error message, and all ranks raise it.
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
from dbuffer.collectives.all_reduce import start_maximum
from dbuffer.collectives.waits import wait_with
from dbuffer.events import listen
from dbuffer.mesh import new_group
from dbuffer.whereabouts import keep_groups
from megatron_fsdp.checks.rendezvous import job_store, meet
from megatron_fsdp.engine.streams import latest_submission
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import AgreementError, ConfigError, StateError
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
    """Watches the collectives of a sharded model while a ``with`` block runs.

    Every rank of the model's mesh must enter it at the same time, once. Inside, every rank raises an ``AgreementError``
    that names the units, what each rank did last and what it waits for, in these cases:
    - the ranks issued different collectives, even if these had the same size and completed; one step later;
    - weights that several ranks hold in full (the outer axis of HSDP, ZeRO-0, parameters that tensor parallelism does
      not divide) differ, because a rank's memory or arithmetic is broken or one rank alone wrote to them; one step
      later;
    - a rank has waited for ``timeout`` in a collective of the engine;
    - a collective fails because another rank ended.

    A rank that is stuck in the user's code logs the error at once, and raises it as soon as Python runs there again. A
    wait in a collective that the engine did not issue (``dist.all_reduce(loss)``) is not interrupted. To have it
    watched, issue the collective with ``async_op=True``, and pass its handle to ``wait``. On CUDA the host does not
    wait for collectives, so the thread polls the newest event of the lanes, and the error is raised where Python runs
    next.

    Args:
        model: a unit, or a module with units below it.
        timeout: how long a rank may wait; longer than any checkpoint or evaluation that only one rank runs.
        interval: steps between two comparisons; 0: compare only after a rank has waited too long.
        replica_interval: steps between two comparisons of replicas, each of which reads main weights once; 0: never.
            A difference in moments is found once it has changed a weight.
    Raises:
        ConfigError: no module of the model is sharded.
        StateError: the Watch is entered a second time.

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
            raise ConfigError(
                "Watch: no module of the model is sharded. fix: call fully_shard on the model before Watch(model)"
            )
        mesh = max((unit.groups[0].main_weight.mesh for unit in units), key=lambda mesh: mesh.size())
        self._units = units
        self._root = units[0].root
        self._ranks: list[int] = mesh.mesh.flatten().tolist()
        # The same in a job of fake ranks, where no other process would answer.
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
        # Messages of the training thread. It never accesses the store itself, because the store may not answer.
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
        if self._prefix:
            raise StateError("this Watch was entered before, and ends when it is left. fix: make a new Watch(model)")
        token = meet(self._ranks, "enters a Watch")
        self._group = new_group(self._ranks, "megatron_fsdp watch", backend="gloo")
        self._prefix = f"megatron_fsdp watch {token}/"
        # A clone has its own connection, so that the thread does not block other users of the store.
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
            # The call has a timeout, because a store that cannot be reached never answers.
            self._thread.join(2 * self._grace_s)

    # ------------------------------------------------------------------ on the training thread

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective on the host, at most until the ranks are found to differ.

        Raises:
            AgreementError: the ranks differ, or the collective failed.
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
        """Raise the error that the ranks agree on, or this rank's own state if the store does not answer.

        ``reason`` is None if another rank gives the reason.
        """
        self._alarm = reason
        self._wake.set()
        if not self._has_verdict.wait(4 * self._grace_s):
            what = reason or "another rank found a difference"
            alone = f"{what}\n  the job's store cannot be reached: rank 0 or its machine ended, or the network is cut"
            self._end(verdict({dist.get_rank(): self._state()}, alone))
        raise AgreementError(self._verdict) from cause

    def _is_done(self, work: dist.Work) -> bool:
        """Wait for a short time, and return whether the collective has completed."""
        if self._looks and type(work) is dist.Work:
            # NCCL aborts its communicator when a timed wait expires; polling has no such effect.
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
        """Compare the ranks' actions now, and the replicas if enabled. Every rank must call this between steps.

        Raises:
            AgreementError: the ranks differ.
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
        # max(x) == -max(-x) only if all ranks have the same x.
        extremes = torch.tensor([mine >> 1, -(mine >> 1)], device="cpu")
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
        """Compare gathered replicas. A rank whose replicas agree raises the error of a rank whose replicas differ."""
        gathered, self._replicas = self._replicas, None
        if gathered is None:
            return
        mine, text = find_difference(gathered) or (_NOWHERE, "")
        first = torch.tensor([-mine], device="cpu")
        self.wait(start_maximum(first, self._group))
        if text and mine == -first.item():
            self._fail(f"replicas differ, so what a rank computes is wrong, or was written on it alone: {text}")
        if first.item() != -_NOWHERE:
            self._fail(None)

    # ------------------------------------------------------------------ on the watching thread

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
                        # Tells ranks that will wait for this one why it does not come.
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
        """Publish this rank's state, have one rank combine all states, and raise the result."""
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
    """Return where a thread is: the innermost source line outside of PyTorch and this package."""
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
    """Raise an AgreementError in a thread as soon as it runs Python again."""
    # Python creates an exception raised in this way without arguments.
    stalled = type("AgreementError", (AgreementError,), {"__init__": lambda self: AgreementError.__init__(self, text)})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(stalled))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
