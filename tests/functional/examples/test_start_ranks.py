"""Ranks and signals: one message if a rank reports an error, torchrun's report otherwise, and all ranks end."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dbuffer.collectives.waits import wait_for
from gpt.launch import Ranks, StopSignal, start_process_group
from tests.functional.megatron_fsdp.policy.test_launch import LAUNCHERS, free_port, numbered_by
from tests.harness import run_ranks

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, str(ROOT / "examples/start_ranks.py"), "--standalone", "--nproc-per-node"]
SAYS_WHY = """\
from gpt.launch import Ranks, report_error
from megatron_fsdp import ConfigError
raise SystemExit(report_error(ConfigError("found 3"), Ranks.from_environment()))
"""
STARTS = """\
from argparse import Namespace
import torch
from gpt.launch import Ranks, start_process_group
options = Namespace(fake_process_group=False, distributed_timeout_minutes=1)
start_process_group(options, Ranks.from_environment(), torch.device("cpu"))
print(torch.distributed.get_world_size())
"""
ENDS_WHEN_ASKED = """\
import os, time
from gpt.launch import StopSignal
rank = os.environ["RANK"]
with StopSignal() as stop:
    open(f"ready-{rank}", "w").close()
    while not stop.received:
        time.sleep(0.01)
    open(f"ended-{rank}", "w").write(stop.received)
"""


@contextmanager
def started(folder: Path, code: str, num_ranks: int = 2) -> "Iterator[subprocess.Popen[str]]":
    """Run the code on some ranks, which end with the block at the latest."""
    (folder / "script.py").write_text(code)
    path = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "examples"))
    environment = {**os.environ, "PYTHONPATH": path}
    command, pipe = [*COMMAND, str(num_ranks), "script.py"], subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=pipe, stderr=pipe) as job:
        try:
            yield job
        finally:
            job.terminate()


def test_one_rank_under_torchrun_is_a_job_of_one(tmp_path: Path) -> None:
    with started(tmp_path, STARTS, num_ranks=1) as job:
        said, errors = job.communicate(timeout=300)
    assert (said, job.returncode) == ("1\n", 0), errors


def test_an_error_that_every_rank_has_is_one_line(tmp_path: Path) -> None:
    with started(tmp_path, SAYS_WHY) as job:
        _, errors = job.communicate(timeout=300)
    assert (errors, job.returncode) == ("pretrain_gpt.py: error: found 3\n", 2)


def test_a_rank_that_dies_without_a_word_is_reported_by_torchrun(tmp_path: Path) -> None:
    with started(tmp_path, "raise SystemExit(7)") as job:
        _, errors = job.communicate(timeout=300)
    assert job.returncode != 0
    assert "ChildFailedError" in errors
    assert "exitcode  : 7" in errors


def test_ctrl_c_lets_the_ranks_end_and_is_no_error(tmp_path: Path) -> None:
    with started(tmp_path, ENDS_WHEN_ASKED) as job:
        while job.poll() is None and not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        # A terminal sends the signal to torchrun alone: each rank leads its own session.
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=300)
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == ["Ctrl-C"] * 2
    assert (job.returncode, errors.count("Ctrl-C: the step under way is finished first")) == (130, 1)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """A shell starts background jobs, and the processes that they start, with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_a_signal_is_noted_and_a_second_one_goes_where_the_first_would_have_gone() -> None:
    with StopSignal() as stop:
        assert (stop.is_received_anywhere(), stop.received) == (False, "")
        signal.raise_signal(signal.SIGTERM)
        assert (stop.is_received_anywhere(), stop.received) == (True, "SIGTERM")
        signal.raise_signal(signal.SIGINT)
        assert stop.received == "Ctrl-C"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def stop_the_last_rank(number: int) -> tuple[bool, bool, str]:
    with StopSignal() as stop:
        before = stop.is_received_anywhere()
        if dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(number)
        return before, stop.is_received_anywhere(), stop.received


def signal_during_the_exchange() -> list[bool]:
    rank = dist.get_rank()

    def wait_and_signal(work: dist.Work) -> None:
        wait_for(work)
        if rank == 0:
            signal.raise_signal(signal.SIGTERM)

    with StopSignal() as stop:
        with mock.patch("gpt.launch.wait_for", wait_and_signal):
            first = stop.is_received_anywhere()
        return [first, stop.is_received_anywhere()]


def test_a_signal_during_the_exchange_stops_all_ranks_at_the_next_one() -> None:
    assert run_ranks(2, signal_during_the_exchange) == [[False, True]] * 2


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_all_ranks_stop_when_one_is_asked_to(number: int, name: str) -> None:
    assert run_ranks(3, stop_the_last_rank, number) == [(False, True, name)] * 3


def start_under(launcher: str, port: int) -> tuple[Ranks, float]:
    """Return this rank's place by a launcher's variables, and a sum over the ranks of the script's process group."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update({**numbered_by(launcher, rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    ranks, args = Ranks.from_environment(), Namespace(fake_process_group=False, distributed_timeout_minutes=1)
    start_process_group(args, ranks, torch.device("cpu"))
    number = torch.tensor(10.0**rank)
    dist.all_reduce(number)
    return ranks, number.item()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_processes_of_a_launcher_are_the_ranks_of_one_job(launcher: str) -> None:
    assert run_ranks(2, start_under, launcher, free_port()) == [(Ranks(rank, rank, 2), 11.0) for rank in range(2)]
