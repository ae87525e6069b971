"""Run a function on N ranks, in worker processes that are started once and used for the whole test session.

Starting Python and importing torch costs seconds per rank, a new process group milliseconds. So the workers stay, and
each call gets a new process group. A call that leaves a worker in doubt costs the pool, not the suite.
"""

import atexit
import contextlib
import functools
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but untyped

from tests.harness.failures import FailureKind, RankError, RankFailure
from tests.harness.messages import Call, Clean, Outcome, Release, Task, receive, send
from tests.harness.process import WorkerProcess

Result = TypeVar("Result")

# Only a hang reaches it: a call takes seconds, and a minute where other programs write gigabytes to the same disk.
TIMEOUT_S = 180.0
# How long the other ranks may go on after the first failure: long enough for a peer to notice a closed connection.
GRACE_S = 5.0
CLEANUP_TIMEOUT_S = 30.0


def run_ranks(
    world_size: int,
    function: Callable[..., Result],
    *args: object,
    timeout: float = TIMEOUT_S,
    fresh: bool = False,
    backend: str = "gloo",
) -> list[Result]:
    """Run ``function(*args)`` on every rank of a new process group and return the values, rank by rank.

    Each rank starts from the same seed (add the rank where data must differ), one thread, the caller's warning
    filters and torchrun's environment variables; ``torch.distributed`` is initialized before and destroyed after.

    Args:
        world_size: number of ranks, at least 1.
        function: module-level function of an importable module; it finds its rank with ``dist.get_rank()``.
        args: picklable; every rank gets its own copy. Tensors travel by value, as do those in the results.
        timeout: seconds for the whole call; a collective gives up after as long.
        fresh: use new processes and end them afterwards, for a call that spoils its process.
        backend: passed to ``init_process_group``; with "nccl" in it, rank r uses GPU r modulo their number, which the
            group is bound to. Such a call has new processes.
    Raises:
        RankError: a rank raised, died or hung, or a finalizer or thread on it raised; tells which and why.
        ValueError: ``world_size`` is below 1, or the function or an argument can't be pickled.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size is {world_size}; wanted at least 1 rank.")
    name = getattr(function, "__qualname__", repr(function))
    try:
        call = pickle.dumps(Call(function, args, list(warnings.filters)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"run_ranks: {name} and its arguments must be picklable to reach the ranks, but: {error}. Pass a "
            f"function defined at the top level of its module, and plain data or CPU tensors."
        ) from error
    # PyTorch 2.13 crashes in a process that was bound to a GPU, left that job, is bound in another one and splits its
    # communicator for the axes of a mesh.
    fresh = fresh or "nccl" in backend
    pool = WorkerPool() if fresh else _shared_pool()
    try:
        report = pool.run(world_size, call, timeout=timeout, backend=backend)
    finally:
        if fresh:
            pool.close()
    if report.failures:
        raise RankError(name, world_size, report.failures)
    _show_output(report)
    # The type is the function's annotation.
    return [pickle.loads(value) for value in report.values]


@dataclass(frozen=True, slots=True)
class CallReport:
    """The reports of all ranks about one call.

    Attributes:
        failures: the likely cause first; empty when every rank returned.
        values: each rank's pickled value; complete when there is no failure.
        outputs: what each rank wrote to stdout and stderr.
        num_groups_left: process groups that live on in the workers, with their threads.
    """

    failures: tuple[RankFailure, ...]
    values: tuple[bytes, ...]
    outputs: tuple[str, ...]
    num_groups_left: int


class WorkerPool:
    """Worker processes, started when first needed; worker r is rank r of every call that has more than r ranks."""

    def __init__(self) -> None:
        """Make an empty pool."""
        self._workers: list[WorkerProcess] = []
        self._store: TCPStore | None = None
        self._num_calls = 0

    def run(self, world_size: int, call: bytes, *, timeout: float, backend: str) -> CallReport:
        """Run a pickled ``Call`` on the first ``world_size`` workers; options as for ``run_ranks``."""
        try:
            workers = self._members(world_size)
            self._num_calls += 1
            report = _converse(workers, Task(call, self._num_calls, world_size, backend, timeout))
        except BaseException:
            # Workers left in the middle of a conversation would take the next call's messages for this one's.
            self.close()
            raise
        if report.num_groups_left:
            # After a MeshError the engine keeps the job's groups, whose threads would slow down all later calls.
            self.close()
        return report

    def close(self) -> None:
        """End all workers; a later call starts new ones."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._store = None

    def _members(self, world_size: int) -> list[WorkerProcess]:
        """Return the workers for a call; starts those that are missing, and all anew once one of them has ended."""
        if any(worker.has_ended() for worker in self._workers):
            self.close()
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        missing = range(len(self._workers), world_size)
        self._workers += [WorkerProcess(rank, self._store.port) for rank in missing]
        for rank in missing:
            self._workers[rank].wait_until_ready()
        return self._workers[:world_size]


@functools.cache
def _shared_pool() -> WorkerPool:
    pool = WorkerPool()
    atexit.register(pool.close)
    return pool


def _converse(workers: Sequence[WorkerProcess], task: Task) -> CallReport:
    """Have the workers run a task and clean up after it."""
    for worker in workers:
        worker.begin(task)
    # The grace period lets a collective that times out raise its own error first.
    replies = _await_replies(workers, task.timeout_s + GRACE_S, "outcome")
    outcomes = {rank: message for rank, message in replies.messages.items() if isinstance(message, Outcome)}
    failures = replies.failures + [
        RankFailure(rank, FailureKind.RAISED, outcomes[rank].error or "", workers[rank].output())
        for rank in earliest_failure_first(outcomes)
    ]
    num_groups_left = 0
    if not replies.failures:
        unclean, num_groups_left = _clean_up(workers)
        failures += unclean
    order = list(FailureKind)
    failures.sort(key=lambda failure: order.index(failure.kind))
    return CallReport(
        failures=tuple(failures),
        values=tuple(outcome.value for _, outcome in sorted(outcomes.items()) if outcome.value is not None),
        outputs=tuple(worker.output() for worker in workers),
        num_groups_left=num_groups_left,
    )


def earliest_failure_first(outcomes: Mapping[int, Outcome]) -> list[int]:
    """Return the ranks that raised, by when they did: the first has the cause, the others may only have lost it."""
    return [rank for _, rank in sorted((one.finished_at, rank) for rank, one in outcomes.items() if one.error)]


def _clean_up(workers: Sequence[WorkerProcess]) -> tuple[list[RankFailure], int]:
    """Let the workers close their process groups; return their failures and the number of groups left."""
    for worker in workers:
        # A worker that died after its outcome is found below, because it does not reply.
        with contextlib.suppress(OSError):
            send(worker.connection, Release())
    replies = _await_replies(workers, CLEANUP_TIMEOUT_S, "end of the clean-up")
    cleans = {rank: message for rank, message in replies.messages.items() if isinstance(message, Clean)}
    unclean = [
        RankFailure(rank, FailureKind.UNCLEAN, "\n".join(message.complaints))
        for rank, message in cleans.items()
        if message.complaints
    ]
    return replies.failures + unclean, sum(message.num_groups_left for message in cleans.values())


@dataclass(frozen=True, slots=True)
class _Replies:
    messages: dict[int, object]
    failures: list[RankFailure]


def _await_replies(workers: Sequence[WorkerProcess], timeout_s: float, what: str) -> _Replies:
    """Wait for one message from every worker; after the first failure, only for a short grace."""
    replies = _Replies({}, [])
    pending = {worker.connection: worker for worker in workers}
    deadline = time.monotonic() + timeout_s
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            worker = pending.pop(connection)
            if not _take_reply(worker, replies):
                deadline = min(deadline, time.monotonic() + GRACE_S)
    limit = f"{timeout_s:g} s, or {GRACE_S:g} s after the first failure of a rank"
    replies.failures.extend(
        worker.interrupt(f"No {what} within {limit}; the stack it was on ends what it wrote.")
        for worker in pending.values()
    )
    return replies


def _take_reply(worker: WorkerProcess, replies: _Replies) -> bool:
    """Record a worker's message, or its death; return whether the worker succeeded."""
    try:
        message = receive(worker.connection)
    except (EOFError, OSError):
        replies.failures.append(worker.death())
        return False
    replies.messages[worker.rank] = message
    return not (isinstance(message, Outcome) and message.error)


def _show_output(report: CallReport) -> None:
    """Print the ranks' output, which the test runner shows if the calling test fails."""
    for rank, output in enumerate(report.outputs):
        for line in output.splitlines():
            print(f"[rank {rank}] {line}")
