"""The references process memory in chunks, give torch's bits, and allocate little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dbuffer_kernels import (
    AdamWBuffers,
    Segment,
    Segments,
    accumulate,
    adamw,
    adamw_row,
    adamw_rows,
    cast_copy,
    join_weight,
    split_weight,
)
from dbuffer_kernels.elementwise import CHUNK_NUMEL
from tests.unit.kernels.oracle import DTYPES, allowed_cast, allowed_sum, exact, round_to
from tests.unit.kernels.step_oracle import Hyperparameters

NAN = float("nan")


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra", [-1, 0, 1, 70_000])
def test_tensors_around_and_above_one_chunk_come_out_whole(
    source_dtype: torch.dtype, out_dtype: torch.dtype, extra: int
) -> None:
    numel = CHUNK_NUMEL + extra
    generator = torch.Generator().manual_seed(numel)
    source = torch.randn(numel, generator=generator, dtype=torch.float64).to(source_dtype)
    before = torch.randn(numel, generator=generator, dtype=torch.float64).to(out_dtype)
    allowed_cast(source, out_dtype, 1 / 3).assert_contains(cast_copy(source, torch.full_like(before, NAN), scale=1 / 3))
    allowed_sum(source, before, 1 / 3).assert_contains(accumulate(source, before.clone(), scale=1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32, torch.uint8, torch.complex128])
def test_a_plain_copy_moves_bits_even_those_of_nans_and_integers(dtype: torch.dtype) -> None:
    source = torch.randint(0, 256, (64 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    out = torch.zeros(64, dtype=dtype)
    cast_copy(source, out)
    assert torch.equal(out.view(torch.uint8), source.view(torch.uint8))


def largest_temporary(op: Callable[[], torch.Tensor]) -> int:
    """Return the bytes of the largest block that the op asks torch's CPU allocator for."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        op()
    events = profile.kineto_results.events()
    return max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
def test_no_op_allocates_more_than_one_chunk_at_a_time(source_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    numel = 8 * CHUNK_NUMEL
    source, out = torch.ones(numel, dtype=source_dtype), torch.ones(numel, dtype=out_dtype)
    is_full = source_dtype is out_dtype and out_dtype in (torch.float32, torch.float64)
    # The scale takes eight bytes.
    limit = 8 if is_full else 8 * CHUNK_NUMEL
    assert largest_temporary(lambda: torch.ones(numel, dtype=source_dtype)) >= numel * source_dtype.itemsize
    assert largest_temporary(lambda: cast_copy(source, out)) == 0
    assert largest_temporary(lambda: accumulate(source, out, scale=0.3, overwrite=True)) <= limit
    assert largest_temporary(lambda: accumulate(source, out, scale=0.3)) <= limit
    assert largest_temporary(lambda: accumulate(source, out)) <= (0 if source_dtype is out_dtype else limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_oracle_rounds_as_torch_converts(dtype: torch.dtype) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1)).double() * torch.logspace(-44, 38, 5000)
    values = values.float() if dtype is not torch.float32 else values
    assert np.array_equal(round_to(exact(values), dtype), exact(values.to(dtype)))


def test_the_oracle_refuses_a_neighbouring_value() -> None:
    source = torch.tensor([1.0, 2.0])
    allowed = allowed_cast(source, torch.float32, 1 / 3)
    result = source * torch.tensor(1 / 3)
    allowed.assert_contains(result)
    with pytest.raises(AssertionError, match="the first is 1"):
        allowed.assert_contains(torch.stack([result[0], torch.nextafter(result[1], torch.tensor(9.0))]))


# ---------------------------------------------------------------------- AdamW


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


HOW = {
    "no decay": Hyperparameters(weight_decay=0.0),
    "maximize": Hyperparameters(maximize=True),
    "short memory": Hyperparameters(betas=(0.3, 0.6), eps=1e-3),
    "no memory": Hyperparameters(betas=(0.0, 0.0)),
}


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_equal_those_of_torch_to_the_bit(name: str, dtype: torch.dtype) -> None:
    how, numel = HOW[name], CHUNK_NUMEL + 3
    options: dict[str, Any] = {"lr": how.lr, "betas": how.betas, "eps": how.eps, "weight_decay": how.weight_decay}
    theirs = torch.nn.Parameter(random(numel, 1, dtype))
    optimizer = torch.optim.AdamW([theirs], maximize=how.maximize, foreach=False, **options)
    mine = AdamWBuffers(torch.empty(numel, dtype=dtype), theirs.detach().clone(), *(torch.zeros(2, numel, dtype=dtype)))
    for step in range(1, 6):
        mine.gradient.copy_(random(numel, 10 + step, dtype))
        theirs.grad = mine.gradient.clone()
        optimizer.step()
        row = adamw_row(step, maximize=how.maximize, **options)
        adamw(mine, Segments([Segment(0, numel)], numel), torch.tensor([row], dtype=torch.float64))
    state = optimizer.state[theirs]
    assert torch.equal(mine.weight, theirs)
    assert torch.equal(mine.exp_avg, state["exp_avg"])
    assert torch.equal(mine.exp_avg_sq, state["exp_avg_sq"])


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_rows_from_a_tensor_of_steps_equal_those_of_numbers(lr: float | torch.Tensor) -> None:
    steps = torch.tensor([1.0, 7.0, 1000.0])
    options: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": True}
    rows = adamw_rows(steps, lr=lr, **options)
    wanted = [adamw_row(step, lr=float(lr), **options) for step in (1, 7, 1000)]
    torch.testing.assert_close(rows, torch.tensor(wanted, dtype=torch.float64), rtol=1e-7, atol=0)
    assert adamw_rows(torch.tensor(7), lr=lr, **options).shape == (1, 8)


# ---------------------------------------------------------------------- memory

BIG = 8 * CHUNK_NUMEL


def step_of_dtypes(weight: torch.dtype, moments: torch.dtype) -> Callable[[], torch.Tensor]:
    buffers = AdamWBuffers(
        torch.ones(BIG, dtype=torch.bfloat16),
        torch.ones(BIG, dtype=weight),
        torch.ones(BIG, dtype=moments),
        torch.ones(BIG, dtype=moments),
        torch.ones(BIG, dtype=torch.bfloat16),
    )
    row = adamw_row(1, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    segments, rows = Segments([Segment(0, BIG)], BIG), torch.tensor([row], dtype=torch.float64)

    def run() -> torch.Tensor:
        adamw(buffers, segments, rows)
        return buffers.weight

    return run


def test_no_op_of_a_step_allocates_more_than_one_chunk_at_a_time() -> None:
    main = torch.ones(BIG)
    model, rest = torch.ones(BIG, dtype=torch.bfloat16), torch.ones(BIG, dtype=torch.int16)

    def split() -> torch.Tensor:
        split_weight(main, model, rest)
        return model

    limit = 8 * CHUNK_NUMEL
    assert 0 < largest_temporary(split) <= limit
    assert largest_temporary(lambda: join_weight(model, rest, main)) <= limit
    for weight, moments in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        assert largest_temporary(step_of_dtypes(weight, moments)) <= limit
