"""Property tests of the plain-torch ops, through the public functions, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbuffer_kernels import accumulate, cast_copy
from dbuffer_kernels.elementwise import CHUNK_NUMEL
from tests.unit.kernels.oracle import DTYPES, allowed_cast, allowed_sum, exact, round_to

NAN = float("nan")
examples = settings(max_examples=150, deadline=None, database=None)

# Sums of two such values times a scale stay below 65504, so fp16 does not overflow; tiny ones reach its subnormals.
values = st.one_of(st.floats(-1e4, 1e4), st.floats(-1e-4, 1e-4), st.sampled_from([0.0, -0.0, 1.0]))
scales = st.one_of(st.sampled_from([1.0, -1.0, 0.5, 1 / 3, 0.1, 2.0]), st.floats(-4, 4))
dtypes = st.sampled_from(DTYPES)


@st.composite
def tensors(draw: st.DrawFn, max_numel: int = 40) -> torch.Tensor:
    """Draw a tensor of any of the dtypes with 0 to 2 dimensions, strided or not."""
    data = draw(st.lists(values, max_size=max_numel))
    flat = torch.tensor(data, dtype=torch.float64).to(draw(dtypes))
    layout = draw(st.sampled_from(["flat", "scalar", "rows", "transposed", "stepped"]))
    if layout == "scalar" and len(data) > 0:
        return flat[0]
    if layout == "stepped":
        return flat[::2]
    even = flat[: len(data) // 2 * 2].view(-1, 2)
    return {"rows": even, "transposed": even.t()}.get(layout, flat)


def empty_like_flat(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((source.numel(),), NAN, dtype=dtype)


@examples
@given(source=tensors(), out_dtype=dtypes, scale=scales)
def test_cast_copy_is_the_product_rounded_once(source: torch.Tensor, out_dtype: torch.dtype, scale: float) -> None:
    out = empty_like_flat(source, out_dtype)
    assert cast_copy(source, out, scale=scale) is out
    allowed_cast(source, out_dtype, scale).assert_contains(out)


@examples
@given(source=tensors(), out_dtype=dtypes, scale=scales, seed=st.integers(0, 2**32 - 1))
def test_accumulate_is_the_sum_rounded_once(
    source: torch.Tensor, out_dtype: torch.dtype, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(source.numel(), generator=generator, dtype=torch.float64).to(out_dtype)
    out = before.clone()
    assert accumulate(source, out, scale=scale) is out
    allowed_sum(source, before, scale).assert_contains(out)


@examples
@given(source=tensors(), out_dtype=dtypes, scale=scales)
def test_overwriting_equals_cast_copy_whatever_out_held(
    source: torch.Tensor, out_dtype: torch.dtype, scale: float
) -> None:
    out = accumulate(source, empty_like_flat(source, out_dtype), scale=scale, overwrite=True)
    assert torch.equal(out, cast_copy(source, torch.zeros_like(out), scale=scale))


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


def test_overflow_becomes_infinity_and_nan_stays_nan() -> None:
    source = torch.tensor([1e30, -1e30, NAN])
    out = cast_copy(source, torch.zeros(3, dtype=torch.float16))
    assert out.tolist()[:2] == [float("inf"), -float("inf")]
    assert out[2].isnan()
    accumulate(torch.full_like(source, -float("inf")), out)
    assert out.isnan().tolist() == [True, False, True]


def test_a_bf16_sum_uses_the_scale_in_full_and_not_its_bf16_neighbour() -> None:
    # The bf16 value nearest to 1/3 is 0.333984375, 0.2% off: enough to move many of these sums to a neighbour.
    source, before = torch.arange(256.0).bfloat16(), torch.full((256,), 0.25).bfloat16()
    wrong = (before.float() + source.float() * 0.333984375).bfloat16()
    out = accumulate(source, before.clone(), scale=1 / 3)
    assert not torch.equal(out, wrong)
    assert torch.equal(out, (before.double() + source.double() / 3).float().bfloat16())


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
    # Eight bytes hold the scale.
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
