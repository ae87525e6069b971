"""Ranks and devices, from the environment of torchrun, srun or mpirun; errors printed once; requests to stop."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore  # torch.distributed has them, but untyped
from torch.distributed.rendezvous import rendezvous

from dbuffer.collectives.waits import wait_for
from megatron_fsdp import AgreementError, ConfigError
from megatron_fsdp.command_parser import record_error
from megatron_fsdp.policy.launch import job_place

# On a busy machine torchrun takes a while to stop the other ranks.
_GRACE_SECONDS = 60.0
_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank and world size of this process; a process that no launcher started is rank 0 of 1."""

    rank: int
    local_rank: int
    size: int

    @classmethod
    def from_environment(cls, *, is_fake: bool = False) -> Ranks:
        """Return the place that torchrun, srun or mpirun gave this process, or a single rank.

        Args:
            is_fake: this process stands for ``WORLD_SIZE`` ranks (``--fake-process-group``).
        Raises:
            ConfigError: the variables of a launcher are incomplete.
        """
        if is_fake:
            return cls(int(os.environ.get("RANK", "0")), 0, int(os.environ.get("WORLD_SIZE", "1")))
        place = job_place(os.environ)
        if place is None:
            return cls(0, 0, 1)
        local_rank = place.local_rank
        if local_rank is None:
            local_rank = place.rank % max(torch.cuda.device_count(), 1)
        return cls(place.rank, local_rank, place.size)

    @property
    def is_main(self) -> bool:
        """Return whether this rank prints and writes files."""
        return self.rank == 0


def select_device(backend: str | None, ranks: Ranks) -> torch.device:
    """Return this rank's device: a GPU for nccl, the CPU for gloo, and for None a GPU if the machine has one.

    Raises:
        ConfigError: the backend is nccl and this rank has no GPU.
    """
    num_gpus = torch.cuda.device_count()
    if backend == "gloo" or (backend is None and num_gpus == 0):
        return torch.device("cpu")
    if ranks.local_rank >= num_gpus:
        raise ConfigError(
            f"--distributed-backend nccl needs a GPU for each rank: local rank {ranks.local_rank} found {num_gpus}. "
            "fix: start fewer ranks, or use --distributed-backend gloo, which trains on the CPU"
        )
    return torch.device("cuda", ranks.local_rank)


def start_process_group(args: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
    """Join the other ranks: NCCL on GPUs, gloo on CPUs and for offloaded parameters.

    With ``--fake-process-group`` this process is alone.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    if args.fake_process_group:
        fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
        dist.init_process_group("fake", store=fake.FakeStore(), rank=ranks.rank, world_size=ranks.size)
        return
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    options: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.size}
    if ranks.size > 1:
        # When torchrun restarts the ranks, its store still has the addresses of the dead ones: use another prefix.
        attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} on {ranks.size} ranks"
        options["store"] = PrefixStore(attempt, next(rendezvous("env://", ranks.rank, ranks.size, timeout=timeout))[0])
    else:
        # No address: under torchrun, PyTorch would look for torchrun's store there, even for one rank.
        options["store"] = HashStore()
    options |= {"backend": "cpu:gloo,cuda:nccl", "device_id": device} if is_cuda else {"backend": "gloo"}
    dist.init_process_group(timeout=timeout, **options)


def report_error(error: Exception, ranks: Ranks) -> int:
    """Print the error once for all ranks, and return the exit status.

    Most errors occur on every rank, and torchrun stops all ranks as soon as one has ended. The other ranks therefore
    wait until rank 0 has printed its message, and print errors that rank 0 does not have.
    """
    # In an AgreementError or MeshError each rank has the same message.
    if not ranks.is_main and not isinstance(error, AgreementError):
        time.sleep(_GRACE_SECONDS)
    where = "" if ranks.is_main else f" (rank {ranks.rank})"
    print(f"pretrain_gpt.py: error{where}: {error}", file=sys.stderr, flush=True)
    # torchrun's report of forty lines ends with it, and examples/start_ranks.py ends without the report.
    record_error(str(error))
    return 2


class StopSignal:
    """Context that records SIGTERM and SIGINT (Ctrl-C); a second signal of the same kind has its usual effect.

    torchrun sends SIGTERM to all ranks when it is stopped, and to the other ranks when one has failed. Cluster
    schedulers send it before they take a machine away. Ctrl-C reaches only torchrun, which forwards it.
    """

    def __init__(self) -> None:
        # The signal that this rank got, and the one that any rank had got at the last look.
        self._received = self._agreed = 0
        self._previous: dict[int, Any] = {}
        # The flag is a CPU tensor with its own gloo group, so that it does not wait for the GPU.
        has_others = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
        self._group = dist.new_group(backend="gloo", group_desc="stop signal") if has_others else None

    @property
    def received(self) -> str:
        """The name of the signal that this rank, or at the last look any rank, got; empty for none."""
        number = self._received or self._agreed
        return _NAMES[signal.Signals(number)] if number else ""

    def is_received_anywhere(self) -> bool:
        """Return whether any rank got the signal so far; all ranks call it and get one answer.

        A signal that comes while the ranks exchange theirs counts in the next call.
        """
        number = torch.tensor(self._received, dtype=torch.int32)
        if self._group is not None:
            wait_for(dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        self._agreed = int(number)
        return self._agreed > 0

    def __enter__(self) -> StopSignal:
        self._previous = {number: signal.signal(number, self._receive) for number in _NAMES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, self._previous[number])
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            # Write to the file descriptor: the interrupted code may be using Python's buffer.
            os.write(2, b"\nCtrl-C: the step under way is finished first; Ctrl-C again ends the run at once\n")
