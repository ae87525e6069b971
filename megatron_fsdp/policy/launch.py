"""Launch: find the job that this process belongs to, from the environment variables of launchers."""

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
    """The position of this process in its job.

    Attributes:
        rank: 0 <= rank < size. local_rank: its index on its machine; None if unknown.
    """

    rank: int
    size: int
    local_rank: int | None = None


# Launchers that do not set PyTorch's variables, with their own: rank, sizes, local rank. mpirun may run inside a SLURM
# job; SLURM's variables are then those of mpirun itself. A SLURM job may have more tasks than the step that started
# this process, for instance in an interactive shell.
_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),
    ("SLURM", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
)
_ALONE = "To train in this process alone, set WORLD_SIZE=1"


def join_job(device_type: str) -> None:
    """Initialise ``torch.distributed`` for the job of this process, or for this process alone."""
    place = job_place(os.environ)
    if place is None:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
        return
    if place.local_rank is not None and device_type == "cuda":
        # Modulo, because under srun --gpus-per-task each process sees only its own device.
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    dist.init_process_group(rank=place.rank, world_size=place.size)


def job_place(environment: Mapping[str, str]) -> JobPlace | None:
    """Return this process's position in its job; None if it was started alone.

    ``RANK`` and ``WORLD_SIZE`` (torchrun, Kubernetes PyTorchJob) take precedence over the variables of srun and mpirun.
    """
    rank, size = environment.get("RANK"), environment.get("WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing and size == "1" and rank in (None, "", "0"):
        return None
    launcher, place = _launched_by(environment)
    if rank or (size and place is None):
        if not (rank and size):
            raise ConfigError(
                f"RANK is {rank} and WORLD_SIZE is {size}. fix: set both, or start with torchrun. {_ALONE}"
            )
        local_rank = environment.get("LOCAL_RANK")
        launcher = "RANK and WORLD_SIZE"
        place = JobPlace(int(rank), int(size), None if local_rank is None else int(local_rank))
    if place is None and multiprocessing.parent_process() is not None and size != "1":
        raise ConfigError(
            "fully_shard without a mesh in a process that multiprocessing started, and nothing says whether it is one "
            "of several. fix: call torch.distributed.init_process_group(init_method=..., rank=..., world_size=...) "
            f"before it (docs/launch.md). {_ALONE}"
        )
    if place is not None and missing:
        raise ConfigError(
            f"this is process {place.rank} of {place.size}, according to {launcher}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so the processes cannot find each other. fix: export the "
            "name of the machine of process 0 and a free port there, start with torchrun, or call "
            f"torch.distributed.init_process_group before fully_shard (docs/launch.md). {_ALONE}"
        )
    return place


def _launched_by(environment: Mapping[str, str]) -> tuple[str, JobPlace | None]:
    """Return the launcher that started this process as one of several, and the position that it assigned."""
    for name, of_rank, of_sizes, of_local_rank in _LAUNCHERS:
        size = next((environment[each] for each in of_sizes if environment.get(each)), "1")
        rank, local_rank = environment.get(of_rank), environment.get(of_local_rank)
        if rank and int(size) > 1:
            return f"{name} ({of_rank})", JobPlace(int(rank), int(size), int(local_rank) if local_rank else None)
    return "", None
