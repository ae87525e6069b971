"""The plain-torch ops of an optimizer step, through the public functions: against torch and against exact integers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dbuffer_kernels import (
    AdamWBuffers,
    Segment,
    Segments,
    adamw,
    adamw_row,
    adamw_rows,
    join_weight,
    split_weight,
)
from dbuffer_kernels.elementwise import CHUNK_NUMEL as CHUNK
from tests.unit.kernels.oracle import exact
from tests.unit.kernels.step_oracle import (
    Hyperparameters,
    awkward_values,
    bits_of,
    step_of,
)
from tests.unit.kernels.test_reference import largest_temporary


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------------- split and join


def test_a_weight_comes_back_from_its_two_halves_to_the_bit() -> None:
    main = awkward_values()
    model, rest = torch.empty_like(main, dtype=torch.bfloat16), torch.empty_like(main, dtype=torch.int16)
    split_weight(main, model, rest)
    out = join_weight(model, rest, torch.empty_like(main))
    is_nan = main.isnan()
    wanted = bits_of(main)
    assert np.array_equal(bits_of(out), np.where(is_nan.numpy(), wanted | 0x400000, wanted))
    assert torch.equal(model.isnan(), is_nan)
    halves = (bits_of(model) << 16) + rest.numpy()
    assert np.array_equal(halves[~is_nan.numpy()] % 2**32, wanted[~is_nan.numpy()])


def test_the_upper_half_is_what_a_cast_gives_except_on_ties() -> None:
    main = random(100_000, seed=2)
    main[:2] = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    model, rest = torch.empty_like(main, dtype=torch.bfloat16), torch.empty_like(main, dtype=torch.int16)
    split_weight(main, model, rest)
    is_tie = rest == -0x8000
    assert torch.equal(model[~is_tie], main[~is_tie].bfloat16())
    assert model[:2].tolist() == [1.0078125, 1.015625]
    assert main[:2].bfloat16().tolist() == [1.0, 1.015625]


# ---------------------------------------------------------------------- AdamW

HOW = {
    "plain": Hyperparameters(),
    "no decay": Hyperparameters(weight_decay=0.0),
    "maximize": Hyperparameters(maximize=True),
    "short memory": Hyperparameters(betas=(0.3, 0.6), eps=1e-3),
    "no memory": Hyperparameters(betas=(0.0, 0.0)),
}


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [1, 7, CHUNK + 3])
def test_steps_equal_those_of_torch_to_the_bit(name: str, dtype: torch.dtype, numel: int) -> None:
    how = HOW[name]
    options = {"lr": how.lr, "betas": how.betas, "eps": how.eps, "weight_decay": how.weight_decay}
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


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_result_is_that_of_float64_but_for_its_own_rounding(
    gradient: torch.dtype, weight: torch.dtype, moments: torch.dtype
) -> None:
    numel = CHUNK + 1001
    buffers = AdamWBuffers(
        random(numel, 1, gradient),
        random(numel, 2, weight),
        random(numel, 3, moments),
        random(numel, 4, moments).abs(),
        torch.zeros(numel, dtype=torch.bfloat16),
    )
    before = copy.deepcopy(buffers)
    how = Hyperparameters(step=2)
    row = adamw_row(how.step, lr=how.lr, betas=how.betas, eps=how.eps, weight_decay=how.weight_decay)
    rows, clip = torch.tensor([[0.0] * 8, row], dtype=torch.float64), torch.tensor(0.25)
    adamw(buffers, Segments([Segment(5, numel - 3, 1)], numel), rows, clip=clip)
    part = slice(5, numel - 3)
    moments_before = (exact(before.exp_avg[part]), exact(before.exp_avg_sq[part]))
    wanted = step_of(exact(before.gradient[part]), exact(before.weight[part]), moments_before, how, 0.25)
    for name in ("weight", "exp_avg", "exp_avg_sq", "model_weight"):
        found = buffers.named()[name]
        wanted.assert_near(name, found[part])
        assert torch.equal(found[:5], before.named()[name][:5])
        assert torch.equal(found[-3:], before.named()[name][-3:])


def test_a_bf16_weight_with_remainder_steps_as_the_fp32_weight_does_to_the_bit() -> None:
    numel = CHUNK + 77
    plain = AdamWBuffers(*(random(numel, seed).abs() for seed in range(4)))
    model, rest = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    split_weight(plain.weight, model, rest)
    split = AdamWBuffers(plain.gradient, model, plain.exp_avg.clone(), plain.exp_avg_sq.clone(), remainder=rest)
    for step in range(1, 4):
        row = adamw_row(step, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for buffers in (plain, split):
            rows = torch.tensor([row], dtype=torch.float64)
            adamw(buffers, Segments([Segment(0, numel)], numel), rows)
    assert torch.equal(join_weight(model, rest, torch.empty(numel)), plain.weight)
    assert torch.equal(split.exp_avg, plain.exp_avg)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_rows_from_a_tensor_of_steps_equal_those_of_numbers(lr: float | torch.Tensor) -> None:
    steps = torch.tensor([1.0, 7.0, 1000.0])
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": True}
    rows = adamw_rows(steps, lr=lr, **options)
    wanted = [adamw_row(step, lr=float(lr), **options) for step in (1, 7, 1000)]
    torch.testing.assert_close(rows, torch.tensor(wanted, dtype=torch.float64), rtol=1e-7, atol=0)
    assert adamw_rows(torch.tensor(7), lr=lr, **options).shape == (1, 8)


# ---------------------------------------------------------------------- memory

BIG = 8 * CHUNK


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

    limit = 8 * CHUNK
    assert 0 < largest_temporary(split) <= limit
    assert largest_temporary(lambda: join_weight(model, rest, main)) <= limit
    for weight, moments in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        assert largest_temporary(step_of_dtypes(weight, moments)) <= limit
