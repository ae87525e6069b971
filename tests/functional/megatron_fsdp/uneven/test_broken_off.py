"""Interrupts and lack of memory inside blocks of unsharded() and join() leave a model that trains on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import join, unsharded
from megatron_fsdp.engine.optimizer_steps import STEP_CHECKS
from megatron_fsdp.engine.unit import units_below
from tests.functional.megatron_fsdp.engine.interruptions import Fault, interrupts_at_calls, no_memory
from tests.functional.megatron_fsdp.uneven.programs import Routed, layer_drop, loss_of, shard
from tests.harness import on_ranks
from tests.harness.twins import Twins

KINDS: dict[str, Callable[[Fault], AbstractContextManager[None]]] = {
    "memory": no_memory,
    "calls": lambda fault: interrupts_at_calls(fault, r"unsharded.py|join.py|unit.py|module.py|param_group.py"),
}


def evaluate(twins: Twins, writeback: bool) -> None:
    """Run two forwards on gathered weights."""
    with torch.no_grad(), unsharded(twins.model, writeback=writeback):
        for number in range(2):
            loss_of(twins.model, 0, number, layer_drop(0, number))


def train_joined(twins: Twins, writeback: bool) -> None:
    """Run two joined batches."""
    with join(twins.model, [0, 1]) as joined:
        for number in joined:
            loss_of(twins.model, 0, number, layer_drop(0, number)).backward()


@contextmanager
def broken_off(kind: str, fault: Fault) -> Iterator[None]:
    """Ignore the injected fault."""
    try:
        with KINDS[kind](fault):
            yield
    except (KeyboardInterrupt, torch.OutOfMemoryError):
        pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("action", "writeback"), [(evaluate, False), (evaluate, True), (train_joined, False)])
@on_ranks(1, timeout=600)
def test_a_block_that_is_broken_off_anywhere_leaves_a_model_that_trains(
    kind: str, action: Callable[[Twins, bool], None], writeback: bool
) -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    num_checks, at, stride = len(STEP_CHECKS), 1, 5 if kind == "memory" else 37
    while True:
        fault = Fault(at)
        with broken_off(kind, fault):
            action(twins, writeback)
        twins.zero_grad()
        if fault.met < at:
            break
        assert all(unit.num_holds == 0 for unit in units_below(twins.model)), fault.where
        assert len(STEP_CHECKS) == num_checks, fault.where
        twins.backward(at, lambda model, rank, step: loss_of(model, rank, step, layer_drop(rank, step)))
        assert twins.gradients_apart() < 1e-6, fault.where
        twins.zero_grad()
        at += stride
    assert at > 3 * stride
    assert dist.get_world_size() == 1
