"""Ranks, devices and the one message of a failed launch."""

import json
import time
from pathlib import Path

import pytest
import torch

from gpt.launch import Ranks, report_error, select_device
from megatron_fsdp import ConfigError

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every test outside of torchrun."""
    for name in (*TORCHRUN, "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list that collects the seconds that the code under test would have waited."""
    collected: list[float] = []
    monkeypatch.setattr(time, "sleep", collected.append)
    return collected


def test_a_plain_start_is_one_rank_of_one() -> None:
    assert Ranks.from_environment() == Ranks(rank=0, local_rank=0, size=1)


def test_torchrun_s_variables_say_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(rank=5, local_rank=1, size=8)


@pytest.mark.parametrize(
    ("backend", "num_gpus", "device"),
    [(None, 0, "cpu"), (None, 2, "cuda:1"), ("gloo", 2, "cpu"), ("nccl", 2, "cuda:1")],
)
def test_the_backend_decides_the_device_and_the_hardware_the_backend(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, num_gpus: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert select_device(backend, Ranks(rank=3, local_rank=1, size=4)) == torch.device(device)


@pytest.mark.parametrize(("backend", "num_gpus"), [("nccl", 0), ("nccl", 1), (None, 1)])
def test_a_rank_without_a_gpu_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, num_gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=f"--distributed-backend nccl .* local rank 1 found {num_gpus}; .*gloo"):
        select_device(backend, Ranks(rank=1, local_rank=1, size=2))


def test_rank_0_says_the_error_at_once(capsys: pytest.CaptureFixture[str], waits: list[float]) -> None:
    assert report_error(ConfigError("found 3"), Ranks(0, 0, 2)) == 2
    assert capsys.readouterr().err == "pretrain_gpt.py: error: found 3\n"
    assert waits == []


def test_other_ranks_give_rank_0_time_to_speak_and_end_the_job(
    capsys: pytest.CaptureFixture[str], waits: list[float]
) -> None:
    assert report_error(ConfigError("found 3"), Ranks(1, 1, 2)) == 2
    assert capsys.readouterr().err == "pretrain_gpt.py: error (rank 1): found 3\n"
    assert sum(waits) >= 5


def test_torchrun_learns_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_error(ConfigError("found 3"), Ranks(0, 0, 2))
    # The format that torch's own ``record`` writes; torchrun warns about others.
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "found 3"
