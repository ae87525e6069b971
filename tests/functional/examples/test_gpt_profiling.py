"""``--profile`` leaves a trace of the steps asked for, and of a sharded model a picture of what was waited for."""

import argparse
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpt.launch import Ranks
from gpt.profiling import StepProfiler
from gpt.train_log import TrainLog
from megatron_fsdp import Timeline, fully_shard
from tests.harness import run_ranks

FIRST, END = 2, 4


def arguments(ranks: list[int]) -> argparse.Namespace:
    return argparse.Namespace(profile=True, profile_ranks=ranks, profile_step_start=FIRST, profile_step_end=END)


def make_model(is_sharded: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    if is_sharded:
        for module in (model[0], model[2], model):
            fully_shard(module)
    return model


def profile(folder: str, profiled: list[int], is_sharded: bool, num_steps: int = 6) -> list[str]:
    """Train under the profiler; return the messages of the log."""
    rank, model = dist.get_rank(), make_model(is_sharded)
    log, messages = TrainLog(Path(folder), is_main=rank == 0, train_iters=num_steps), list[str]()
    log.message = messages.append  # type: ignore[method-assign]
    args, ranks = arguments(profiled), Ranks(rank, rank, dist.get_world_size())
    with StepProfiler(args, ranks, Path(folder), log, model) as profiler:
        for iteration in range(1, num_steps + 1):
            profiler.before_step(iteration)
            model(torch.randn(3, 5)).sum().backward()
            profiler.after_step(iteration)
    return messages


@pytest.mark.parametrize("profiled", [[0], [0, 1]])
def test_profiled_ranks_write_trace_and_picture_and_say_the_share(profiled: list[int], tmp_path: Path) -> None:
    messages = run_ranks(2, profile, str(tmp_path), profiled, True)
    names = {path.name for path in tmp_path.iterdir()}
    kinds = ("trace_rank{}_steps2-3.json", "timeline_rank{}_steps2-3.png")
    assert names == {kind.format(rank) for kind in kinds for rank in profiled}
    for rank in (0, 1):
        assert len(messages[rank]) == 2 * (rank in profiled)
    timeline = Timeline.read(tmp_path / "trace_rank0_steps2-3.json")
    assert [one.unit for one in timeline.units if len(one.reductions) == 2] == ["0", "2"]
    assert f"exposed communication {timeline.exposed_share:.1%}" in messages[0][1]


def test_a_replicated_model_leaves_a_trace_alone(tmp_path: Path) -> None:
    messages = run_ranks(1, profile, str(tmp_path), [0], False)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["trace_rank0_steps2-3.json"]
    assert len(messages) == 1


def test_a_run_that_ends_early_leaves_the_steps_that_it_took(tmp_path: Path) -> None:
    run_ranks(2, profile, str(tmp_path), [1], True, 2)
    timeline = Timeline.read(tmp_path / "trace_rank1_steps2-3.json")
    assert {len(one.reductions) for one in timeline.units} == {1}
