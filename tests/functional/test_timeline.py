"""A timeline says when gathers, compute and reductions ran and what was waited for, and leaves nothing behind."""

import functools
import itertools
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from dbuffer.events import listeners
from megatron_fsdp import Audit, ConfigError, StateError, Watch, fully_shard, fully_shard_optimizer
from megatron_fsdp.observability.timeline import Timeline
from megatron_fsdp.observability.timeline_record import COMPUTE, GATHER, LANES, REDUCE, TimelineRecord, UnitTimes
from tests.functional.test_uneven_use import Dropped, Skipped, shard_blocks
from tests.functional.test_uneven_use import loss as skipping_loss
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, make_model
from tests.harness.oracle import shard_model, train, whole_state

UNITS = ("Model", "blocks.0", "blocks.1")
LAYOUTS = {
    "zero 3": ("optim_grads_params", (2,)),
    "zero 2": ("optim_grads", (2,)),
    "zero 1": ("optim", (2,)),
    "zero 0": ("no_shard", (2,)),
    "hsdp": ("hsdp", (2, 2)),
}


def sharded(layout: str) -> Model:
    strategy, shape = LAYOUTS[layout]
    return shard_model(make_model(), make_mesh(shape), strategy)


def backward(model: nn.Module, number: int = 0) -> None:
    tokens = draw_tokens(dist.get_rank(), number)
    torch.autograd.backward(loss_of(model(tokens), tokens))


def actions(record: TimelineRecord, lane: str) -> list[str]:
    return [span.name for span in record.spans if span.lane == lane]


def computed(record: TimelineRecord) -> list[str]:
    """Return what compute did, in order, without waits and without a unit being interrupted."""
    names = [span.name for span in record.spans if span.lane == COMPUTE and not span.is_wait]
    return [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]


# ---------------------------------------------------------------------- what ranks do


def record_step(layout: str) -> TimelineRecord:
    """Record the second of three steps."""
    model = sharded(layout)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    timeline = Timeline(model)
    for number in range(3):
        if number == 1:
            timeline.__enter__()
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            timeline.__exit__(None, None, None)
    return timeline.record


@functools.cache
def recorded(layout: str) -> list[TimelineRecord]:
    return run_ranks(torch.Size(LAYOUTS[layout][1]).numel(), record_step, layout)


@pytest.mark.parametrize(
    ("layout", "gathers", "reductions"),
    [
        # The root and the last block stay gathered from forward to backward.
        ("zero 3", {"Model": 1, "blocks.0": 2, "blocks.1": 1}, 1),
        # Weights are gathered once, after the step.
        ("zero 2", dict.fromkeys(UNITS, 1), 1),
        ("zero 1", dict.fromkeys(UNITS, 1), 1),
        ("zero 0", {}, 1),
        # Once over each axis.
        ("hsdp", {"Model": 1, "blocks.0": 2, "blocks.1": 1}, 2),
    ],
)
def test_every_gather_and_reduction_of_a_step_has_a_bar(layout: str, gathers: dict[str, int], reductions: int) -> None:
    for rank, record in enumerate(recorded(layout)):
        assert (record.rank, record.units, record.num_steps) == (rank, UNITS, 1)
        found = {unit.unit: (unit.num_gathers, unit.num_reductions) for unit in record.unit_times()}
        # The root has a frozen parameter, too, in a group that is gathered together with the other.
        assert found == {unit: (gathers.get(unit, 0), reductions) for unit in UNITS}


def test_compute_goes_through_the_units_forward_and_backward_and_ends_with_the_optimizer() -> None:
    for record in recorded("zero 3"):
        blocks = [name for name in computed(record) if not name.endswith("Model")]
        assert blocks == [
            *("forward blocks.0", "forward blocks.1", "backward blocks.1", "backward blocks.0", "optimizer")
        ]
        assert computed(record)[:2] == ["forward Model", "forward blocks.0"]
        assert computed(record)[-2:] == ["backward Model", "optimizer"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bars_of_compute_do_not_overlap_and_all_lie_in_the_recording(layout: str) -> None:
    for record in recorded(layout):
        compute = [span for span in record.spans if span.lane == COMPUTE]
        assert all(earlier.stop <= later.start for earlier, later in itertools.pairwise(compute))
        assert all(0 <= span.start <= span.stop <= record.seconds for span in record.spans)
        assert {span.lane for span in record.spans} <= set(LANES)
        assert 0 < record.exposed_share < 1
        assert all(span.num_bytes for span in record.spans if span.lane != COMPUTE)


def test_a_gather_begins_before_it_is_waited_for_and_ends_when_the_wait_does_at_the_latest() -> None:
    for record in recorded("zero 3"):
        for lane_name in (GATHER, REDUCE):
            for unit in UNITS:
                bars = [span for span in record.spans if (span.lane, span.unit) == (lane_name, unit)]
                waits = [span for span in record.spans if span.is_wait and span.unit == unit]
                waits = [span for span in waits if span.action.endswith(lane_name)]
                assert len(bars) == len(waits) > 0
                assert all(bar.start <= wait.start for bar, wait in zip(bars, waits, strict=True))
                assert all(bar.stop <= wait.stop for bar, wait in zip(bars, waits, strict=True))


class Recomputing(nn.Module):
    """Two blocks, recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def record_recomputation(use_reentrant: bool) -> TimelineRecord:
    model = Recomputing(use_reentrant)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with Timeline(model) as timeline:
        model(torch.randn(3, 5, requires_grad=True)).sum().backward()
    return timeline.record


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_is_computed_again_is_told_from_forward(use_reentrant: bool) -> None:
    for record in run_ranks(2, record_recomputation, use_reentrant):
        again = [name for name in computed(record) if name.startswith("recompute")]
        assert again == ["recompute blocks.1", "recompute blocks.0"]
        assert [name for name in computed(record) if name.startswith("forward blocks")] == [
            *("forward blocks.0", "forward blocks.1")
        ]
        for unit in record.unit_times()[1:]:
            assert min(unit.forward, unit.recompute, unit.backward) > 0


def record_skipping(is_skipped_everywhere: bool) -> TimelineRecord:
    rank, kind = dist.get_rank(), Dropped if is_skipped_everywhere else Skipped
    model = kind()
    shard_blocks(model)
    with Timeline(model) as timeline:
        torch.autograd.backward(skipping_loss(model, 0 if is_skipped_everywhere else rank, 0))
    return timeline.record


def test_a_unit_that_one_rank_skips_is_reduced_on_all() -> None:
    for rank, record in enumerate(run_ranks(2, record_skipping, False)):
        first = record.unit_times()[1]
        assert (first.unit, first.num_gathers > 0, first.num_reductions) == ("first", True, 1)
        assert first.backward > 0 or rank == 0


def test_a_unit_that_every_rank_skips_has_a_row_of_zeros() -> None:
    for record in run_ranks(2, record_skipping, True):
        assert record.unit_times()[1] == UnitTimes("first")
        assert record.unit_times()[2].num_reductions == 1
        assert record.num_steps == 1


def record_evaluation() -> tuple[TimelineRecord, str]:
    model, tokens = sharded("zero 3"), draw_tokens(dist.get_rank())
    timeline = Timeline(model)
    with pytest.raises(StateError, match="until its with block ends"):
        _ = timeline.exposed_share
    with torch.no_grad(), timeline:
        model(tokens)
    evaluated = timeline.record
    with pytest.raises(IndexError), timeline:
        model(tokens + 1000)
    return evaluated, str(timeline.record)


def test_a_forward_alone_can_be_recorded_and_one_that_raises_too() -> None:
    for evaluated, raised in run_ranks(2, record_evaluation):
        assert evaluated.num_steps == 0
        assert {name.split()[0] for name in actions(evaluated, COMPUTE)} == {"forward", "wait"}
        assert actions(evaluated, REDUCE) == []
        assert "exposed communication" in raised


# ---------------------------------------------------------------------- nothing is left, nothing changes


def traces_of_hooks(model: Model) -> dict[str, Any]:
    """Return everything that a timeline touches while it is open."""
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return {
        "hooks": hooks,
        "always called": [len(module._forward_hooks_always_called) for module in model.modules()],
        "listeners": len(listeners),
        "optimizers": (len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def look_for_traces() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    model = sharded("zero 3")
    backward(model)
    before = traces_of_hooks(model)
    with Timeline(model):
        backward(model)
        while_open = traces_of_hooks(model)
        # Waited for when nobody records any more.
        late = model.unshard(async_op=True)
    assert late is not None
    late.wait()
    model.reshard()
    return before, while_open, traces_of_hooks(model)


def test_a_closed_timeline_leaves_listeners_hooks_and_threads_as_they_were() -> None:
    for before, while_open, after in run_ranks(2, look_for_traces):
        assert after == before
        assert all(while_open[key] != before[key] for key in before)


def train_recorded(layout: str, is_recorded: bool) -> dict[str, torch.Tensor]:
    model = sharded(layout)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for number in range(3):
        with Timeline(model) if is_recorded and number != 1 else torch.enable_grad():
            train(model, optimizer, range(number, number + 1), [dist.get_rank()])
    return whole_state(model)


@pytest.mark.parametrize("layout", nightly_but(["zero 3", "zero 0"], LAYOUTS))
def test_recorded_training_gives_the_same_bits(layout: str) -> None:
    num_ranks = torch.Size(LAYOUTS[layout][1]).numel()
    plain = run_ranks(num_ranks, train_recorded, layout, False)
    recorded = run_ranks(num_ranks, train_recorded, layout, True)
    for mine, other in zip(recorded, plain, strict=True):
        assert mine.keys() == other.keys()
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


def record_beside(order: str) -> tuple[TimelineRecord, dict[str, Any], dict[str, Any]]:
    model = sharded("zero 3")
    backward(model)
    before = traces_of_hooks(model)
    timeline, others = Timeline(model), (Watch(model), Audit(model))
    entered = (timeline, *others) if order == "inside" else (*others, timeline)
    with entered[0], entered[1], entered[2]:
        backward(model)
    return timeline.record, before, traces_of_hooks(model)


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_watch_and_audit_may_be_open_too_in_either_order(order: str) -> None:
    for record, before, after in run_ranks(2, record_beside, order):
        assert Counter(actions(record, REDUCE)) == {f"reduce {unit}": 1 for unit in UNITS}
        assert record.waited(REDUCE) > 0
        assert after["listeners"] == before["listeners"]
        assert after["hooks"] == before["hooks"]


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ConfigError, match="no module of the model has parameters that fully_shard took"):
        Timeline(nn.Linear(2, 2))


@pytest.mark.gpu
def test_on_a_gpu_bars_are_the_streams_own_time() -> None:
    """A kernel that the host has only launched is as long as it runs."""
    (record,) = run_ranks(1, record_on_gpu, backend="nccl")
    (block,) = (unit for unit in record.unit_times() if unit.unit == "0")
    assert 0.08 < block.forward < 0.4
    assert record.seconds > 0.08
    assert block.num_gathers >= 1
    compute = [span for span in record.spans if span.lane == COMPUTE]
    assert all(earlier.stop <= later.start + 1e-5 for earlier, later in itertools.pairwise(compute))


def record_on_gpu() -> TimelineRecord:
    model = nn.Sequential(Sleeping(), nn.Linear(8, 8)).cuda()
    for module in (*model, model):
        fully_shard(module)
    x = torch.randn(3, 8, device="cuda")
    model(x).sum().backward()
    with Timeline(model) as timeline:
        model(x).sum().backward()
    return timeline.record


class Sleeping(nn.Linear):
    """Keeps the GPU busy for about a tenth of a second."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(200_000_000)
        return super().forward(x)
