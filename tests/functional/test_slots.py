"""Slots and an arena in training: the bits of the allocator, nothing allocated after a step, bytes as predicted."""

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import Flat, Partial, Replicate, memory_meter
from dbuffer.slot_pool import ArenaPool, can_exchange_memory
from megatron_fsdp import (
    FsdpConfig,
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    add_megatron_fsdp_args,
    explain,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    materialize,
    microbatch,
)
from megatron_fsdp.policy.slots import SlotChoice
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, CheckpointedStack, ShuffledStack, Stack, inputs
from tests.harness.oracle import shard_each

HIDDEN_SIZES = (97, 13, 131, 101, 131, 111)
STEPS = 4
# What older versions answer is tested in tests/unit/dbuffer/test_slot_pool.py.
pytestmark = pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")


class Repeating(ShuffledStack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](super().forward(x))


class Nested(nn.Module):
    """A unit around units, with parameters of its own, which stay gathered while those inside run."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(7, 7)
        self.inner = Stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES[:3]))
        self.after = Block(hidden=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)))


def outer_replicas() -> dict[str, Any]:
    placements = Placements((0, 1), (Replicate(), Flat()), (Partial("sum"), Flat()), (Replicate(), Flat()))
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), "placements": placements}


@dataclass(frozen=True)
class Setting:
    """A model, how it is sharded, and the slots that a step of it takes: (weights, gradients), None for not fixed."""

    stack: Callable[..., nn.Module] = Stack
    options: Callable[[], dict[str, Any]] = dict
    slots: tuple[int, int] | None = (2, 1)
    microbatches: int = 1
    ranks: int = 2
    sizings: tuple[str, ...] = ("largest", "by_size", "static")
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    # Of an arena, over the most that is held at once.
    excess: float = 1.01


SETTINGS = {
    "a chain of unequal units": Setting(ranks=3),
    "microbatches": Setting(microbatches=3),
    "bf16 reduced in fp32": Setting(policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "checkpointing": Setting(CheckpointedStack),
    "another order each time": Setting(Repeating, slots=None, sizings=("largest", "by_size")),
    "nested units": Setting(lambda *_: Nested(), slots=None),
    "sharded gradients": Setting(
        options=lambda: {"placements": Placements((0,), (Replicate(),), (Flat(),), (Flat(),))}, slots=(0, 1)
    ),
    "replicas of shards": Setting(options=outer_replicas, ranks=4),
    "parts kept after forward": Setting(
        options=lambda: {"reshard_after_forward": 2}, slots=None, ranks=4, sizings=("static",), excess=1.03
    ),
}


def build(setting: Setting) -> nn.Module:
    torch.manual_seed(5)
    model = setting.stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES))
    options = setting.options()
    for module in reversed(list(model.modules())):
        if isinstance(module, (Block, Stack)) and module is not model:
            fully_shard(module, mp_policy=setting.policy, **options)
    return fully_shard(model, mp_policy=setting.policy, **options)


def slots_of(model: nn.Module) -> tuple[int, int]:
    counts = {"weights": 0, "gradients": 0}
    for (use, *_), pool in model._fsdp_unit.schedule.pools._pools.items():
        counts[str(use)] += pool.num_slots
    return counts["weights"], counts["gradients"]


def bytes_of_slots(model: nn.Module, use: str = "") -> int:
    pools = model._fsdp_unit.schedule.pools._pools
    return sum(pool.nbytes for key, pool in pools.items() if str(key[0]).startswith(use))


def arenas(model: nn.Module) -> list[ArenaPool]:
    return [pool for pool in model._fsdp_unit.schedule.pools._pools.values() if isinstance(pool, ArenaPool)]


@dataclass
class Run:
    """What one rank saw: the loss of each microbatch, and of each step what was allocated and held at most."""

    losses: list[float] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    predicted: int = 0
    slots: tuple[int, int] = (0, 0)
    slot_bytes: tuple[int, int] = (0, 0)
    misses: int = 0
    arena: tuple[int, int] = (0, 0)
    left: int = 0
    report: str = ""


def train(name: str, sizing: str | None) -> Run:
    setting, run, meter = SETTINGS[name], Run(), memory_meter()
    start = meter.current_bytes
    model = build(setting)
    model.set_slot_pool(sizing)
    rest = meter.current_bytes
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(STEPS):
        meter.reset_peak()
        for number in range(setting.microbatches):
            with microbatch(model, is_last=number == setting.microbatches - 1):
                loss = model(inputs(dist.get_rank(), STEPS * number + step)).float().square().mean()
                loss.backward()
                run.losses.append(loss.item())
        run.peaks.append(meter.peak_bytes - rest)
        run.allocations.append(meter.num_allocations)
        optimizer.step()
        optimizer.zero_grad()
    report = explain(model, setting.microbatches)
    run.predicted = max(report.forward_peak.num_bytes, report.backward_peak.num_bytes)
    run.report = str(report)
    run.slot_bytes = bytes_of_slots(model), report.slot_bytes
    if sizing == "static":
        plans = [pool.plan for pool in arenas(model) if pool.plan is not None]
        run.misses = sum(pool.num_misses for pool in arenas(model))
        run.arena = sum(plan.num_bytes for plan in plans), sum(plan.lower_bound for plan in plans)
    else:
        run.slots = slots_of(model)
    del model, optimizer, loss
    run.left = meter.current_bytes - start
    return run


def train_each_way(name: str) -> dict[str | None, Run]:
    return {sizing: train(name, sizing) for sizing in (None, *SETTINGS[name].sizings)}


Runs = tuple[Setting, list[dict[str | None, Run]]]
# Three ranks of unequal units, nested units and parts that are kept show the most; the others run nightly.
QUICK = ("a chain of unequal units", "nested units", "parts kept after forward")


@pytest.fixture(scope="module", params=nightly_but(QUICK, SETTINGS))
def runs(request: pytest.FixtureRequest) -> Runs:
    setting = SETTINGS[request.param]
    return setting, run_ranks(setting.ranks, train_each_way, request.param)


def test_slots_change_no_bit_of_training_and_are_freed_with_the_model(runs: Runs) -> None:
    for rank in runs[1]:
        assert all(run.losses == rank[None].losses for run in rank.values())
        assert all(run.left == 0 for run in rank.values())


def test_nothing_is_allocated_after_the_first_step(runs: Runs) -> None:
    for rank in runs[1]:
        assert min(rank[None].allocations) > 0
        assert all(run.allocations[-1] == 0 for sizing, run in rank.items() if sizing)
        if "static" in rank:
            assert not any(rank["static"].allocations[2:])
            assert rank["static"].misses == 0


def test_a_chain_of_units_takes_two_slots_for_weights_and_one_for_gradients(runs: Runs) -> None:
    setting, ranks = runs
    if setting.slots is not None:
        assert {rank["largest"].slots for rank in ranks} == {setting.slots}


def test_bytes_are_predicted_from_above_within_a_percent_and_an_arena_holds_hardly_more_than_it_must(
    runs: Runs,
) -> None:
    setting, ranks = runs
    for rank in ranks:
        for sizing, run in rank.items():
            assert ("of it slots that stay" in run.report) is (sizing is not None)
            assert ("of it an arena" in run.report) is (sizing == "static")
            if sizing and "static" in setting.sizings:
                assert run.peaks[-1] <= run.predicted <= 1.01 * run.peaks[-1]
                assert sizing == "static" or run.slot_bytes[0] == run.slot_bytes[1]
        if "static" in rank:
            num_bytes, lower_bound = rank["static"].arena
            assert 0 < lower_bound <= num_bytes <= setting.excess * lower_bound


def losses_with(prepare: Callable[[nn.Module], object], *, is_meta: bool = False) -> list[float]:
    torch.manual_seed(3)
    plain = Stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES[:3]))
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    model = plain.to("meta") if is_meta else plain
    shard_each(model)
    prepare(model)
    if is_meta:
        materialize(model)
        model.load_state_dict(values)
    return [train_step(model, number) for number in range(3)]


def with_memory_of_the_communicator(model: nn.Module) -> None:
    """Train with slots that each rank's communicator gives; gloo has none, so it is lent one."""
    asked: list[int] = []

    def lent(group: dist.ProcessGroup, device: torch.device) -> Callable[[int], torch.Tensor]:
        def allocate(num_bytes: int) -> torch.Tensor:
            asked.append(num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_fsdp.runtime.weights.memory_slots.from_communicator", lent)
        for module in model.modules():
            if isinstance(module, FsdpModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
        model(inputs(dist.get_rank(), 9)).square().mean().backward()
        model.zero_grad()
    # Blocks of three sizes, their weights and their gradients.
    assert len(asked) == 6


@on_ranks(2)
def test_slots_may_be_of_the_communicator_s_memory_and_chosen_before_there_is_any() -> None:
    wanted = losses_with(lambda model: None)
    assert losses_with(with_memory_of_the_communicator) == wanted
    assert losses_with(lambda model: model.set_slot_pool(), is_meta=True) == wanted


@on_ranks(2)
def test_units_that_keep_their_weights_have_slots_of_their_own_size() -> None:
    model = build(Setting())
    model.set_reshard_after_forward(False)
    model.set_slot_pool("largest")
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    in_slots = bytes_of_slots(model, "weights")
    wanted = sum(group.gathered.nbytes for each in model.layers for group in each.parameter_groups)
    assert in_slots == wanted > 0


# An argument of ``fully_shard_model``, the flag that says it, and the slots that it asks for.
MEGATRONS = (
    ("fsdp_double_buffer", "--fsdp-double-buffer", SlotChoice("by_size")),
    ("maxpool_double_buffer", "--megatron-fsdp-max-pool-double-buffer", SlotChoice("largest")),
    ("nccl_ub", "--use-nccl-ub", SlotChoice("by_size")),
    ("", "--bf16", SlotChoice()),
)


@on_ranks(2)
def test_megatrons_buffers_and_their_flags_are_slots() -> None:
    for argument, flag, choice in MEGATRONS:
        model = build(Setting())
        FsdpConfig.from_args(add_megatron_fsdp_args(argparse.ArgumentParser()).parse_args([flag])).apply(model)
        assert model._fsdp_unit.slots == choice, flag
        if argument:
            plain = Stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES))
            model = fully_shard_model(plain, ["Block"], **{argument: True})
            model(inputs(dist.get_rank(), 0)).square().mean().backward()
            assert model._fsdp_unit.slots == choice, argument
            assert slots_of(model)[0] == (2 if choice.sizing == "largest" else 5), argument


@pytest.mark.parametrize(
    ("is_symmetric", "device_type", "source"),
    [(True, "cuda", "NCCL"), (False, "cuda", "communicator"), (True, "cpu", "device")],
)
def test_user_buffers_are_symmetric_memory_on_gpus_unless_told_otherwise(
    is_symmetric: bool, device_type: str, source: str
) -> None:
    # --disable-symmetric-registration, disable_symmetric_registration
    choice = SlotChoice.of_megatron(
        double_buffer=False, max_pool=False, user_buffers=True, is_symmetric=is_symmetric, device_type=device_type
    )
    assert choice == SlotChoice("by_size", source)


Use = Callable[[list[nn.Module], int], list[float]]


def train_step(model: nn.Module, number: int) -> float:
    loss = model(inputs(dist.get_rank(), number)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.zero_grad()
    return loss.item()


def two_models_in_one_backward(models: list[nn.Module], number: int) -> list[float]:
    x = inputs(dist.get_rank(), number)
    loss = models[1](models[0](x)).square().mean()
    loss.backward()
    for model in models:
        model.zero_grad()
    return [loss.item()]


def exception_in_backward(models: list[nn.Module], number: int) -> list[float]:
    model = models[0]
    if number % 2:
        output = model.layers[2](model.layers[1](model.layers[0](inputs(dist.get_rank(), number))))
        output.register_hook(_interrupt)
        with pytest.raises(KeyError):
            (output * 2).sum().backward()
        model.zero_grad()
        model.reset_iter_state()
    return [train_step(model, number)]


def _interrupt(*_: object) -> None:
    raise KeyError


USES: dict[str, Use] = {
    use.__name__: use
    for use in (
        two_models_in_one_backward, exception_in_backward,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
@on_ranks(2)
def test_other_uses_give_the_same_numbers_and_allocate_nothing_in_the_end(name: str) -> None:
    found = []
    allocations = []
    for sizing in (None, "static"):
        models = [build(Setting()), build(Setting())]
        losses = []
        for model in models:
            model.set_slot_pool(sizing)
        for number in range(6):
            memory_meter().reset_peak()
            losses.append(USES[name](models, number))
            if sizing is not None:
                allocations.append(memory_meter().num_allocations)
        found.append(losses)
    assert found[0] == found[1]
    assert allocations[-2:] == [0, 0]


Steps = Callable[[str | None], tuple[list[float], int]]


def warnings_where_both_are_alike(steps: Steps) -> tuple[list[str], int]:
    """Return the warnings and the misses of steps in an arena, whose losses are those without."""
    said: list[str] = []
    log, listener = logging.getLogger("dbuffer.slot_pool"), logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())
    log.addHandler(listener)
    (plain, _), (placed, misses) = steps(None), steps("static")
    log.removeHandler(listener)
    assert plain == placed
    return said, misses


def shuffled(sizing: str | None) -> tuple[list[float], int]:
    model = build(Setting(ShuffledStack))
    model.set_slot_pool(sizing)
    return [train_step(model, number) for number in range(14)], 0


def ever_more_held(sizing: str | None) -> tuple[list[float], int]:
    torch.manual_seed(5)
    model = Stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES + HIDDEN_SIZES))
    shard_each(model)
    model.set_slot_pool(sizing)
    losses = []
    for number, layer in enumerate(model.layers):
        losses.append(train_step(model, number))
        layer.set_reshard_after_forward(False)
    return losses, sum(pool.num_misses for pool in arenas(model))


@on_ranks(2)
def test_orders_that_find_no_place_give_the_same_numbers_with_one_warning_at_most() -> None:
    said, _ = warnings_where_both_are_alike(shuffled)
    assert len(said) <= 1
    (text,), misses = warnings_where_both_are_alike(ever_more_held)
    assert misses > 0
    assert "finds no place is allocated" in text
