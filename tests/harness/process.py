"""Start, message, read and end one worker process, from the calling process."""

import contextlib
import functools
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.context import ForkContext, ForkServerContext

from tests.harness import worker
from tests.harness.failures import FailureKind, RankFailure, describe_exit
from tests.harness.messages import Ready, Task, receive, send

START_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 5.0
# The imports of most tests take seconds of processor time; a fork of a process with these imports takes milliseconds.
PRELOADED = "tests.harness.preloaded"


class WorkerProcess:
    """A process that runs ``tests.harness.worker``; its stdout and stderr go to one temporary file."""

    def __init__(self, rank: int, store_port: int) -> None:
        """Start the process without waiting for it.

        Args:
            rank: the worker's rank in every call.
            store_port: port of the ``TCPStore`` where the ranks of a call meet.
        """
        self.rank = rank
        self.connection, theirs = _context().Pipe()
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  (open as long as the worker lives; end() closes it)
        self._output_start = 0
        with theirs:
            start = worker.Start(theirs, store_port, rank, self._output.name, _environment())
            self.process = _context().Process(target=worker.main, args=(start,), daemon=True)
            self.process.start()

    def wait_until_ready(self) -> None:
        """Wait until the worker takes tasks; raises RuntimeError with its output when it does not come up."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll(START_TIMEOUT_S) and isinstance(receive(self.connection), Ready):
                return
        raise RuntimeError(
            f"worker {self.rank} of the rank pool was not ready within {START_TIMEOUT_S:.0f} s, or died; "
            f"it wrote:\n{self.output()}"
        )

    def has_ended(self) -> bool:
        """Tell between two calls, when a worker says nothing, whether it has closed its connection."""
        return self.connection.closed or self.connection.poll()

    def begin(self, task: Task) -> None:
        """Send a task; a worker that has just died is noticed when its outcome is read."""
        self._output_start = os.fstat(self._output.fileno()).st_size
        with contextlib.suppress(OSError):
            send(self.connection, task)

    def output(self) -> str:
        """Return the worker's output since its latest task began, or since its start."""
        descriptor = self._output.fileno()
        size = os.fstat(descriptor).st_size - self._output_start
        # pread leaves alone the file position, which this process shares with the worker that writes there.
        return os.pread(descriptor, size, self._output_start).decode(errors="replace")

    def death(self) -> RankFailure:
        """Return the failure of a worker whose connection has closed."""
        self.process.join(EXIT_TIMEOUT_S)
        exit_code = self.process.exitcode
        if exit_code is None:
            return self.interrupt("It closed its connection but did not exit; the stack it was on ends what it wrote.")
        return RankFailure(self.rank, FailureKind.DIED, describe_exit(exit_code), self.output(), exit_code)

    def interrupt(self, waited_for: str) -> RankFailure:
        """End a worker that hangs and return its failure; the output ends with the stack on which it hung.

        Args:
            waited_for: a sentence that names the missing message and the time waited.
        """
        self.process.terminate()
        self.process.join(EXIT_TIMEOUT_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        return RankFailure(self.rank, FailureKind.STUCK, waited_for, self.output())

    def end(self) -> None:
        """Kill the worker, which keeps nothing worth saving, and give up its file and connection."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self._output.close()


@functools.cache
def _context() -> ForkContext | ForkServerContext:
    """Return the context that starts workers: forks of a process with the imports preloaded, or of this process."""
    if os.environ.get("RANKS_START_METHOD") == "fork":
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # gloo otherwise connects through whatever address the host name resolves to, if it does.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return environment
