"""Start the training script under torchrun, wait for it, and read its log."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.injection import Fault, read_notes

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0
NUM_ITERATIONS = 8
SAVE_INTERVAL = 3
FLAGS = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --num-layers 2 --hidden-size 12 "
    "--num-attention-heads 2 --seq-length 9 --micro-batch-size 2 --global-batch-size 12 --lr 0.01 --log-interval 1 "
    f"--eval-iters 0 --num-tokens-to-generate 0 --train-iters {NUM_ITERATIONS} --save-interval {SAVE_INTERVAL} "
    "--keep-last 2 --distributed-backend gloo"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job.

    Attributes:
        status: exit status of torchrun. output: the text that all ranks wrote.
        losses: by iteration, as logged; a resumed run overwrites the iterations that it repeats.
        has_died: whether the fault happened. steps_redone: number of repeated iterations.
        recovery_s: from the kill to the end of the first iteration after it; None without a kill.
    """

    status: int
    output: str
    losses: dict[int, float]
    has_died: bool
    steps_redone: int
    recovery_s: float | None


@dataclass(frozen=True, slots=True)
class Job:
    """A run of the training script in its own folder.

    Attributes:
        folder: holds the text, the notes and, in ``run``, the checkpoints and the log.
        num_ranks: processes to start. max_restarts: how often torchrun restarts them.
        fault: the fault to inject. more_flags: flags for the script, after the common ones.
    """

    folder: Path
    num_ranks: int = 2
    max_restarts: int = 0
    fault: Fault | None = None
    more_flags: Sequence[str] = ()

    def run(self, while_running: "Callable[[Job, subprocess.Popen[str]], None] | None" = None) -> Outcome:
        """Run the job to its end; ``while_running`` may do something to it meanwhile."""
        (self.folder / "text").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 40)
        with subprocess.Popen(
            self._command(),
            cwd=self.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                if while_running is not None:
                    while_running(self, process)
                output, _ = process.communicate(timeout=TIMEOUT_S)
            except BaseException:
                # torchrun ends its ranks, which lead their own sessions.
                process.terminate()
                process.communicate(timeout=TIMEOUT_S)
                raise
        return self._outcome(process.returncode, output)

    @property
    def notes(self) -> Path:
        """The file to which ranks write events."""
        return self.folder / "notes.jsonl"

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until an iteration is done."""
        deadline = time.monotonic() + TIMEOUT_S
        while not any(event["iteration"] >= iteration for event in read_notes(self.notes)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"iteration {iteration} was not done within {TIMEOUT_S:.0f} s")
            time.sleep(0.05)

    def _command(self) -> list[str]:
        fault = self.fault or Fault("none", 0, 0)
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {self.num_ranks}".split()
        restarts = f"--max-restarts {self.max_restarts} --monitor-interval 0.1".split()
        words = [str(self.notes), fault.moment, str(fault.iteration), str(fault.rank)]
        flags = [*FLAGS.split(), "--data-path", "text", "--save", "run", *self.more_flags]
        return [sys.executable, *torchrun, *restarts, "-m", "tests.faults.faulty_gpt", *words, *flags]

    def _outcome(self, status: int, output: str) -> Outcome:
        log = self.folder / "run" / "log.jsonl"
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        losses = {row["iteration"]: row["lm_loss"] for row in rows if "lm_loss" in row}
        events = read_notes(self.notes)
        stepped = [event["iteration"] for event in events if event["event"] == "stepped"]
        died = next((position for position, event in enumerate(events) if event["event"] == "died"), None)
        recovery = None
        if died is not None and (after := [event for event in events[died + 1 :] if event["event"] == "stepped"]):
            recovery = _recovered(events[:died], after)["time"] - events[died]["time"]
        return Outcome(status, output, losses, died is not None, len(stepped) - len(set(stepped)), recovery)


def _recovered(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first step of the restarted run: one that was done before, or else the first after the fault.

    A rank that takes another branch ends its step like any other; that is no recovery.
    """
    done = max((event["iteration"] for event in before if event["event"] == "stepped"), default=0)
    for event in after:
        if event["iteration"] <= done:
            return event
        done = event["iteration"]
    return after[0]


def environment() -> dict[str, str]:
    """Return the variables that ranks of the training script run with."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "examples"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return environment
