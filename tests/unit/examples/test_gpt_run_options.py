"""Options of a run: schedules, the end of the time, TensorBoard and traces."""

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from gpt.learning_rate import LearningRate

TINY = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 6 "
    "--lr 0.01 --log-interval 1 --eval-iters 1 --num-tokens-to-generate 0 --distributed-backend gloo --save run "
    "--data-path text"
)


pytestmark = pytest.mark.usefixtures("plain_start")


def train(flags: str) -> list[dict[str, Any]]:
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 0
    return [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]


def refusal(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 2
    return capsys.readouterr().err


def wsd(style: str) -> LearningRate:
    return LearningRate(1.0, 0.2, "WSD", 10, 100, wsd_decay_style=style, wsd_decay_iterations=20)


@pytest.mark.parametrize(
    ("style", "at_a_quarter"),
    [("linear", 0.75), ("cosine", 0.5 + 0.25 * 2**0.5), ("exponential", 2 * 0.5**0.25 - 1), ("minus_sqrt", 0.5)],
)
def test_wsd_is_stable_until_its_end_which_has_the_shape_asked_for(style: str, at_a_quarter: float) -> None:
    schedule = wsd(style)
    assert [schedule.at(iteration) for iteration in (5, 10, 11, 79, 80)] == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert schedule.at(85) == pytest.approx(0.2 + 0.8 * at_a_quarter)
    assert [schedule.at(iteration) for iteration in (100, 101)] == pytest.approx([0.2, 0.2])


def test_the_inverse_square_root_continues_from_the_warm_up_and_stops_at_the_floor() -> None:
    schedule = LearningRate(1.0, 0.3, "inverse-square-root", 4, 1000)
    rates = [schedule.at(iteration) for iteration in (4, 16, 25, 900, 1001)]
    assert rates == pytest.approx([1.0, 0.5, 0.4, 0.3, 0.3])


def test_without_warm_up_the_inverse_square_root_starts_at_the_peak() -> None:
    schedule = LearningRate(1.0, 0.0, "inverse-square-root", 0, 1000)
    assert [schedule.at(iteration) for iteration in (1, 4)] == [1.0, 0.5]


def test_the_run_s_rates_are_the_schedule_s() -> None:
    rows = train("--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style linear --lr-warmup-iters 2")
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.005, 0.0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ("--lr-wsd-decay-iters 3", "--lr-wsd-decay-iters 3 without --lr-decay-style WSD"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-warmup-iters 2", "exceeds --lr-decay-iters 6 minus"),
        ("--profile --profile-step-start 4 --profile-step-end 4", "no step would be recorded"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(flags, capsys)


def test_when_the_time_is_up_the_run_saves_and_resumes_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [row["lm_loss"] for row in train("--eval-iters 0")]
    shutil.rmtree("run")
    rows = train("--eval-iters 0 --exit-duration-in-mins 1e-9")
    assert [row["lm_loss"] for row in rows] == wanted[:1]
    assert "stopped by --exit-duration-in-mins 1e-09 after 1 iterations" in capsys.readouterr().out
    assert [path.name for path in Path("run").glob("iter_*")] == ["iter_0000001"]
    assert [row["lm_loss"] for row in train("--eval-iters 0 --load run")] == wanted


def test_a_long_time_ends_nothing() -> None:
    assert len(train("--eval-iters 0 --exit-duration-in-mins 10")) == 6


@pytest.mark.parametrize(
    ("steps", "file"),
    [
        ("--profile-step-start 2 --profile-step-end 4", "trace_rank0_steps2-3.json"),
        ("--profile-step-start 6 --profile-step-end 9", "trace_rank0_steps6-8.json"),
    ],
)
def test_a_profile_is_a_chrome_trace_in_the_save_folder(steps: str, file: str) -> None:
    train(f"--profile {steps}")
    events = json.loads(Path("run", file).read_text())["traceEvents"]
    num_steps = 2 if "2-3" in file else 1
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("Optimizer.step#") for name in names) == num_steps


@pytest.mark.parametrize("flags", ["", "--profile --profile-ranks 1", "--profile --profile-step-start 8"])
def test_no_trace_is_written_that_is_not_asked_for(flags: str) -> None:
    train(flags)
    assert not list(Path("run").glob("trace_*"))


def test_without_tensorboard_the_flag_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "--tensorboard-dir needs the package tensorboard" in refusal("--tensorboard-dir tb", capsys)
    assert not Path("run").exists()


class Writer:
    """Stands for ``SummaryWriter``: remembers what it is given."""

    written: list[tuple[str, float, int]]
    is_closed = False

    def __init__(self, log_dir: str) -> None:
        Writer.written, Writer.is_closed = [], False
        assert log_dir == "tb"

    def add_scalar(self, name: str, value: float, step: int) -> None:
        Writer.written.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        Writer.is_closed = True


def test_tensorboard_gets_the_log_s_numbers_under_megatron_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    rows = train("--tensorboard-dir tb")
    for key, name in (("lm_loss", "lm loss"), ("grad_norm", "grad-norm"), ("validation_loss", "lm loss validation")):
        wanted = [(name, row[key], row["iteration"]) for row in rows if key in row]
        assert [entry for entry in Writer.written if entry[0] == name] == wanted != []
    assert Writer.is_closed
