"""Log lines, the JSONL file and the loss curve."""

import json
import mmap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import compare_runs
from gpt.train_log import Interval, MemoryUse, TrainLog, memory_use
from megatron_fsdp import ConfigError

CPU = torch.device("cpu")
MEMORY = MemoryUse("resident", 441.25, 512.06)


def make_row(iteration: int, loss: float = 3.123456) -> dict[str, Any]:
    """Return the numbers of one iteration."""
    row = {"iteration": iteration, "consumed_samples": 16 * iteration, "elapsed_ms": 123.44, "learning_rate": 3e-4}
    return row | {"tokens_per_second": 16592.4, "global_batch_size": 16, "lm_loss": loss, "grad_norm": 1.23449}


def run_log(folder: Path, iterations: range, *, is_main: bool = True) -> None:
    """Log some iterations like a run that continues after earlier ones."""
    log = TrainLog(folder, is_main=is_main, train_iters=200)
    log.begin(iterations.start - 1)
    for iteration in iterations:
        log.iteration(make_row(iteration, loss=5.0 / iteration), MEMORY)
    log.draw()


def iterations_of(folder: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_line_has_the_shape_of_megatron_s_log_and_the_file_every_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = TrainLog(tmp_path, is_main=True, train_iters=200)
    log.begin(0)
    log.iteration(make_row(10), MEMORY)
    log.validation(10, 2.0)
    assert capsys.readouterr().out == (
        " iteration       10/     200 | consumed samples:          160 | elapsed time per iteration (ms): 123.4 |"
        " time left: 0:00:23 | tokens/s: 16592 | learning rate: 3.000000E-04 | global batch size:    16 |"
        " lm loss: 3.123456E+00 |"
        " grad norm: 1.234 | resident memory now (MiB): 441.2 | peak resident memory (MiB): 512.1\n"
        " validation loss at iteration 10 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |"
        " bits per byte: 2.885\n"
    )
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        make_row(10) | {"resident_memory_mib": 441.25, "peak_resident_memory_mib": 512.06},
        {"iteration": 10, "validation_loss": 2.0},
    ]


def test_a_resumed_run_keeps_the_whole_rows_before_it_and_a_new_one_none(tmp_path: Path) -> None:
    run_log(tmp_path, range(1, 8))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lm_l')  # cut off by a crash
    run_log(tmp_path, range(6, 10))
    assert iterations_of(tmp_path) == list(range(1, 10))
    run_log(tmp_path, range(1, 3))
    assert iterations_of(tmp_path) == [1, 2]


def test_other_ranks_write_nothing_and_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_log(tmp_path / "log", range(1, 3), is_main=False)
    assert (tuple(capfd.readouterr()), list(tmp_path.iterdir())) == (("", ""), [])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--save: cannot write .*file/run: Not a directory"):
        TrainLog(tmp_path / "file" / "run", is_main=True, train_iters=1)


@pytest.mark.parametrize(
    ("norms", "iterations"),
    [
        ([3.0, 30.0, 31.0, 299.0, 0.1, 3000.0], [6]),
        ([1.0, float("nan"), float("inf"), 11.0], [3, 4]),
    ],
)
def test_a_norm_is_large_above_ten_times_the_largest_before(
    norms: list[float], iterations: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = TrainLog(tmp_path, is_main=True, train_iters=9)
    for iteration, norm in enumerate(norms, 1):
        log.gradient_norm(iteration, norm)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": gradient norm")[0] for line in said] == [f"warning: iteration {n}" for n in iterations]


def test_an_interval_divides_the_time_by_its_iterations_and_leaves_excluded_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    interval = Interval(CPU)
    for _ in range(2):
        now[0] += 3.0
        interval.add(torch.tensor(1.0))
        with interval.excluded():
            now[0] += 50.0
    assert interval.lap()[0] == 3.0
    now[0] += 7.0
    interval.add(torch.tensor(1.0))
    assert interval.lap()[0] == 7.0


def test_resident_memory_grows_and_shrinks_and_its_peak_stays() -> None:
    # Map separate pages: memory freed to the heap may stay resident.
    before, block = memory_use(CPU), mmap.mmap(-1, 64 << 20)
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    holding = memory_use(CPU)
    block.close()
    after = memory_use(CPU)
    assert before.now + 60 < holding.now <= holding.peak
    assert after.now < holding.now - 60
    assert after.peak > holding.now - 1  # the kernel counts the two at different moments


def test_runs_are_drawn_into_one_chart_and_their_last_validations_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, loss in (("one", 2.25), ("two", 1.5)):
        run_log(tmp_path / name, range(1, 3))
        TrainLog(tmp_path / name, is_main=True, train_iters=2).validation(2, loss)
        assert (tmp_path / name / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    capsys.readouterr()
    output, runs = str(tmp_path / "losses.png"), [f"{name}={tmp_path / name}" for name in ("one", "two")]
    assert compare_runs.main(["--output", output, *runs]) == 0
    assert Path(output).read_bytes().startswith(b"\x89PNG")
    said = [f"{name}: validation loss {loss} at iteration 2" for name, loss in (("one", "2.2500"), ("two", "1.5000"))]
    assert capsys.readouterr().out.splitlines() == said
    with pytest.raises(SystemExit):
        compare_runs.main(["--output", output, f"one={tmp_path}"])
    assert "has no log.jsonl. fix: give NAME=FOLDER" in capsys.readouterr().err
