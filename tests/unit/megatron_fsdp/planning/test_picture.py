"""The pictures of a plan and of a live model: their bars, and the written file."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, StateError, explain, fully_shard
from megatron_fsdp.__main__ import main
from megatron_fsdp.planning.cost_model import Hardware, Link, play_in_time
from megatron_fsdp.planning.picture import Bar, time_line
from megatron_fsdp.planning.played_step import PlayedStep
from megatron_fsdp.planning.report import with_links
from megatron_fsdp.planning.transformer import Workload
from tests.unit.megatron_fsdp.planning.chains import world

PNG = b"\x89PNG\r\n\x1a\n"


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))


def sharded() -> nn.Module:
    model = Chain()
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(model)
    return model


def bars_of(model: nn.Module, hardware: Hardware) -> list[Bar]:
    play = explain(model)._play_on_gpu
    assert play is not None
    played: PlayedStep = play()
    return time_line(play_in_time(played, Workload(sequence_length=4096), with_links(hardware, played)))


def test_a_time_line_gathers_every_unit_before_it_computes_and_reduces_it_afterwards() -> None:
    with world(8):
        bars = bars_of(sharded(), Hardware())
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        mine = {kind: [bar for bar in bars if (bar.unit, bar.kind) == (name, kind)] for kind in
                ("all-gather", "forward", "backward", "reduce-scatter")}  # fmt: skip
        assert mine["all-gather"][0].end <= mine["forward"][0].start
        assert mine["backward"][-1].end <= mine["reduce-scatter"][-1].end
        assert all(mine.values()), name


def test_a_slow_network_makes_compute_wait_longer() -> None:
    def waited(rate: float) -> float:
        bars = bars_of(model, Hardware(links={"axis 0": Link(rate)}))
        return sum(bar.end - bar.start for bar in bars if bar.kind == "waits")

    with world(8):
        model = sharded()
        assert waited(1e8) > 10 * waited(1e12)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_plot_writes_one_small_file(num_microbatches: int, tmp_path: Path) -> None:
    with world(8):
        model = sharded()
        explain(model, num_microbatches).plot(tmp_path / "plan.png", tokens=1 << 16)
    content = (tmp_path / "plan.png").read_bytes()
    assert content.startswith(PNG)
    assert len(content) < 200_000


def test_a_report_that_is_kept_does_not_keep_the_model() -> None:
    with world(2):
        model = sharded()
        report = explain(model)
        del model
        gc.collect()
        with pytest.raises(StateError, match="fix: call explain"):
            report.plot()


def test_plan_writes_a_picture_and_prints_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt2", "--mesh", "2x4", "--png", str(tmp_path / "plan.png")]) == 0
    assert capsys.readouterr().out.startswith("gpt2: ")
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("path", ["nowhere/plan.png", "plan.doc"])
def test_a_picture_that_cannot_be_written_names_the_file(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "gpt2", "--mesh", "8", "--png", str(tmp_path / path)]) == 2
    words = capsys.readouterr().err
    assert str(tmp_path / path) in words
    assert "fix: name a file that ends with .png" in words


def test_a_picture_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "--model", "gpt2", "--mesh", "8", "--png", "plan.png"]) == 2
    assert "fix: pip install matplotlib" in capsys.readouterr().err
