"""Launch: the job that this process is part of, by what launchers leave in the environment."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_fsdp.errors import ConfigError

__all__ = ["JobPlace", "job_place", "join_job"]


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where this process stands in its job.

    Attributes:
        rank: 0 <= rank < size. local_rank: its number on its machine; None where nobody says.
    """

    rank: int
    size: int
    local_rank: int | None = None


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables by which a launcher that is not made for PyTorch numbers the processes it starts."""

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_rank: str


# mpirun may have been called inside of a SLURM job, whose variables then are those of mpirun itself.
_LAUNCHERS = (
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),
    _Launcher("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK"),
    _Launcher("MPICH", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),
    # A job may have more tasks than the step that this process is of, an interactive shell for instance.
    _Launcher("SLURM", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
)
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_ALONE = "To train in this process alone, set WORLD_SIZE=1"


def join_job(device_type: str) -> None:
    """Initialise ``torch.distributed`` for the job this process was started for; alone where nobody started one."""
    place = job_place(os.environ)
    if place is None:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
        return
    if place.local_rank is not None and device_type == "cuda":
        # Under srun --gpus-per-task each process sees a device of its own.
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    dist.init_process_group(rank=place.rank, world_size=place.size)


def job_place(environment: Mapping[str, str]) -> JobPlace | None:
    """Return this process's place among those that were started together; None where it was started alone.

    ``RANK`` and ``WORLD_SIZE`` (torchrun, a PyTorchJob of Kubernetes) count first, then what srun and mpirun set.
    """
    named = {name: environment[name] for name in ("RANK", "WORLD_SIZE") if environment.get(name)}
    missing = [name for name in _RENDEZVOUS if not environment.get(name)]
    if missing and named.get("WORLD_SIZE") == "1" and named.get("RANK", "0") == "0":
        return None
    launcher, place = _launched_by(environment)
    if "WORLD_SIZE" in named and ("RANK" in named or place is None):
        launcher, place = "RANK and WORLD_SIZE", _named_place(named, environment)
    elif "RANK" in named:
        raise ConfigError(
            f"RANK={named['RANK']} is set, but not WORLD_SIZE; set both, or start with torchrun. {_ALONE}"
        )
    if place is None:
        _refuse_a_child(environment)
        return None
    if missing:
        raise ConfigError(
            f"this is process {place.rank} of {place.size}, according to {launcher}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so the processes cannot find each other: export the name "
            "of the machine of process 0 and a free port there, start with torchrun, or call "
            f"torch.distributed.init_process_group before fully_shard (docs/launch.md). {_ALONE}"
        )
    return place


def _named_place(named: Mapping[str, str], environment: Mapping[str, str]) -> JobPlace:
    if "RANK" not in named:
        raise ConfigError(
            f"WORLD_SIZE={named['WORLD_SIZE']} is set, but not RANK; set both, or start with torchrun. {_ALONE}"
        )
    local_rank = environment.get("LOCAL_RANK")
    return JobPlace(int(named["RANK"]), int(named["WORLD_SIZE"]), None if local_rank is None else int(local_rank))


def _launched_by(environment: Mapping[str, str]) -> tuple[str, JobPlace | None]:
    """Return the launcher that started this process as one of several, and the place that it gave it."""
    for launcher in _LAUNCHERS:
        size = next((environment[name] for name in launcher.sizes if environment.get(name)), "1")
        rank, local_rank = environment.get(launcher.rank), environment.get(launcher.local_rank)
        if rank and int(size) > 1:
            source = f"{launcher.name} ({launcher.rank})"
            return source, JobPlace(int(rank), int(size), int(local_rank) if local_rank else None)
    return "", None


def _refuse_a_child(environment: Mapping[str, str]) -> None:
    """Refuse to train alone what may be one of several processes that ``torch.multiprocessing.spawn`` started."""
    if multiprocessing.parent_process() is None or environment.get("WORLD_SIZE") == "1":
        return
    raise ConfigError(
        "fully_shard without a mesh in a process that multiprocessing started, and nothing says whether it is one of "
        "several: call torch.distributed.init_process_group(init_method=..., rank=..., world_size=...) before it "
        f"(docs/launch.md). {_ALONE}"
    )
