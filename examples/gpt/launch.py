"""Ranks and devices, from torchrun's environment or for one plain process; errors said once."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it, but untyped
from torch.distributed.rendezvous import rendezvous

from megatron_fsdp import AgreementError, ConfigError
from megatron_fsdp.command_parser import record_error

_GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others; a plain ``python`` start is one rank of one."""

    rank: int
    local_rank: int
    size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """Return what torchrun says, or a single rank."""
        return cls(*(int(os.environ.get(name, default)) for name, default in _TORCHRUN_VARIABLES))

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes files."""
        return self.rank == 0


_TORCHRUN_VARIABLES = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))


def select_device(backend: str | None, ranks: Ranks) -> torch.device:
    """Return the device of this rank: its GPU for nccl, the CPU for gloo, by what is there for None.

    Raises:
        ConfigError: ``--distributed-backend nccl`` without a GPU for each rank of this machine.
    """
    num_gpus = torch.cuda.device_count()
    if backend == "gloo" or (backend is None and num_gpus == 0):
        return torch.device("cpu")
    if ranks.local_rank >= num_gpus:
        raise ConfigError(
            f"--distributed-backend nccl needs a GPU for each rank: local rank {ranks.local_rank} found {num_gpus}; "
            f"start fewer ranks (--nproc-per-node) or use --distributed-backend gloo, which trains on the CPU"
        )
    return torch.device("cuda", ranks.local_rank)


def start_process_group(args: argparse.Namespace, ranks: Ranks, device: torch.device) -> None:
    """Join the other ranks: NCCL on GPUs, gloo on CPUs. A collective that waits longer than the timeout fails.

    With ``--fake-process-group`` there are no others, and collectives return at once with whatever is in memory.
    """
    if args.fake_process_group:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
        dist.init_process_group("fake", store=fake.FakeStore(), rank=ranks.rank, world_size=ranks.size)
        return
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, device_id = "nccl", device
    else:
        backend, device_id = "gloo", None
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it restarts the ranks, with the addresses of those that died still in it.
        attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} on {size} ranks"
        store = PrefixStore(attempt, store)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size, device_id=device_id)
    else:
        # Port 0: any free one, so that plain starts side by side do not collide.
        address = "tcp://127.0.0.1:0"
        dist.init_process_group(
            backend, timeout=timeout, init_method=address, rank=0, world_size=1, device_id=device_id
        )


def report_error(error: Exception, ranks: Ranks) -> int:
    """Say the error once for all ranks, and return the exit status.

    Most errors hit every rank alike, and torchrun ends all ranks as soon as one has ended. So the others wait before
    they speak: rank 0's message is never cut off, and an error that only they have is still said.
    """
    # Where ranks disagree, all of them have said so already.
    if not ranks.is_main and not isinstance(error, AgreementError):
        time.sleep(_GRACE_SECONDS)
    where = "" if ranks.is_main else f" (rank {ranks.rank})"
    print(f"pretrain_gpt.py: error{where}: {error}", file=sys.stderr, flush=True)
    # torchrun's report of forty lines ends with it, and examples/start_ranks.py ends without the report.
    record_error(str(error))
    return 2


def precision_line(*, is_bf16: bool, device: torch.device) -> str:
    """Return one line on the precision of the computation."""
    if device.type != "cpu":
        return f"computing in {'bf16' if is_bf16 else 'fp32 (--bf16 computes in bf16)'}"
    if is_bf16:
        return "warning: computing in bf16 on a CPU; without bf16 matrix units this is far slower than fp32"
    return "computing in fp32: many CPUs have no bf16 matrix units (--bf16 computes in bf16 all the same)"
