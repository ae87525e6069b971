"""A static arena in training: the bits of the allocator, nothing allocated after the first step, bytes as predicted."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import memory_meter
from dbuffer.arena_pool import ArenaPool
from dbuffer.slot_pool import can_exchange_memory
from megatron_fsdp import explain, fully_shard, fully_shard_optimizer, microbatch, no_sync
from tests.functional import test_slots
from tests.functional.test_slots import HIDDEN_SIZES, Setting, ShuffledStack, build
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Stack, inputs

STEPS = 4
pytestmark = pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")


def in_pairs() -> dict[str, Any]:
    return {"reshard_after_forward": 2}


SETTINGS = {**test_slots.SETTINGS, "parts kept after forward": Setting(options=in_pairs, ranks=4)}


@dataclass
class Run:
    """What one rank saw: the loss of each microbatch, and of each step what was allocated and held at most."""

    losses: list[float] = field(default_factory=list)
    allocations: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    misses: int = 0
    predicted: int = 0
    arena: tuple[int, int] = (0, 0)
    left: int = 0
    report: str = ""


def arenas(model: nn.Module) -> list[ArenaPool]:
    return [pool for pool in model._fsdp_unit.schedule.pools._pools.values() if isinstance(pool, ArenaPool)]


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
        run.allocations.append(meter.num_allocations)
        run.peaks.append(meter.peak_bytes - rest)
        optimizer.step()
        optimizer.zero_grad()
    report = explain(model, setting.microbatches)
    run.predicted = max(report.forward_peak.num_bytes, report.backward_peak.num_bytes)
    run.report = str(report)
    pools = arenas(model)
    plans = [pool.plan for pool in pools if pool.plan is not None]
    run.misses = sum(pool.num_misses for pool in pools)
    run.arena = sum(plan.num_bytes for plan in plans), sum(plan.lower_bound for plan in plans)
    del model, optimizer, loss, pools
    run.left = meter.current_bytes - start
    return run


def train_both(name: str) -> tuple[Run, Run]:
    return train(name, None), train(name, "static")


STATIC = [name for name in SETTINGS if name != "another order each time"]
NIGHTLY = ("bf16 reduced in fp32", "sharded gradients", "checkpointing", "replicas of shards")


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.slow) if n in NIGHTLY else n for n in STATIC])
def runs(request: pytest.FixtureRequest) -> list[tuple[Run, Run]]:
    return run_ranks(SETTINGS[request.param].ranks, train_both, request.param)


def test_an_arena_changes_no_bit_of_training(runs: list[tuple[Run, Run]]) -> None:
    assert all(arena.losses == plain.losses for plain, arena in runs)


def test_from_the_second_step_on_nothing_is_allocated(runs: list[tuple[Run, Run]]) -> None:
    for plain, arena in runs:
        assert min(plain.allocations) > 0
        assert arena.allocations[1:] == [0] * (STEPS - 1)
        assert arena.misses == 0


def test_it_is_as_large_as_the_most_bytes_held_and_explain_says_so_before(runs: list[tuple[Run, Run]]) -> None:
    for _, arena in runs:
        num_bytes, lower_bound = arena.arena
        assert 0 < lower_bound <= num_bytes <= 1.01 * lower_bound
        assert arena.peaks[-1] <= arena.predicted <= 1.01 * arena.peaks[-1]
        assert "of it an arena" in arena.report


def test_it_is_freed_with_the_model(runs: list[tuple[Run, Run]]) -> None:
    assert all(arena.left == 0 for _, arena in runs)


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


@torch.no_grad()
def evaluate(model: nn.Module, number: int) -> float:
    return model(inputs(dist.get_rank(), number)).square().mean().item()


def evaluation_between(models: list[nn.Module], number: int) -> list[float]:
    return [evaluate(models[0], 7), train_step(models[0], number), evaluate(models[0], 8)]


def gradients_summed_up_here(models: list[nn.Module], number: int) -> list[float]:
    model, losses = models[0], []
    for part in range(2):
        with no_sync(model):
            loss = model(inputs(dist.get_rank(), 3 * number + part)).square().mean()
            loss.backward()
            losses.append(loss.item())
    return [*losses, train_step(model, number)]


def two_models_in_turn(models: list[nn.Module], number: int) -> list[float]:
    return [train_step(models[number % 2], number), evaluate(models[1 - number % 2], number)]


def two_models_in_one_backward(models: list[nn.Module], number: int) -> list[float]:
    x = inputs(dist.get_rank(), number)
    loss = models[1](models[0](x)).square().mean()
    loss.backward()
    for model in models:
        model.zero_grad()
    return [loss.item()]


class Interrupted(Exception):
    """Raised in the midst of a step."""


def exception_in_forward(models: list[nn.Module], number: int) -> list[float]:
    model = models[0]
    if number % 2:
        handle = model.layers[3].register_forward_pre_hook(_interrupt)
        with pytest.raises(Interrupted):
            model(inputs(dist.get_rank(), number))
        handle.remove()
    return [train_step(model, number)]


def exception_in_backward(models: list[nn.Module], number: int) -> list[float]:
    model = models[0]
    if number % 2:
        output = model.layers[2](model.layers[1](model.layers[0](inputs(dist.get_rank(), number))))
        output.register_hook(_interrupt)
        with pytest.raises(Interrupted):
            (output * 2).sum().backward()
        model.zero_grad()
        model.reset_iter_state()
    return [train_step(model, number)]


def _interrupt(*_: object) -> None:
    raise Interrupted


def layers_left_out(models: list[nn.Module], number: int) -> list[float]:
    """Another chain of layers in every step, and the whole one at the end."""
    model = models[0]
    layers = list(model.layers)
    x = inputs(dist.get_rank(), number)
    for layer in layers[number % 3 :] if number % 2 else layers[::-1]:
        x = layer(x)
    loss = x.square().mean()
    loss.backward()
    model.zero_grad()
    return [loss.item(), train_step(model, number)]


USES: dict[str, Use] = {
    use.__name__: use
    for use in (
        evaluation_between, gradients_summed_up_here, two_models_in_turn,
        two_models_in_one_backward, exception_in_forward, exception_in_backward, layers_left_out,
    )
}  # fmt: skip


QUICK_USES = ("evaluation_between", "two_models_in_one_backward", "exception_in_backward", "layers_left_out")


@pytest.mark.parametrize("name", nightly_but(QUICK_USES, USES))
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
    plain = found[0]
    arena = found[1]
    assert arena == plain
    assert allocations[-2:] == [0, 0]


@on_ranks(2)
def test_an_order_that_changes_gives_the_same_numbers_and_one_warning_at_most() -> None:
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, listener = logging.getLogger("dbuffer.arena_pool"), Listener(logging.WARNING)
    log.addHandler(listener)
    found = []
    try:
        for sizing in (None, "static"):
            model = build(Setting(ShuffledStack))
            model.set_slot_pool(sizing)
            found.append([train_step(model, number) for number in range(14)])
    finally:
        log.removeHandler(listener)
    plain = found[0]
    arena = found[1]
    assert arena == plain
    assert len(said) <= 1


@on_ranks(2)
def test_what_finds_no_place_has_a_slot_of_its_own_with_one_warning() -> None:
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log, listener = logging.getLogger("dbuffer.arena_pool"), Listener(logging.WARNING)
    log.addHandler(listener)
    found, misses = [], 0
    try:
        for sizing in (None, "static"):
            torch.manual_seed(5)
            model = Stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES + HIDDEN_SIZES))
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
            model.set_slot_pool(sizing)
            losses = []
            for number, layer in enumerate(model.layers):
                losses.append(train_step(model, number))
                layer.set_reshard_after_forward(False)
            found.append(losses)
            misses = sum(pool.num_misses for pool in arenas(model))
    finally:
        log.removeHandler(listener)
    plain = found[0]
    arena = found[1]
    assert arena == plain
    assert misses > 0
    assert len(said) == 1
    assert "slot of its own" in said[0]
