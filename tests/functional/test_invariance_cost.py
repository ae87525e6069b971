"""What ``reduction="invariant"`` takes is what ``explain`` says: bytes held, to the byte, and bytes on the wire."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbuffer import CollectiveCall, memory_meter, observe_collectives
from megatron_fsdp import explain
from megatron_fsdp.runtime.grads.invariant_reduction import _InvariantReduction
from tests.functional.test_invariance import NUM_MICROBATCHES, Run, accumulate, sharded
from tests.harness import run_ranks

RUNS = [
    Run((1,)),
    Run((2,)),
    Run((3,), wire="bf16"),
    Run((4,)),
    Run((4,), "no_shard"),
    Run((3,), "optim"),
    Run((2, 2), "hsdp", "bf16"),
    Run((2, 2), "hfsdp"),
    Run((4, 1), "hsdp"),
]


def measured(run: Run) -> tuple[tuple[int, ...], tuple[int, ...], Counter[object], Counter[object], int, int]:
    model, meter = sharded(run), memory_meter()
    calls: list[CollectiveCall] = []
    allocated = 0
    at_rest = meter.current_bytes
    for step in range(4):
        calls.clear()
        meter.reset_peak()
        with observe_collectives(calls.append):
            accumulate(model, step)
        peak = meter.peak_bytes
        for parameter in model.parameters():
            parameter.grad = None
        allocated = meter.current_bytes - at_rest
    report = explain(model, num_microbatches=NUM_MICROBATCHES // torch.Size(run.mesh).numel())
    highest = max(report.forward_peak.num_bytes, report.backward_peak.num_bytes)
    stays = report.counter_bytes + report.scratch_bytes
    found: Counter[object] = Counter(
        (call.kind, call.axis, call.num_bytes) for call in calls if call.kind == "all_to_all"
    )
    said: Counter[object] = Counter()
    for unit in report.units:
        for group in unit.groups:
            for each in group.collectives:
                said[each.kind, each.axis, each.bytes_each] += each.count * (each.kind == "all_to_all")
    packed = max(unit.transient_bytes("packed gradients") for unit in report.units)
    return (peak - at_rest, allocated), (highest, stays), found, +said, report.scratch_bytes, packed


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_bytes_held_and_sent_are_those_that_explain_says(run: Run) -> None:
    for found, said, calls, planned, scratch, packed in run_ranks(torch.Size(run.mesh).numel(), measured, run):
        assert found == said
        assert calls == planned
        assert scratch < packed


class NewMemory(TorchDispatchMode):
    """Adds up the bytes of what operators return in memory that they were not given."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                self.num_bytes += tensor.untyped_storage().nbytes()
        return result


def made_at_the_end(run: Run) -> tuple[int, int]:
    """Return how often a second step adds up what is left, and the bytes of tensors that this makes."""
    model, memory, write, count = sharded(run), NewMemory(), _InvariantReduction._write, 0

    def watched(reduction: _InvariantReduction, target: torch.Tensor) -> None:
        nonlocal count
        count += 1
        with memory:
            write(reduction, target)

    for step in range(2):
        memory.num_bytes = count = 0
        with mock.patch.object(_InvariantReduction, "_write", watched):
            accumulate(model, step)
        for parameter in model.parameters():
            parameter.grad = None
    return count, memory.num_bytes


@pytest.mark.parametrize("run", [run for run in RUNS if run.strategy in ("no_shard", "hsdp")], ids=str)
def test_what_the_optimizer_holds_whole_is_put_together_in_memory_that_is_there(run: Run) -> None:
    assert run_ranks(torch.Size(run.mesh).numel(), made_at_the_end, run) == [(3, 0)] * torch.Size(run.mesh).numel()
