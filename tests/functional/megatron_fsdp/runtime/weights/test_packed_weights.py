"""Weights that travel in 8 bits have the values that the published formulas give, on any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dbuffer import observe_collectives
from megatron_fsdp import MixedPrecisionPolicy, Placements, fully_shard
from tests.functional.megatron_fsdp.runtime.weights.packed_training import Job, Net, traffic, train, used_weights
from tests.harness import on_ranks, run_ranks


@pytest.mark.parametrize("gather", ["fp8", "mxfp8", "int8_block"])
def test_any_ranks_and_units_train_to_the_same_bits(gather: str) -> None:
    ((losses, weights),) = run_ranks(1, train, Job(gather))
    others = [
        (3, Job(gather, ("second", "first"))),
        # Cut anywhere between rows, also inside of MXFP8's blocks of 32 rows.
        (4, Job(gather, ("first",), is_hybrid=True, cuts_rows=True)),
        (4, Job(gather, cuts_rows=True)),
    ]
    for num_ranks, job in others:
        for found, found_weights in run_ranks(num_ranks, train, job):
            assert found == losses
            assert all(torch.equal(found_weights[name], weight) for name, weight in weights.items())


def e4m3(value: float) -> float:
    """Round one number to E4M3, to nearest even and saturated, from the format's definition."""
    magnitude = min(abs(value), 448.0)
    if magnitude == 0:
        return 0.0
    exponent = max(math.floor(math.log2(magnitude)), -6)
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(magnitude / step) * step, 448.0), value)


def in_blocks(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """OCP MX: blocks of rows x columns share the power of two floor(log2(largest)) - 8."""
    found = torch.empty_like(matrix)
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], columns):
            block = matrix[top : top + rows, left : left + columns]
            scale = 2.0 ** (math.floor(math.log2(float(block.abs().max()))) - 8)
            values = [e4m3(value / scale) * scale for value in block.flatten().tolist()]
            found[top : top + rows, left : left + columns] = torch.tensor(values).view_as(block)
    return found


def as_published(weight: torch.Tensor, gather: str, *, is_backward: bool) -> torch.Tensor:
    if gather == "fp8":
        scale = torch.tensor(448.0) / weight.abs().max()
        values = [e4m3(value) for value in (weight * scale).flatten().tolist()]
        return torch.tensor(values).view_as(weight) / scale
    if gather == "mxfp8":
        if weight.shape[-1] % 32 or weight.shape[-2] % 32:
            return weight
        flat = weight.reshape(-1, weight.shape[-1])
        return in_blocks(flat, *((32, 1) if is_backward else (1, 32))).view_as(weight)
    flat = weight.flatten()
    parts = []
    for start in range(0, len(flat), 256):
        block = flat[start : start + 256]
        scale = block.abs().max() / 127.0
        parts.append(torch.tensor([float(round(value)) for value in (block / scale).tolist()]) * scale)
    return torch.cat(parts).view_as(weight)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gather", ["fp8", "mxfp8", "int8_block"])
@on_ranks(3)
def test_compute_sees_what_the_published_formulas_give(gather: str, dtype: torch.dtype | None) -> None:
    main, *seen = used_weights(Job(gather, cuts_rows=True, dtype=dtype))
    for name, weight in main.items():
        for grid, found in enumerate(seen):
            wanted = weight if weight.ndim < 2 else as_published(weight, gather, is_backward=grid == 1)
            assert torch.equal(found[name], wanted if dtype is None else wanted.to(dtype)), (name, grid)


@pytest.mark.parametrize("gather", ["fp8", "mxfp8", "int8_block"])
@on_ranks(2)
def test_a_gather_takes_a_byte_and_scales_per_element_as_explain_says(gather: str) -> None:
    calls, said, rest, said_rest = traffic(Job(gather, dtype=torch.bfloat16))
    assert (calls, rest) == (said, said_rest)
    largest = max(int(call.split()[1]) for call in calls if call.startswith("all_gather"))
    parameters = list(Net().parameters())
    packed = [p for p in parameters if p.ndim > 1 and not (gather == "mxfp8" and p.shape[-1] % 32)]
    numel = sum(p.numel() for p in packed)
    # The others travel with them, in bf16, in shards that begin at multiples of 16 bytes.
    others = 2 * sum(p.numel() for p in parameters if not any(p is one for one in packed))
    assert numel <= largest - others <= 1.035 * numel + 2 * 16 * len(parameters)


@pytest.mark.parametrize(("gather", "wanted"), [("fp8", 1), ("mxfp8", 1), ("int8_block", 0)])
@on_ranks(3)
def test_magnitudes_of_all_units_travel_in_one_all_reduce_a_step(gather: str, wanted: int) -> None:
    calls, said, *_ = traffic(Job(gather, ("first", "second"), cuts_rows=True, dtype=torch.bfloat16))
    assert calls == said
    assert sum(call.startswith("all_reduce") for call in calls) == wanted


@on_ranks(2)
def test_magnitudes_are_asked_for_again_by_who_changed_since_and_in_every_evaluation() -> None:
    model = Job("fp8", ("first", "second")).build()
    used: list[torch.Tensor] = []

    def change(*_: Any) -> None:
        with torch.no_grad():
            model.second.weight.mul_(4.0)

    model.second.register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
    calls: list[str] = []
    counts = []
    with observe_collectives(lambda call: calls.append(call.kind)):
        for is_changed in (False, True):
            hook = model.first.register_forward_pre_hook(change) if is_changed else None
            for is_training in (True, False):
                before = calls.count("all_reduce")
                with torch.set_grad_enabled(is_training):
                    model(torch.randn(3, 64))
                counts.append(calls.count("all_reduce") - before)
            if hook is not None:
                hook.remove()
    assert counts == [1, 1, 1, 2]
    # A power of two: each as good as the first.
    for times, weight in zip((1, 1, 4, 16), used, strict=True):
        assert torch.equal(weight, used[0] * times)


@on_ranks(2)
def test_weights_that_rest_whole_are_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"gather_dtype='fp8'.*needs weights that rest sharded.*optim_grads_params"):
        fully_shard(Net(), placements=Placements.optim(), mp_policy=MixedPrecisionPolicy(gather_dtype="fp8"))
