"""The script of the launch page joins the job of each launcher, and trains one model there."""

import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = re.findall(r"```python\n(.*?)```", (ROOT / "docs/launch.md").read_text(encoding="utf-8"), re.DOTALL)[0]
# The second of two processes as numbered by each launcher, as (rank, size, local rank).
LAUNCHERS = {
    "environment variables": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def numbered_by(launcher: str, rank: int) -> dict[str, str]:
    return dict(zip(LAUNCHERS[launcher], (str(rank), "2", str(rank)), strict=True))


def run_script(launcher: str, port: int) -> tuple[int, float, float]:
    """Run the page's script as one of two processes; return its world's size, loss and the norm of its weights."""
    rank = dist.get_rank()
    # Both ranks have created the harness's group before either ends it.
    dist.barrier()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(numbered_by(launcher, rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(1)
    body, end = SCRIPT.rsplit("torch.distributed.destroy_process_group()", 1)
    assert not end.strip()
    names: dict[str, object] = {}
    exec(body, names)
    model, loss = names["model"], names["loss"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(loss, torch.Tensor)
    size = dist.get_world_size()
    norm = sum(float(value.full_tensor().square().sum()) for value in model.state_dict().values())
    return size, loss.item(), norm


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_processes_of_a_launcher_train_one_model_together(launcher: str) -> None:
    (size, loss, norm), (other_size, other_loss, other_norm) = run_ranks(2, run_script, launcher, free_port())
    assert size == other_size == 2
    assert loss != other_loss
    assert norm == other_norm
