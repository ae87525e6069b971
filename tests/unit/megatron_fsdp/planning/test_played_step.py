"""The step that plans run: the engine on a model of a few modules gives the events that a plan tells."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import megatron_fsdp
from dbuffer import memory_meter, observe_collectives
from dbuffer.events import CollectiveCall
from megatron_fsdp import MixedPrecisionPolicy, Placements, fully_shard, microbatch
from megatron_fsdp.planning import played_step
from megatron_fsdp.planning.cost_model import Machine, StepTime, predict_step
from megatron_fsdp.planning.forecast import Forecast, forecast_of
from megatron_fsdp.planning.from_shapes import Sharding, module_facts
from megatron_fsdp.planning.model_source import named_subject
from megatron_fsdp.planning.options import mesh_axes_of
from megatron_fsdp.planning.played_step import play_step
from megatron_fsdp.planning.step_events import Phase
from megatron_fsdp.planning.transformer import Workload
from megatron_fsdp.virtual.device import virtual_device

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
        """Return what becomes a unit each."""
        return [self.first, *self.blocks, self.last]


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(("placements", "sizes"), STRATEGIES, ids=lambda each: str(each))
def test_the_engines_own_run_of_a_model_gives_the_events_that_plan_tells(
    placements: Placements, sizes: tuple[int, ...], num_microbatches: int
) -> None:
    axes = mesh_axes_of(sizes)
    planned = Model()
    facts = module_facts(planned, planned.parts(), Sharding(axes, placements, POLICY))
    told = forecast_of(facts, play_step(facts, None, [num_microbatches]), num_microbatches)
    calls: Counter[tuple[object, ...]] = Counter()
    meter = memory_meter()

    def hear(call: CollectiveCall) -> None:
        calls[call.kind, call.axis, call.num_ranks, call.num_bytes] += 1

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
    assert calls == sum((Counter({issue.transfer: issue.count}) for issue in told.issues), Counter())
    assert told.peaks[Phase.FORWARD].num_bytes == forward_peak
    groups = [group for unit in play_step(facts, None, [num_microbatches]).groups for group in unit]
    assert sum(part.num_bytes for group in groups for part in group.resting if not part.shares) == rest - before


def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all layers run."""
    monkeypatch.setattr(played_step, "_LAYERS", 1000)
    monkeypatch.setattr(played_step, "_KNOWN", {})


@pytest.mark.parametrize("has_streams", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize(("placements", "sizes"), STRATEGIES[1:5:2] + STRATEGIES[-1:], ids=lambda each: str(each))
def test_few_layers_tell_the_memory_and_the_traffic_of_all_of_them(
    placements: Placements, sizes: tuple[int, ...], has_streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = named_subject("gpt2").facts(Sharding(mesh_axes_of(sizes), placements, POLICY))
    facts = dataclasses.replace(facts, has_streams=has_streams)

    def told() -> Forecast:
        return forecast_of(facts, play_step(facts, None, [2]), 2)

    few = told()
    every_layer(monkeypatch)
    whole = told()
    assert few.peaks == whole.peaks
    assert set(few.issues) == set(whole.issues)
    assert few.lifetimes == whole.lifetimes


def time_of(name: str, placements: Placements, sizes: tuple[int, ...], workload: Workload) -> StepTime:
    """Predict a step of a catalog model."""
    subject, axes = named_subject(name), mesh_axes_of(sizes)
    facts = subject.facts(Sharding(axes, placements, POLICY))
    played = play_step(facts, lambda unit: subject.work(unit, 2048), [workload.num_microbatches])
    forecast = forecast_of(facts, played, workload.num_microbatches)
    hardware = Machine().hardware(axes)
    return predict_step(facts, lambda unit: subject.work(unit, 2048), played, forecast, workload, hardware)


@pytest.mark.parametrize("num_microbatches", [1, 5])
@pytest.mark.parametrize(
    ("placements", "sizes"), [STRATEGIES[1], STRATEGIES[3], STRATEGIES[4]], ids=lambda each: str(each)
)
def test_few_layers_take_as_long_as_all_of_them(
    placements: Placements, sizes: tuple[int, ...], num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(1, 2048, num_microbatches)
    few = time_of("mixtral-8x7b", placements, sizes, workload)
    every_layer(monkeypatch)
    whole = time_of("mixtral-8x7b", placements, sizes, workload)
    assert few.total == pytest.approx(whole.total, rel=1e-3)
    assert few.communication == pytest.approx(whole.communication)


def test_what_compute_waits_for_is_named() -> None:
    found = time_of("llama3-8b", Placements.optim_grads_params(0), (64,), Workload(1, 2048))
    assert sum(seconds for _, seconds in found.causes) <= found.exposed * 1.001
    words = [words for words, _ in found.causes]
    assert "embedding waits for gather of embedding" in words
    assert "layer.30 waits for reduction of layer.31" in words or found.causes[0][1] < 1e-4
