"""The training loop in one process, on a replicated model: what it logs, when, and how it fails."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import pretrain_gpt

TINY = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 6 "
    "--lr 0.01 --log-interval 1 --eval-iters 2 --num-tokens-to-generate 3 --distributed-backend gloo"
)


pytestmark = pytest.mark.usefixtures("plain_start")


def train(flags: str = "") -> list[dict[str, Any]]:
    """Run the script with the tiny model and more flags, and return the rows of its log."""
    assert pretrain_gpt.main([*TINY.split(), "--data-path", "text", *flags.split()]) == 0
    return [json.loads(line) for line in Path("runs/gpt/log.jsonl").read_text().splitlines()]


def values(rows: list[dict[str, Any]], key: str) -> list[Any]:
    """Return one column of the rows that have it."""
    return [row[key] for row in rows if key in row]


def test_microbatches_change_neither_losses_nor_gradient_norms() -> None:
    whole, split = train(), train("--micro-batch-size 1 --global-batch-size 4")
    for key in ("lm_loss", "grad_norm", "validation_loss"):
        assert values(split, key) == pytest.approx(values(whole, key), rel=1e-5), key


def test_the_loss_falls_on_a_text_that_repeats() -> None:
    losses = values(train("--train-iters 60 --lr 0.03"), "lm_loss")
    assert losses[0] > 5.3
    assert losses[-1] < 3.0


def test_an_interval_logs_the_mean_of_its_losses() -> None:
    each, mean = values(train(), "lm_loss"), values(train("--log-interval 3"), "lm_loss")
    # Beside the multiples, the first and the last iteration get a line.
    assert mean == pytest.approx([each[0], sum(each[1:3]) / 2, sum(each[3:6]) / 3], rel=1e-6)


def test_validation_runs_at_its_interval_and_at_the_end() -> None:
    rows = train("--eval-interval 4")
    assert [row["iteration"] for row in rows if "validation_loss" in row] == [4, 6]


def test_checksums_are_logged_at_their_interval_and_at_the_end_and_add_up() -> None:
    flags = "--use-megatron-fsdp --log-checksum 4"
    rows = [row for row in train(f"{flags} --log-checksum-per-unit") if "checksum" in row]
    assert [row["iteration"] for row in rows] == [4, 6]
    assert rows[0]["checksum"] != rows[1]["checksum"]
    for row in rows:
        assert {"", "blocks.0"} <= row["unit_checksums"].keys()
        total = sum(int(number, 16) for number in row["unit_checksums"].values())
        assert f"{total % 2**64:016x}" == row["checksum"]
    alone = train(flags)
    assert values(alone, "checksum") == [row["checksum"] for row in rows]
    assert values(alone, "unit_checksums") == []


def test_clipping_limits_the_step_and_leaves_the_logged_norm_alone() -> None:
    clipped, free = train("--optimizer sgd --clip-grad 1e-6"), train("--optimizer sgd --clip-grad 0")
    assert values(clipped, "grad_norm")[0] == values(free, "grad_norm")[0] > 0.1
    assert max(values(clipped, "validation_loss")) > min(values(free, "validation_loss")) + 1e-3


def test_the_exit_interval_stops_before_the_end_without_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert values(train("--exit-interval 4"), "lm_loss")[3:] == values(train(), "lm_loss")[3:4]
    assert capsys.readouterr().out.count(" sample at temperature") == 1


def test_the_prompt_is_continued_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    train("--prompt fox --temperature 0")
    assert " sample at temperature 0.0:\nfox" in capsys.readouterr().out


def test_a_cpu_run_says_that_it_computes_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    assert "computing in fp32: many CPUs have no bf16 matrix units" in capsys.readouterr().out


def test_a_loss_that_is_no_number_ends_the_run_with_the_flags_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    status = pretrain_gpt.main([*TINY.split(), "--data-path", "text", "--lr", "1e30"])
    dist.destroy_process_group()
    assert status == 2
    assert "pretrain_gpt.py: error: iteration 2: lm loss nan" in capsys.readouterr().err


def spoil(monkeypatch: pytest.MonkeyPatch, iterations: tuple[int, ...]) -> None:
    """Make the loss NaN in these iterations."""
    step = pretrain_gpt.train_step

    def train_step(job: Any, state: Any) -> Any:
        loss_of = pretrain_gpt.loss_of
        with monkeypatch.context() as patch:
            if state.iteration + 1 in iterations:
                patch.setattr(
                    pretrain_gpt,
                    "loss_of",
                    lambda *args: dataclasses.replace(loss_of(*args), total=loss_of(*args).total * float("nan")),
                )
            return step(job, state)

    monkeypatch.setattr(pretrain_gpt, "train_step", train_step)


def test_steps_with_nan_are_left_out_when_asked_and_do_not_count_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    each = values(train(), "lm_loss")
    spoil(monkeypatch, (4,))
    losses = values(train("--log-interval 2 --skip-nonfinite-steps"), "lm_loss")
    # Lines of iterations 1, 2, 4 and 6: the third step's loss stands alone in the third line.
    assert losses[:3] == pytest.approx(each[:3], rel=1e-6)
    assert math.isfinite(losses[3])


def test_a_run_whose_steps_are_all_skipped_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, (3, 4))
    flags = "--log-interval 2 --skip-nonfinite-steps"
    status = pretrain_gpt.main([*TINY.split(), "--data-path", "text", *flags.split()])
    dist.destroy_process_group()
    assert status == 2
    assert "error: iteration 4: lm loss nan" in capsys.readouterr().err


def test_nan_in_gradients_names_the_first_parameter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, (3,))
    status = pretrain_gpt.main([*TINY.split(), "--data-path", "text"])
    dist.destroy_process_group()
    assert status == 2
    text = capsys.readouterr().err
    assert (
        "error: iteration 3: lm loss nan, gradient norm nan: NaN in the gradient of parameter 'embedding.word" in text
    )
    assert "--skip-nonfinite-steps" in text


def test_skipping_and_not_looking_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--skip-nonfinite-steps --no-check-for-nan-in-loss-and-grad --data-path text"
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 2
    assert "contradicts --no-check-for-nan-in-loss-and-grad" in capsys.readouterr().err


def test_a_wrong_command_line_is_one_line_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.main([*TINY.split(), "--hiden-size", "3"]) == 2
    assert capsys.readouterr().err == (
        "pretrain_gpt.py: error: unknown option --hiden-size; did you mean --hidden-size?\n"
    )
    assert not Path("runs").exists()


def test_a_missing_text_is_said_before_any_folder_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.main([*TINY.split(), "--data-path", "nowhere"]) == 2
    assert "--data-path: nowhere does not exist" in capsys.readouterr().err
    assert not Path("runs").exists()
