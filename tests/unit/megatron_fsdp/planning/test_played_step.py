"""The step that plans run: the engine sends what the report says, and alike layers need not all run."""

from collections import Counter

import pytest
import torch

from megatron_fsdp import MixedPrecisionPolicy, Placements
from megatron_fsdp.planning import played_step
from megatron_fsdp.planning.cost_model import Machine, StepTime, predict_step
from megatron_fsdp.planning.from_shapes import Sharding
from megatron_fsdp.planning.model_source import named_subject
from megatron_fsdp.planning.model_spec import Transfer
from megatron_fsdp.planning.options import mesh_axes_of
from megatron_fsdp.planning.played_step import record_step
from megatron_fsdp.planning.step_simulator import forecast_step
from megatron_fsdp.planning.transformer import Workload

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
STRATEGIES = [
    *((getattr(Placements, name)(0), (8,)) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
    (Placements.hsdp(0, 1), (2, 4)),
    (Placements.hfsdp(0, 1), (2, 4)),
]


@pytest.fixture
def every_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played_step, "_LAYERS", 1000)
    monkeypatch.setattr(played_step, "_KNOWN", {})


@pytest.mark.usefixtures("every_layer_runs")
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(("placements", "sizes"), STRATEGIES, ids=lambda each: str(each))
def test_the_engine_sends_what_the_plan_tells(
    placements: Placements, sizes: tuple[int, ...], num_microbatches: int
) -> None:
    subject = named_subject("gpt2")
    facts = subject.facts(Sharding(mesh_axes_of(sizes), placements, POLICY))
    told: Counter[Transfer] = Counter()
    for issue in forecast_step(facts, num_microbatches).issues:
        told[issue.transfer] += issue.count
    played = record_step(facts, POLICY, lambda unit: subject.work(unit, 1024), [num_microbatches])
    sent = Counter(
        Transfer(item.work.kind, item.work.axis, len(item.work.ranks), item.work.num_bytes)
        for item in played.runs[0].items[num_microbatches]
        if item.work is not None and item.work.ranks
    )
    assert (len(played.runs), played.scale) == (1, 1)
    assert sent == told


def time_of(name: str, placements: Placements, sizes: tuple[int, ...], workload: Workload) -> StepTime:
    """Predict a step of a catalog model."""
    subject, axes = named_subject(name), mesh_axes_of(sizes)
    facts = subject.facts(Sharding(axes, placements, POLICY))
    played = record_step(facts, POLICY, lambda unit: subject.work(unit, 2048), [workload.num_microbatches])
    return predict_step(facts, lambda unit: subject.work(unit, 2048), played, workload, Machine().hardware(axes))


@pytest.mark.parametrize("num_microbatches", [1, 5])
@pytest.mark.parametrize(
    ("placements", "sizes"), [STRATEGIES[1], STRATEGIES[3], STRATEGIES[4]], ids=lambda each: str(each)
)
def test_few_layers_take_as_long_as_all_of_them(
    placements: Placements, sizes: tuple[int, ...], num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(1, 2048, num_microbatches)
    few = time_of("mixtral-8x7b", placements, sizes, workload)
    monkeypatch.setattr(played_step, "_LAYERS", 1000)
    monkeypatch.setattr(played_step, "_KNOWN", {})
    whole = time_of("mixtral-8x7b", placements, sizes, workload)
    assert few.total == pytest.approx(whole.total, rel=1e-3)
    assert few.communication == pytest.approx(whole.communication)


def test_what_compute_waits_for_is_named() -> None:
    found = time_of("llama3-8b", Placements.optim_grads_params(0), (64,), Workload(1, 2048))
    assert sum(seconds for _, seconds in found.causes) <= found.exposed * 1.001
    words = [words for words, _ in found.causes]
    assert "embedding waits for gather of embedding" in words
    assert "layer.30 waits for reduction of layer.31" in words or found.causes[0][1] < 1e-4
