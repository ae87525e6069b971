"""What a run says, writes and takes: large gradients, the optimizer's groups, background saves, other models."""

import argparse
import json
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from gpt.large_gradients import LargeGradients
from megatron_fsdp.checkpoint import writer as checkpoint_writer
from tests.unit.examples.jobs import TINY

RUN = (
    f"{TINY} --micro-batch-size 4 --log-interval 1 --eval-iters 0 --num-tokens-to-generate 0 --data-path text "
    "--save run --use-megatron-fsdp"
)

pytestmark = pytest.mark.usefixtures("plain_start")


def train(flags: str = "", folder: str = "run") -> list[float]:
    """Run the script, and return the losses of its log."""
    assert pretrain_gpt.main([*RUN.split(), "--save", folder, *flags.split()]) == 0
    rows = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


# ---------------------------------------------------------------------- large gradients


def complaints(norms: list[float], is_on: bool = True) -> list[int]:
    """Return the iterations with a complaint."""
    watch = LargeGradients(argparse.Namespace(check_for_large_grads=is_on))
    found = [watch.complaint(iteration, torch.tensor(norm)) for iteration, norm in enumerate(norms, 1)]
    return [iteration for iteration, text in enumerate(found, 1) if text]


def test_a_norm_is_large_above_ten_times_the_largest_before() -> None:
    assert complaints([3.0, 30.0, 31.0, 299.0, 0.1, 3000.0]) == [6]
    assert complaints([1.0, 11.0, 11.0]) == [2]


def test_norms_that_are_no_numbers_do_not_hide_later_ones() -> None:
    assert complaints([1.0, float("nan"), float("inf"), 11.0]) == [3, 4]


def test_nobody_looks_unless_asked() -> None:
    assert complaints([1.0, 100.0], is_on=False) == []


def test_check_for_large_grads_says_a_norm_far_above_those_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clip, factors = pretrain_gpt.clip_gradients, iter([1, 1, 1, 50, 1, 1])
    monkeypatch.setattr(pretrain_gpt, "clip_gradients", lambda *args: clip(*args) * next(factors))
    train("--check-for-large-grads")
    printed = capsys.readouterr().out
    assert "warning: iteration 4: gradient norm" in printed
    assert printed.count("warning: iteration") == 1


# ---------------------------------------------------------------------- the optimizer's groups


def test_dump_param_to_param_group_map_names_the_group_of_every_parameter() -> None:
    train("--dump-param-to-param-group-map maps/groups.json")
    groups = json.loads(Path("maps/groups.json").read_text())
    assert groups["blocks.1.mlp.linear_fc1.weight"] == groups["embedding.word_embeddings.weight"] == 0
    assert groups["blocks.1.mlp.linear_fc1.bias"] == groups["head.final_layernorm.weight"] == 1
    assert len(groups) == 2 + 2 * 12 + 2


def test_a_map_that_cannot_be_written_ends_the_run_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert pretrain_gpt.main([*RUN.split(), "--dump-param-to-param-group-map", "file/groups.json"]) == 2
    dist.destroy_process_group()
    assert "--dump-param-to-param-group-map file/groups.json: cannot be written" in capsys.readouterr().err


# ---------------------------------------------------------------------- saves in the background


def hold_first_write(gate: threading.Event) -> Any:
    """Let writes in the background wait for the gate."""
    write = checkpoint_writer.write_draft

    def wait(*args: Any, **options: Any) -> Any:
        assert gate.wait(60)
        return write(*args, **options)

    return mock.patch("megatron_fsdp.checkpoint.api.write_draft", wait)


def test_async_save_writes_while_training_goes_on_and_is_whole_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = train()
    gate, step, seen = threading.Event(), pretrain_gpt.train_step, []

    def look(job: Any, state: Any) -> Any:
        if state.iteration == 4:  # a step after the save of iteration 3, which the gate has held up so far
            seen.extend(Path("other").glob("iter_???????"))
            gate.set()
        return step(job, state)

    with hold_first_write(gate), mock.patch.object(pretrain_gpt, "train_step", look):
        losses = train("--async-save --save-interval 3", "other")
    assert seen == []
    assert sorted(path.name for path in Path("other").glob("iter_*")) == ["iter_0000003", "iter_0000006"]
    assert Path("other/latest_checkpointed_iteration.txt").read_text() == "6\n"
    assert losses == wanted
    assert "checkpoints are written while training goes on: --async-save" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["SIGTERM", "--exit-duration-in-mins 1e-9"])
def test_a_run_that_is_stopped_waits_for_its_last_save(end: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = pretrain_gpt.train_step

    def stop(job: Any, state: Any) -> Any:
        if end == "SIGTERM":
            signal.raise_signal(signal.SIGTERM)
        return step(job, state)

    with mock.patch.object(pretrain_gpt, "train_step", stop):
        train(f"--async-save {end if end != 'SIGTERM' else ''}")
    assert "after 1 iterations" in capsys.readouterr().out
    assert [path.name for path in Path("run").glob("iter_*")] == ["iter_0000001"]
    assert Path("run/latest_checkpointed_iteration.txt").read_text() == "1\n"


def test_a_save_in_the_background_that_fails_ends_the_run_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with mock.patch("megatron_fsdp.checkpoint.writer.sync_folder", fail):
        status = pretrain_gpt.main([*RUN.split(), "--async-save", "--save-interval", "2"])
    if dist.is_initialized():
        dist.destroy_process_group()
    assert status == 2
    assert "No space left on device" in capsys.readouterr().err


# ---------------------------------------------------------------------- checkpoints of another model


def test_no_strict_fsdp_dtensor_load_takes_what_matches_and_says_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    train("--exit-interval 3")
    capsys.readouterr()
    deeper = "--load run --num-layers 3 --ffn-hidden-size 40"
    assert pretrain_gpt.main([*RUN.split(), *deeper.split()]) == 2
    dist.destroy_process_group()
    assert "blocks.2.mlp.linear_fc1.weight: not in the checkpoint" in capsys.readouterr().err
    assert pretrain_gpt.main([*RUN.split(), *deeper.split(), "--no-strict-fsdp-dtensor-load"]) == 0
    printed = capsys.readouterr().out
    assert "run/iter_0000003 is of another model: 22 tensors loaded, 18 left as they are" in printed
    assert "blocks.0.mlp.linear_fc1.weight: (48, 12) in the checkpoint, (40, 12) here" in printed
    assert " iteration        4/       6" in printed


def test_a_checkpoint_of_the_same_model_is_loaded_whole_without_strictness() -> None:
    wanted = train()
    assert train("--exit-interval 3", "other") == wanted[:3]
    assert train("--load other --no-strict-fsdp-dtensor-load", "other") == wanted
