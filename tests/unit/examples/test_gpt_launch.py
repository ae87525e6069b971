"""Ranks, devices and the one message of a failed launch."""

import json
import time
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from gpt.launch import Ranks, report_error, select_device
from megatron_fsdp import ConfigError


@pytest.mark.parametrize(
    ("backend", "num_gpus", "device"),
    [
        (None, 0, "cpu"),
        (None, 2, "cuda:1"),
        ("gloo", 2, "cpu"),
        ("nccl", 2, "cuda:1"),
        ("nccl", 0, ""),
        (None, 1, ""),
    ],
)
def test_the_backend_decides_the_device_and_each_rank_needs_one_gpu(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, num_gpus: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    if device:
        assert select_device(backend, Ranks(rank=3, local_rank=1, size=4)) == torch.device(device)
    else:
        with pytest.raises(
            ConfigError, match=rf"--distributed-backend nccl .* local rank 1 found {num_gpus}\. fix: .*gloo"
        ):
            select_device(backend, Ranks(rank=3, local_rank=1, size=4))


def test_rank_0_prints_an_error_at_once_others_later_and_torchrun_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(0, 0, 1)
    assert report_error(ConfigError("found 3"), Ranks(0, 0, 2)) == 2
    assert (capsys.readouterr().err, waits) == ("pretrain_gpt.py: error: found 3\n", [])
    variables = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert report_error(ConfigError("found 3"), Ranks.from_environment()) == 2
    assert (capsys.readouterr().err, waits) == ("pretrain_gpt.py: error (rank 5): found 3\n", [60.0])
    # The format that torch's own ``record`` writes; torchrun warns about others.
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "found 3"


def test_a_number_of_ranks_without_a_launcher_is_an_error_and_no_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert pretrain_gpt.main([]) == 2
    assert "RANK is None and WORLD_SIZE is 64. fix: set both, or start with torchrun" in capsys.readouterr().err
    assert Ranks.from_environment(is_fake=True) == Ranks(0, 0, 64)
