"""The host calls of a step on Llama 3.2 1B's widths come once per unit, not per parameter or group."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.virtual_models import make_model
from dbuffer.collectives import all_gather
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.engine import fused_linear, grads
from megatron_fsdp.lifecycle.module import unit_of
from tests.harness import run_ranks
from tests.nullcuda import machine

BF16, FP32 = torch.bfloat16, torch.float32
NUM_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a second step.

    Attributes:
        groups: of each unit. packings: how many buffers each submission to the reduce lane packed.
        coalesced: entries into PyTorch's private coalescing manager. collectives: that NCCL got.
        products: calls of FusedLinear's own function.
    """

    groups: list[int]
    packings: list[int]
    coalesced: int
    collectives: int
    products: int


def counts(reduce: torch.dtype) -> Counts:
    machine.become_rank_0_of(8)
    mesh = init_device_mesh("cuda", (8,))
    with torch.device("cuda"):
        model, tokens = make_model("1b", NUM_LAYERS), torch.zeros(1, 64, dtype=torch.long)
    units: list[Any] = [*model.units(), model]
    for unit in units:
        fully_shard(unit, mesh, mp_policy=MixedPrecisionPolicy(BF16, reduce, cast_forward_inputs=False))
    model(tokens).backward()
    model.zero_grad()
    packings: list[int] = []
    real = grads._pack_due

    def pack(buffers: Any, works: Any) -> None:
        packings.append(len(buffers))
        real(buffers, works)

    manager = mock.patch.object(all_gather, "_coalescing", wraps=all_gather._coalescing)
    torchs = mock.patch.object(dist.distributed_c10d, "_coalescing_manager", side_effect=AssertionError)
    products = mock.patch.object(fused_linear, "product_into_buffer", wraps=fused_linear.product_into_buffer)
    with (
        mock.patch.object(grads, "_pack_due", pack),
        manager as entered,
        torchs,
        products as multiplied,
        machine.logged(),
    ):
        model(tokens).backward()
    collectives = sum(call.kind == "collective" for call in machine.calls())
    groups = [len(unit_of(unit).groups) for unit in units]
    return Counts(groups, packings, entered.call_count, collectives, multiplied.call_count)


def counts_of(reduce: torch.dtype) -> Counts:
    (found,) = run_ranks(1, counts, reduce, fresh=True, timeout=200)
    return found


def test_one_submission_packs_all_groups_of_a_unit() -> None:
    found = counts_of(FP32)
    assert max(found.groups) > 1
    assert sorted(found.packings) == sorted(each for each in found.groups if each)


def test_groups_of_a_unit_travel_without_the_coalescing_manager() -> None:
    found = counts_of(FP32)
    assert found.coalesced == 0
    # Each group is gathered for forward, at most once for backward, and reduced.
    assert 2 * sum(found.groups) <= found.collectives <= 3 * sum(found.groups)


def test_linear_layers_whose_gradients_are_cast_run_pytorchs_own_operator() -> None:
    assert counts_of(FP32).products == 0


def test_linear_layers_multiply_gradients_of_the_reduce_dtype_into_their_buffer() -> None:
    assert counts_of(BF16).products >= 7 * NUM_LAYERS
