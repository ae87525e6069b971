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
        rank: 0 <= rank < size. local_rank: its number on its machine; None where nothing says.
    """

    rank: int
    size: int
    local_rank: int | None = None


# Launchers that are not made for PyTorch, and the variables by which each numbers the processes that it starts: rank,
# sizes, local rank. mpirun may have been called inside of a SLURM job, whose variables then are those of mpirun itself;
# a SLURM job may have more tasks than the step that this process is of, an interactive shell for instance.
_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),
    ("SLURM", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
)
_ALONE = "To train in this process alone, set WORLD_SIZE=1"


def join_job(device_type: str) -> None:
    """Initialise ``torch.distributed`` for the job this process was started for; alone where it was started alone."""
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
    rank, size = environment.get("RANK"), environment.get("WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing and size == "1" and rank in (None, "", "0"):
        return None
    launcher, place = _launched_by(environment)
    if rank or (size and place is None):
        if not (rank and size):
            raise ConfigError(f"RANK is {rank} and WORLD_SIZE is {size}: set both, or start with torchrun. {_ALONE}")
        local_rank = environment.get("LOCAL_RANK")
        launcher = "RANK and WORLD_SIZE"
        place = JobPlace(int(rank), int(size), None if local_rank is None else int(local_rank))
    if place is None and multiprocessing.parent_process() is not None and size != "1":
        raise ConfigError(
            "fully_shard without a mesh in a process that multiprocessing started, and nothing says whether it is one "
            "of several: call torch.distributed.init_process_group(init_method=..., rank=..., world_size=...) before "
            f"it (docs/launch.md). {_ALONE}"
        )
    if place is not None and missing:
        raise ConfigError(
            f"this is process {place.rank} of {place.size}, according to {launcher}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so the processes cannot find each other: export the name "
            "of the machine of process 0 and a free port there, start with torchrun, or call "
            f"torch.distributed.init_process_group before fully_shard (docs/launch.md). {_ALONE}"
        )
    return place


def _launched_by(environment: Mapping[str, str]) -> tuple[str, JobPlace | None]:
    """Return the launcher that started this process as one of several, and the place that it gave it."""
    for name, of_rank, of_sizes, of_local_rank in _LAUNCHERS:
        size = next((environment[each] for each in of_sizes if environment.get(each)), "1")
        rank, local_rank = environment.get(of_rank), environment.get(of_local_rank)
        if rank and int(size) > 1:
            return f"{name} ({of_rank})", JobPlace(int(rank), int(size), int(local_rank) if local_rank else None)
    return "", None
