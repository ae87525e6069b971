"""Slots in training: the allocator's bits, no allocation after the first step, and the predicted bytes.

``random_use.cases`` tests slots that are chosen and given up between steps, errors and evaluations.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import Flat, Partial, Replicate, StorageError, memory_meter
from dbuffer.slot_pool import can_exchange_memory
from megatron_fsdp import (
    FsdpConfig,
    FsdpModule,
    Placements,
    add_megatron_fsdp_args,
    explain,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    materialize,
    microbatch,
)
from megatron_fsdp.lifecycle.module import unit_of
from megatron_fsdp.policy.slots import SlotChoice
from megatron_fsdp.variants.memory_slots import pools_of
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, CheckpointedStack, Made, ShuffledStack, Stack, inputs, squared
from tests.harness.oracle import sharded, units_of

HIDDEN_SIZES = (97, 13, 131, 101, 131, 111)
STEPS = 4
# tests/unit/dbuffer/test_slot_pool.py tests the answer on older versions.
pytestmark = pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")


class Repeating(ShuffledStack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](super().forward(x))


def nested(*layers: nn.Module) -> nn.Module:
    """Return a unit around units; its own parameters stay gathered while the inner units run."""
    parts = {"before": nn.Linear(7, 7), "inner": Stack(*layers[:3]), "after": Block(hidden=5)}
    return Made(lambda m, x: m.after(m.inner(m.before(x))), **parts)


def outer_replicas() -> dict[str, Any]:
    placements = Placements((0, 1), (Replicate(), Flat()), (Partial("sum"), Flat()), (Replicate(), Flat()))
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), "placements": placements}


@dataclass(frozen=True)
class Setting:
    """A model, its sharding, and the slots that a step of it takes: (weights, gradients), None if they vary."""

    stack: Callable[..., nn.Module] = Stack
    options: Callable[[], dict[str, Any]] = dict
    slots: tuple[int, int] | None = (2, 1)
    microbatches: int = 1
    ranks: int = 2
    # Whether units come in one order in all steps.
    is_fixed: bool = True


SETTINGS = {
    "a chain of unequal units": Setting(ranks=3),
    "checkpointing, microbatches": Setting(CheckpointedStack, microbatches=3),
    "another order each time": Setting(Repeating, slots=None, is_fixed=False),
    "nested units": Setting(nested, slots=None),
    "replicas of shards": Setting(options=outer_replicas, ranks=4),
    "parts kept after forward": Setting(options=lambda: {"reshard_after_forward": 2}, slots=None, ranks=4),
}


def build(setting: Setting) -> Any:
    torch.manual_seed(5)
    model = setting.stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES))
    for module in reversed(list(model.modules())):
        if isinstance(module, (Block, Stack)) and module is not model:
            fully_shard(module, **setting.options())
    return fully_shard(model, **setting.options())


def pools(model: Any, use: str = "") -> list[Any]:
    return [pool for key, pool in pools_of(model._fsdp_unit)._pools.items() if str(key[0]).startswith(use)]


def num_slots(model: Any, use: str) -> int:
    return sum(pool.num_slots for pool in pools(model, use))


def train(setting: Setting, sizing: str | None) -> list[float]:
    """Train with slots, check allocated and used bytes, and return the losses."""
    meter = memory_meter()
    start = meter.current_bytes
    model = build(setting)
    model.set_slot_pool(sizing)
    rest = meter.current_bytes
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, allocations = [], []
    for step in range(STEPS):
        meter.reset_peak()
        for number in range(setting.microbatches):
            with microbatch(model, is_last=number == setting.microbatches - 1):
                loss = squared(model, dist.get_rank(), STEPS * number + step)
                loss.backward()
                losses.append(loss.item())
        peak = meter.peak_bytes - rest
        allocations.append(meter.num_allocations)
        optimizer.step()
        optimizer.zero_grad()
    check_memory(setting, sizing, model, peak, allocations)
    del model, optimizer, loss
    assert meter.current_bytes == start
    return losses


def check_memory(setting: Setting, sizing: str | None, model: Any, peak: int, allocations: list[int]) -> None:
    report = explain(model, setting.microbatches)
    assert ("of it slots that stay" in str(report)) is (sizing is not None)
    if sizing is None:
        assert min(allocations) > 0
        return
    # A part that is kept after forward is allocated in each step.
    assert setting.options().get("reshard_after_forward") or not any(allocations[-1:])
    if setting.is_fixed:
        assert peak <= max(report.forward_peak.num_bytes, report.backward_peak.num_bytes) <= 1.01 * peak
        assert sum(pool.nbytes for pool in pools(model)) == report.slot_bytes
    if sizing == "largest" and setting.slots is not None:
        assert (num_slots(model, "weights"), num_slots(model, "gradients")) == setting.slots


# Three ranks of unequal units, nested units and kept parts find most mistakes; the others run nightly.
@pytest.mark.parametrize(
    "name", nightly_but(("a chain of unequal units", "nested units", "parts kept after forward"), SETTINGS)
)
@on_ranks(lambda name: SETTINGS[name].ranks)
def test_slots_change_no_bit_and_have_the_predicted_bytes_until_the_model_ends(
    name: str,
) -> None:
    wanted = train(SETTINGS[name], None)
    for sizing in ("largest", "by_size"):
        found = train(SETTINGS[name], sizing)
        assert found == wanted, sizing


def train_step(model: Any, number: int) -> float:
    loss = squared(model, dist.get_rank(), number)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    model.zero_grad()
    return loss.item()


def losses_with(prepare: Callable[[Any], object], *, is_meta: bool = False) -> list[float]:
    torch.manual_seed(3)
    model: nn.Module = Stack(*(Block(hidden=hidden) for hidden in HIDDEN_SIZES[:3]))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model = sharded(model.to("meta") if is_meta else model)
    prepare(model)
    if is_meta:
        materialize(model)
        model.load_state_dict(values)
    return [train_step(model, number) for number in range(3)]


def with_memory_of_the_communicator(model: nn.Module) -> None:
    """Train with slots from each rank's communicator; gloo has none, so the test gives it one."""
    asked: Any = []

    def lent(group: dist.ProcessGroup, device: torch.device) -> Callable[[int], torch.Tensor]:
        return lambda num_bytes: asked.append(num_bytes) or torch.empty(num_bytes, dtype=torch.uint8, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_fsdp.variants.memory_slots.from_communicator", lent)
        for module in model.modules():
            if isinstance(module, FsdpModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
        squared(model, dist.get_rank(), 9).backward()
        model.zero_grad()
    # Blocks of three sizes, their weights and their gradients.
    assert len(asked) == 6


@on_ranks(2)
def test_slots_in_communicator_memory_may_be_chosen_before_it_exists() -> None:
    wanted = losses_with(lambda model: None)
    assert losses_with(with_memory_of_the_communicator) == wanted
    assert losses_with(lambda model: model.set_slot_pool(), is_meta=True) == wanted


@on_ranks(2)
def test_units_that_keep_their_weights_have_slots_of_their_own_size() -> None:
    model = build(Setting())
    model.set_reshard_after_forward(False)
    model.set_slot_pool("largest")
    squared(model, dist.get_rank(), 0).backward()
    wanted = sum(group.gathered.nbytes for each in model.layers for group in each.parameter_groups)
    assert sum(pool.nbytes for pool in pools(model, "weights")) == wanted > 0


# An argument of ``fully_shard_model``, its flag, and the slots that it selects.
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
            options: dict[str, Any] = {argument: True}
            model = fully_shard_model(plain, ["Block"], **options)
            squared(model, dist.get_rank(), 0).backward()
            assert model._fsdp_unit.slots == choice, argument
            assert num_slots(model, "weights") == (2 if choice.sizing == "largest" else 5), argument


def test_user_buffers_are_symmetric_memory_on_gpus_by_default() -> None:
    # --disable-symmetric-registration, disable_symmetric_registration
    for is_symmetric, device, source in (
        (True, "cuda", "NCCL"),
        (False, "cuda", "communicator"),
        (True, "cpu", "device"),
    ):
        options: dict[str, Any] = {"is_symmetric": is_symmetric, "device_type": device}
        choice = SlotChoice.of_megatron(double_buffer=False, max_pool=False, user_buffers=True, **options)
        assert choice == SlotChoice("by_size", source)


@on_ranks(2)
def test_two_models_in_one_backward_train_the_same_and_stop_allocating() -> None:
    found: dict[str | None, list[float]] = {}
    for sizing in (None, "largest"):
        models = [build(Setting()), build(Setting())]
        for model in models:
            model.set_slot_pool(sizing)
        for number in range(6):
            memory_meter().reset_peak()
            loss = models[1](models[0](inputs(dist.get_rank(), number))).square().mean()
            loss.backward()
            found.setdefault(sizing, []).append(loss.item())
            for model in models:
                model.zero_grad()
            assert sizing is None or number < 4 or memory_meter().num_allocations == 0
    assert found[None] == found["largest"]


def shuffled(sizing: str | None) -> list[float]:
    model = build(Setting(ShuffledStack))
    model.set_slot_pool(sizing)
    return [train_step(model, number) for number in range(14)]


@on_ranks(2)
def test_an_order_that_changes_from_step_to_step_gives_the_same_numbers() -> None:
    assert shuffled("largest") == shuffled(None)


@on_ranks(2)
def test_slots_that_no_unit_takes_are_freed() -> None:
    model = build(Setting())
    train_step(model, 0)
    before = memory_meter().current_bytes
    for sizing in ("largest", "by_size"):
        model.set_slot_pool(sizing)
        train_step(model, 1)
        assert memory_meter().current_bytes > before
    model.set_slot_pool(None)
    assert memory_meter().current_bytes == before


@on_ranks(1)
def test_a_refused_sizing_leaves_the_slots_of_all_units() -> None:
    model = build(Setting())
    model.set_slot_pool("largest")
    with pytest.raises(StorageError, match="fix: give one of 'by_size', 'largest'"):
        model.set_slot_pool("smallest")
    assert {unit_of(each).slots for each in units_of(model)} == {SlotChoice("largest")}
    model.set_reshard_after_forward(True)
    train_step(model, 0)
