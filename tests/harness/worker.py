"""Run a worker of the pool: wait for a task, run it as one rank of a new process group, report, and clean up."""

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed has them, but untyped

from tests.harness.messages import Call, Clean, Outcome, Ready, Release, Task, receive, send

SEED = 20_260_101
# The most characters of a variable shown with a failed assertion.
MAX_REPR = 500


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments of a worker's start.

    Attributes:
        connection: to the calling process.
        store_port: port of the calling process's ``TCPStore`` on 127.0.0.1.
        rank: this worker's rank in every call it takes part in.
        output: path of the file for its stdout and stderr.
        environment: its environment variables.
    """

    connection: Connection
    store_port: int
    rank: int
    output: str
    environment: dict[str, str]


def main(start: Start) -> None:
    """Serve tasks until the other end of the connection closes."""
    _prepare_process(start)
    complaints = _record_swallowed_exceptions()
    environment = dict(os.environ)
    store = TCPStore("127.0.0.1", start.store_port, is_master=False)
    num_modules = _freeze_what_was_imported(0)
    with contextlib.suppress(EOFError), start.connection as connection:
        send(connection, Ready())
        while True:
            task = receive(connection)
            assert isinstance(task, Task)
            outcome = _run(task, start.rank, store)
            closed = []
            if outcome.error is not None:
                # Closing the connections now makes peers that wait for this rank fail at once instead of timing out.
                closed = _close_process_groups()
            send(connection, outcome)
            release = receive(connection)
            assert isinstance(release, Release)
            closed += _restore(environment)
            num_modules = _freeze_what_was_imported(num_modules)
            send(connection, Clean(tuple(complaints), sum(group() is not None for group in closed)))
            complaints.clear()


def _prepare_process(start: Start) -> None:
    with open(start.output, "ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # Nothing that a rank wrote before it died may be lost in a buffer.
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w", False), write_through=True) for number in (1, 2))
    os.environ.clear()
    os.environ.update(start.environment)
    torch.set_num_threads(1)
    # Ctrl-C is for the calling process, whose end closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    # SIGTERM prints where a hung rank hangs, then ends it; the handler needs neither the GIL nor a bytecode boundary.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)


def _run(task: Task, rank: int, store: Store) -> Outcome:
    try:
        call = pickle.loads(task.call)
        assert isinstance(call, Call)
        warnings.filters[:] = call.filters  # type: ignore[index]  # a list, which the stubs do not say
        # Filters count for modules that have warned before when such a block begins.
        with warnings.catch_warnings():
            _seed()
            _join(task, rank, store)
            value = pickle.dumps(call.function(*call.args))
    # SystemExit and a test library's own BaseExceptions are failures of the call too, never of the worker.
    except BaseException:
        return Outcome(None, _describe_error(), time.monotonic())
    return Outcome(value, None, time.monotonic())


def _describe_error() -> str:
    """Return the traceback; of an assertion, which has no message on a rank, with the variables where it stands."""
    trace = traceback.format_exc()
    error = sys.exc_info()[1]
    if not isinstance(error, AssertionError) or error.__traceback__ is None:
        return trace
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return trace + "".join(f"    {name} = {_shorten(value)}\n" for name, value in frame.f_locals.items())


def _shorten(value: object) -> str:
    try:
        return repr(value)[:MAX_REPR]
    # A representation that fails must not hide the assertion.
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def _seed() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED % 2**32)
    torch.manual_seed(SEED)


def _join(task: Task, rank: int, store: Store) -> None:
    """Open the call's process group, with the environment variables that torchrun would have set."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_WORLD_SIZE=str(task.world_size),
    )
    device = None
    if "nccl" in task.backend:
        # Bound to its device a group starts its communicator at once, splits it for the groups of a mesh, and has
        # barriers that need not guess.
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        task.backend,
        store=PrefixStore(f"call-{task.call_id}", store),
        rank=rank,
        world_size=task.world_size,
        timeout=datetime.timedelta(seconds=task.timeout_s),
        device_id=device,
    )


def _close_process_groups() -> list["weakref.ref[dist.ProcessGroup]"]:
    """Destroy the process groups, and return those that are still referenced."""
    # Cycles first: a model or mesh that one of them holds may own a reference to a group.
    gc.collect()
    closed = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    if dist.is_initialized():
        dist.destroy_process_group()
    # Groups are called by their number: one that could not be made has been counted, on the ranks that got so far.
    dist.distributed_c10d._world.group_count = 0
    return closed


def _restore(environment: dict[str, str]) -> list["weakref.ref[dist.ProcessGroup]"]:
    """Reset the process after a call; return its process groups, as the function above."""
    closed = _close_process_groups()
    _forget_meshes()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    gc.collect()
    return closed


def _freeze_what_was_imported(num_modules: int) -> int:
    """Exclude imported objects from garbage collection after new imports; return the number of modules.

    Exempt imported objects from collection: they live as long as the process, and a collection takes longer than most
    tests.

    Args:
        num_modules: how many there were before. Garbage is frozen too, so collect it first.
    """
    if len(sys.modules) != num_modules:
        gc.freeze()
    return len(sys.modules)


def _forget_meshes() -> None:
    """Drop what DTensor keeps by mesh.

    An equal mesh of a later call would get this one's, whose groups are closed; and each group that is kept has a
    thread which wakes up a hundred times a second.
    """
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
        importlib.import_module("torch.distributed.tensor._redistribute").clear_redistribute_planner_cache()
        for cached in _caches_of_dtensor(len(sys.modules)):
            cached.cache_clear()


@functools.lru_cache(1)
def _caches_of_dtensor(num_modules: int) -> list["functools._lru_cache_wrapper[object]"]:
    """Return its functions and methods with a cache; looked for anew when more modules have been imported."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.distributed.tensor")]
    found = [each for module in modules for each in vars(module).values()]
    found += [each for owner in found if isinstance(owner, type) for each in vars(owner).values()]
    return [each for each in found if isinstance(each, functools._lru_cache_wrapper)]


def _record_swallowed_exceptions() -> list[str]:
    """Return a list that grows by one traceback per exception which a finalizer or a thread would only print."""
    complaints: list[str] = []

    def record(where: str, kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
        complaints.append(f"{where}:\n{''.join(traceback.format_exception(kind, value, trace))}")

    def unraisable(report: "sys.UnraisableHookArgs") -> None:
        record(f"in {report.object!r}", report.exc_type, report.exc_value, report.exc_traceback)

    def in_thread(report: threading.ExceptHookArgs) -> None:
        record(f"in {report.thread!r}", report.exc_type, report.exc_value, report.exc_traceback)

    sys.unraisablehook = unraisable
    threading.excepthook = in_thread
    return complaints
