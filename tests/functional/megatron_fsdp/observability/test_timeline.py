"""A profiler's trace has ranges for gathers, reductions and waits; a timeline reads their cost."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dbuffer.events import listen, listeners
from megatron_fsdp import ConfigError, Timeline, fully_shard_optimizer
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Model, draw_tokens, loss_of
from tests.harness.oracle import sharded_model

UNITS = ("Model", "blocks.0", "blocks.1")
GATHER, GATHER_WAIT = "FSDP::all_gather", "FSDP::all_gather_wait"
REDUCE, REDUCE_WAIT = "FSDP::post_backward_reduce", "FSDP::post_backward_rs_wait"


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    tokens = draw_tokens(dist.get_rank(), number)
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded_adamw(strategy: str) -> tuple[Model, torch.optim.Optimizer]:
    model = sharded_model(strategy)
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def traced_step(strategy: str, folder: str) -> list[str]:
    """Profile the second of three steps, write the trace, and return the listeners that remain afterwards."""
    model, optimizer = sharded_adamw(strategy)
    step(model, optimizer, 0)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step(model, optimizer, 1)
    step(model, optimizer, 2)
    profiler.export_chrome_trace(f"{folder}/{dist.get_rank()}.json")
    return [str(one) for one in listeners]


def ranges(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if str(event.get("name")).startswith("FSDP::")]


@pytest.mark.parametrize(
    ("strategy", "gathers", "reductions"),
    [("optim_grads_params", 4, 3), ("optim", 3, 3), ("no_shard", 0, 3)],
)
def test_a_trace_has_a_range_for_every_gather_and_reduction_and_what_compute_waited(
    strategy: str, gathers: int, reductions: int, tmp_path: Path
) -> None:
    assert run_ranks(2, traced_step, strategy, str(tmp_path)) == [[], []]
    for rank in (0, 1):
        found = ranges(tmp_path / f"{rank}.json")
        waits = Counter(event["name"].partition(" (")[0] for event in found)
        assert (waits[GATHER_WAIT], waits[REDUCE_WAIT]) == (gathers, reductions)
        timeline = Timeline.read(tmp_path / f"{rank}.json")
        assert {one.unit for one in timeline.units} == set(UNITS)
        assert sum(len(one.gathers) for one in timeline.units) == gathers
        assert sum(len(one.reductions) for one in timeline.units) == reductions
        waited = sum(event["dur"] for event in found if event["name"].startswith((GATHER_WAIT, REDUCE_WAIT)))
        assert timeline.waited() == pytest.approx(1e-6 * waited)
        assert 0 < timeline.exposed_share < 1


def test_a_gather_lasts_from_its_issue_to_the_end_of_the_wait_for_it(tmp_path: Path) -> None:
    run_ranks(2, traced_step, "optim_grads_params", str(tmp_path))
    found = ranges(tmp_path / "0.json")
    timeline = Timeline.read(tmp_path / "0.json")
    ahead = next(one for one in timeline.units if one.unit == "blocks.1")
    issued = min(event["ts"] for event in found if event["name"] == f"{GATHER} (blocks.1)")
    waits = [event for event in found if event["name"] == f"{GATHER_WAIT} (blocks.1)"]
    first = min(waits, key=lambda event: event["ts"])
    assert first["ts"] > issued
    lasted = ahead.gathers[0].stop - ahead.gathers[0].start
    assert lasted == pytest.approx(1e-6 * (first["ts"] + first["dur"] - issued), abs=1e-9)
    assert ahead.gather_waited[0].start > ahead.gathers[0].start


@on_ranks(1)
def test_a_forward_that_raises_under_a_profiler_leaves_nothing_behind() -> None:
    model, optimizer = sharded_adamw("optim_grads_params")
    step(model, optimizer, 0)

    def raise_once(action: str, _: Any) -> None:
        if action == "issued" and not raised:
            raised.append(1)
            raise RuntimeError("in a gather")

    raised: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        with listen(raise_once), pytest.raises(RuntimeError, match="in a gather"):
            model(draw_tokens(0, 0))
        step(model, optimizer, 1)
    step(model, optimizer, 2)
    assert [len(listeners)] == [0]


def event(name: str, category: str, stream: int, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": stream, "ts": start, "dur": duration}


def test_on_a_gpu_what_no_kernel_of_compute_covers_is_exposed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        event("gemm", "kernel", 7, 0, 10),
        event(f"{GATHER} (a)", "gpu_user_annotation", 20, 8, 10),
        event("nccl", "kernel", 20, 8, 10),
        event("gemm", "kernel", 7, 20, 20),
        event(f"{REDUCE} (a)", "gpu_user_annotation", 21, 25, 25),
        event("nccl", "kernel", 21, 25, 25),
        event("relu", "kernel", 7, 44, 2),
        # The host's own ranges show the time of issue; on a GPU, work runs later.
        event(f"{GATHER} (a)", "user_annotation", 1, 0, 1),
        event(f"{GATHER_WAIT} (a)", "user_annotation", 1, 1, 1),
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    timeline = Timeline.read(path)
    (unit,) = timeline.units
    assert timeline.seconds == pytest.approx(50e-6)
    assert timeline.waited("gather") == pytest.approx(8e-6)
    # Exposed from 40 to 44 and from 46 to 50.
    assert timeline.waited("reduce") == pytest.approx(8e-6)
    assert [round(1e6 * one.start) for one in unit.reduce_waited] == [40, 46]
    assert timeline.exposed_share == pytest.approx(16 / 50)


def test_the_command_prints_the_exposed_share_and_each_unit(tmp_path: Path) -> None:
    run_ranks(2, traced_step, "optim_grads_params", str(tmp_path))
    printed = str(Timeline.read(tmp_path / "1.json"))
    assert "exposed communication" in printed
    assert all(unit in printed for unit in UNITS)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "name": "a", "ts": 0}]}']
)
def test_a_trace_without_a_sharded_step_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.json"):
        Timeline.read(path)
