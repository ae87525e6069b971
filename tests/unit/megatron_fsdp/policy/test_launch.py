"""The job that a launcher's environment variables describe, and errors that name missing variables."""

import multiprocessing
from unittest import mock

import pytest

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.launch import JobPlace, job_place

MEETING_POINT = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MEETING_POINT}, JobPlace(1, 2, 0)),
        ({"RANK": "0", "WORLD_SIZE": "1", **MEETING_POINT}, JobPlace(0, 1)),
        ({**SRUN, **MEETING_POINT}, JobPlace(5, 8, 1)),
        ({**SRUN, "WORLD_SIZE": "8", **MEETING_POINT}, JobPlace(5, 8, 1)),
        ({**MPIRUN, **MEETING_POINT}, JobPlace(3, 4, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", **MEETING_POINT}, JobPlace(1, 2)),
        # mpirun inside of a SLURM job; torchrun inside of an srun step.
        ({**SRUN, **MPIRUN, **MEETING_POINT}, JobPlace(3, 4, 3)),
        ({**SRUN, "RANK": "9", "WORLD_SIZE": "16", **MEETING_POINT}, JobPlace(9, 16)),
    ],
)
def test_the_place_in_the_job_is_what_the_launcher_says(environment: dict[str, str], place: JobPlace) -> None:
    assert job_place(environment) == place


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        # A shell started by salloc, and one started by srun: the job has several tasks, the step only this process.
        {"SLURM_NTASKS": "8"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_was_started_alone_has_none(environment: dict[str, str]) -> None:
    assert job_place(environment) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "process 1 of 2, according to RANK and WORLD_SIZE, but MASTER_ADDR and MASTER_",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}, "but MASTER_PORT is not set"),
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE is None. fix: set both"),
        ({"WORLD_SIZE": "2"}, "RANK is None and WORLD_SIZE is 2. fix: set both"),
        (SRUN, r"process 5 of 8, according to SLURM \(SLURM_PROCID\), but MASTER_ADDR and MASTER_PORT are not set"),
        (MPIRUN, r"process 3 of 4, according to Open MPI \(OMPI_COMM_WORLD_RANK\), but MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_missing_variables_are_named_with_the_fix(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        job_place(environment)
    assert "WORLD_SIZE=1" in str(caught.value)


def test_a_multiprocessing_child_without_a_job_is_refused_unless_world_size_is_1() -> None:
    with mock.patch.object(multiprocessing, "parent_process", return_value=object()):
        with pytest.raises(ConfigError, match=r"a process that multiprocessing started.*init_process_group"):
            job_place({})
        assert job_place({"WORLD_SIZE": "1"}) is None
        assert job_place({"RANK": "1", "WORLD_SIZE": "2", **MEETING_POINT}) == JobPlace(1, 2)
