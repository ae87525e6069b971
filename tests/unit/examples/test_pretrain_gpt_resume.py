"""The training script in one process: which checkpoints it keeps, what it resumes from, what signals do to it."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import pretrain_gpt
from tests.harness.grids import nightly_but

TINY = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 6 "
    "--lr 0.01 --log-interval 1 --eval-iters 0 --num-tokens-to-generate 0 --distributed-backend gloo --save run"
)
SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


pytestmark = pytest.mark.usefixtures("plain_start")


def train(flags: str = "") -> list[float]:
    """Run the script with the tiny model and more flags, and return the losses of its log."""
    assert pretrain_gpt.main([*TINY.split(), "--data-path", "text", *flags.split()]) == 0
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


def kept() -> list[str]:
    return sorted(path.name for path in Path("run").glob("iter_*"))


@pytest.mark.parametrize("flags", nightly_but([f"{SHARDED} --async-save"], ["", SHARDED, f"{SHARDED} --async-save"]))
def test_a_run_in_two_parts_has_the_losses_of_one(flags: str) -> None:
    wanted = train(flags)
    shutil.rmtree("run")
    train(f"{flags} --exit-interval 3")
    assert train(f"{flags} --load run") == wanted


@pytest.mark.parametrize("mode", nightly_but(["--async-save"], ["", "--async-save"]))
def test_only_the_last_checkpoints_are_kept(mode: str) -> None:
    train(f"--save-interval 1 --keep-last 2 {mode}")
    assert kept() == ["iter_0000005", "iter_0000006"]
    assert Path("run/latest_checkpointed_iteration.txt").read_text() == "6\n"


def test_without_a_limit_all_checkpoints_are_kept() -> None:
    train("--save-interval 2")
    assert kept() == ["iter_0000002", "iter_0000004", "iter_0000006"]


def test_a_damaged_checkpoint_is_passed_over_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = train("--save-interval 2")
    file = Path("run/iter_0000006/__0_0.distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert train("--load run") == wanted
    printed = capsys.readouterr().out
    assert "passed over a checkpoint: run/iter_0000006 is damaged" in printed
    assert "resuming from run/iter_0000004: 4 iterations" in printed


def test_a_restart_by_torchrun_resumes_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train()
    shutil.rmtree("run")
    train("--exit-interval 3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train() == wanted


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    number: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = train()
    shutil.rmtree("run")
    step = pretrain_gpt.train_step

    def send_in_third(job: Any, state: Any) -> Any:
        if state.iteration == 2:
            signal.raise_signal(number)
        return step(job, state)

    with mock.patch.object(pretrain_gpt, "train_step", send_in_third):
        assert train() == wanted[:3]
    assert f"stopped by {name} after 3 iterations" in capsys.readouterr().out
    assert kept() == ["iter_0000003"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert train("--load run") == wanted


@pytest.mark.parametrize(("flags", "message"), [("--keep-last 0", "wanted a whole number >= 1")])
def test_keeping_none_is_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_number_to_keep_without_a_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = TINY.replace("--save run", "--keep-last 2").split()
    assert pretrain_gpt.main(words) == 2
    assert "--keep-last 2 without --save" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "found"), [("elsewhere", "there is no such folder"), ("here", "there is no checkpoint in it")]
)
def test_a_folder_to_load_from_that_holds_nothing_is_refused(
    folder: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("here").mkdir()
    assert pretrain_gpt.main([*TINY.split(), "--data-path", "text", "--load", folder]) == 2
    assert f"--load {folder}: {found}; wanted the --save folder of an earlier run" in capsys.readouterr().err
    assert not kept()
    if dist.is_initialized():
        # A run that ends with an error leaves its group to the end of the process.
        dist.destroy_process_group()


def test_a_job_that_loads_where_it_saves_may_be_new() -> None:
    assert train("--load ./run") == train("--train-iters 6")
