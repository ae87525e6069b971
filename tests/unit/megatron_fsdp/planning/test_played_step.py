"""The step that plans run: the engine on a model of a few modules gives the same events as a plan."""

import gc
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from dbuffer import memory_meter, observe_collectives
from dbuffer.events import CollectiveCall
from megatron_fsdp import MixedPrecisionPolicy, Placements, fully_shard, microbatch
from megatron_fsdp.planning.cost_model import predict_step
from megatron_fsdp.planning.estimate import play_setup, project
from megatron_fsdp.planning.model_source import named_subject
from megatron_fsdp.planning.options import mesh_axes_of
from megatron_fsdp.planning.played_step import play_step
from megatron_fsdp.planning.report import report_of
from megatron_fsdp.planning.stand_in import Sharding, shaped_stand_ins
from megatron_fsdp.planning.transformer import Workload
from megatron_fsdp.virtual.device import virtual_device
from tests.unit.megatron_fsdp.planning.chains import setup_of

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
STRATEGIES = [
    *((getattr(Placements, name)(0), (8,)) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
    (Placements.hsdp(0, 1), (2, 4)),
    (Placements.hfsdp(0, 1), (2, 4)),
]


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, hidden), nn.Linear(hidden, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.up(x))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (13, 13, 29, 13, 13, 13, 13, 13))
        self.last = nn.Linear(7, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x)
        return result

    def parts(self) -> list[nn.Module]:
        """Return the modules that become units."""
        return [self.first, *self.blocks, self.last]


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(("placements", "sizes"), STRATEGIES, ids=lambda each: str(each))
def test_the_engines_own_run_of_a_model_gives_the_events_that_plan_tells(
    placements: Placements, sizes: tuple[int, ...], num_microbatches: int
) -> None:
    axes = mesh_axes_of(sizes)
    planned = Model()
    stand_ins = partial(shaped_stand_ins, planned, planned.parts(), Sharding(axes, placements, POLICY), {})
    played = play_step(stand_ins, [num_microbatches])
    told = report_of(played, num_microbatches)
    calls: Counter[CollectiveCall] = Counter()
    meter = memory_meter()

    def hear(call: CollectiveCall) -> None:
        calls[call] += 1

    with virtual_device(8):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axis.name for axis in axes))
        model = Model()
        before = meter.current_bytes
        for part in (*model.parts(), model):
            fully_shard(part, mesh, placements, mp_policy=POLICY)
        rest = meter.current_bytes
        optimizer = megatron_fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters()))

        def step() -> int:
            peak = 0
            for number in range(num_microbatches):
                with microbatch(model, number == num_microbatches - 1):
                    meter.reset_peak()
                    loss = model(torch.ones(2, 5)).sum()
                    peak = max(peak, meter.peak_bytes - rest)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return peak

        step()
        with observe_collectives(hear):
            forward_peak = step()
    issues = played.forecasts[num_microbatches].issues
    assert calls == sum((Counter({call: count}) for (_, call), count in issues.items()), Counter())
    assert told.forward_peak.num_bytes == forward_peak
    assert told.persistent_bytes == rest - before


@pytest.mark.parametrize("count", [1, 5])
def test_each_wait_of_compute_is_named_and_waits_sum_to_no_more_than_the_total(count: int) -> None:
    setup = setup_of(f"--model gpt2 --mesh 64 --seq-length 2048 --num-microbatches {count}")
    found = project(named_subject("gpt2"), setup).time
    assert sum(seconds for _, seconds in found.causes) <= found.exposed * 1.001
    assert "embedding waits for gather of embedding" in [words for words, _ in found.causes]


def test_each_further_microbatch_adds_its_time_to_a_step() -> None:
    setup = setup_of("--model gpt2 --mesh 8 --seq-length 2048 --strategy optim_grads")
    subject = named_subject("gpt2")
    played = play_setup(subject, setup, [1, 2, 3, 4, 100])
    times = {count: predict_step(played, Workload(1, 2048, count), setup.hardware) for count in (2, 3, 4, 100)}
    one = times[3].total - times[2].total
    assert times[4].total == pytest.approx(times[3].total + one)
    assert times[100].total == pytest.approx(times[3].total + 97 * one)
    assert times[100].communication == pytest.approx(times[3].communication * 100 / 3, rel=0.2)


def test_a_report_freezes_nothing_where_something_is_frozen_already() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        project(named_subject("gpt2"), setup_of("--model gpt2 --mesh 2"))
        assert gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
