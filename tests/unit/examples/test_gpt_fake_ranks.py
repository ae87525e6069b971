"""One process that stands for many: what it holds of the model, what it says, and what it refuses."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import pretrain_gpt
from megatron_fsdp import FsdpModule
from tests.unit.examples.jobs import TINY

RUN = (
    f"{TINY} --hidden-size 64 --micro-batch-size 2 --train-iters 2 --log-interval 1 --eval-iters 1 --data-path text "
    "--use-megatron-fsdp --fake-process-group"
)

pytestmark = pytest.mark.usefixtures("plain_start")


def held(flags: str) -> list[tuple[int, int]]:
    """Run the script; return the elements of this rank's weights, and of all, at each step."""
    step, found = pretrain_gpt.train_step, []

    def look(job: Any, state: Any) -> Any:
        assert isinstance(job.model, FsdpModule)
        parameters = list(job.model.parameters())
        found.append((sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)))  # type: ignore[attr-defined]
        return step(job, state)

    with mock.patch.object(pretrain_gpt, "train_step", look):
        assert pretrain_gpt.main([*RUN.split(), *flags.split()]) == 0
    return found


def test_fake_process_group_shards_for_more_ranks_than_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert "--fake-process-group" in RUN
    ((mine, total), _) = held("")
    assert mine <= total / 16 * 1.1
    printed = capsys.readouterr().out
    assert "one process stands for 16 ranks (--fake-process-group): losses mean nothing" in printed
    assert "on 16 rank(s)" in printed
    rows = [json.loads(line) for line in Path("runs/gpt/log.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if "lm_loss" in row] == [1, 2]
    assert not torch.distributed.is_initialized()


def test_hybrid_sharding_has_its_axes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    ((mine, total), _) = held("--num-distributed-optimizer-instances 4")
    assert total / 4 <= mine <= total / 4 * 1.1


@pytest.mark.parametrize("flags", ["--save run", "--load run"])
def test_what_means_nothing_is_neither_saved_nor_loaded(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.main([*RUN.split(), *flags.split()]) == 2
    assert f"--fake-process-group contradicts {flags}" in capsys.readouterr().err


def test_torchrun_starts_ranks_that_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert pretrain_gpt.main(RUN.split()) == 2
    assert "--fake-process-group is for one process" in capsys.readouterr().err
