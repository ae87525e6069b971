"""Casts and sums on each backend (``on_backend``); the oracle is float64, never the reference."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from dbuffer_kernels import accumulate, cast_copy
from tests.harness.grids import covering
from tests.unit.kernels.on_backend import DEVICE, INTERPRETS, KERNELS, SIZES, guarded, only_kernels, random
from tests.unit.kernels.oracle import DTYPES, allowed_cast, allowed_sum, exact

__all__ = ["only_kernels"]

SCALES = (1.0, 1 / 3, -2.0)
NAN = float("nan")

# test_triton.py runs every pair of values in `make test`, and all combinations in nightly tests and on a GPU.
CHOOSE = list if os.environ.get("GRID", "whole") == "whole" else covering
by_source = pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
by_types = pytest.mark.parametrize(("source_dtype", "out_dtype"), list(product(DTYPES, DTYPES)), ids=str)
by_types_and_scale = pytest.mark.parametrize(
    ("source_dtype", "out_dtype", "scale"), CHOOSE(product(DTYPES, DTYPES, SCALES)), ids=str
)


@by_types_and_scale
def test_cast_copy_is_rounded_once_and_stays_inside_out(
    source_dtype: torch.dtype, out_dtype: torch.dtype, scale: float
) -> None:
    if scale == 1.0 and (source_dtype is out_dtype or KERNELS != "reference"):
        # Copies without a scale are torch's.
        scale = 0.7
    for numel in SIZES:
        source = random(numel, source_dtype, seed=numel)
        buffer, out = guarded(numel, out_dtype, NAN)
        assert cast_copy(source, out, scale=scale) is out
        allowed_cast(source, out_dtype, scale, truncates_bf16=INTERPRETS).assert_contains(out)
        assert torch.cat([buffer[:3], buffer[3 + numel :]]).isnan().all()


@by_types_and_scale
def test_accumulate_adds_with_one_rounding_and_stays_inside_out(
    source_dtype: torch.dtype, out_dtype: torch.dtype, scale: float
) -> None:
    for numel in SIZES:
        source, before = random(numel, source_dtype, seed=numel), random(numel, out_dtype, seed=numel + 1)
        buffer, out = guarded(numel, out_dtype, 5.0)
        out.copy_(before)
        assert accumulate(source, out, scale=scale) is out
        allowed_sum(source, before, scale, truncates_bf16=INTERPRETS).assert_contains(out)
        assert (torch.cat([buffer[:3], buffer[3 + numel :]]) == 5.0).all()


@by_types
def test_overwriting_never_lets_a_nan_of_out_through(source_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for numel in SIZES:
        source, out = random(numel, source_dtype, seed=numel), guarded(numel, out_dtype, NAN)[1]
        accumulate(source, out, scale=1 / 3, overwrite=True)
        allowed_cast(source, out_dtype, 1 / 3, truncates_bf16=INTERPRETS).assert_contains(out)


@by_source
def test_sources_that_start_off_a_16_byte_boundary_are_read_right(source_dtype: torch.dtype) -> None:
    source = random(4200, source_dtype, seed=4)[1:4098]
    out = torch.zeros(4097, dtype=torch.float64, device=DEVICE)
    cast_copy(source, out, scale=2.0)
    assert torch.equal(out, source.double() * 2)
    accumulate(source, out, scale=-1.0)
    assert torch.equal(out, source.double())


def test_a_scale_in_fp64_arithmetic_keeps_all_its_bits() -> None:
    source = torch.tensor([3.0], dtype=torch.float64, device=DEVICE)
    out = torch.zeros_like(source)
    assert exact(cast_copy(source, out, scale=1 / 3))[0] == 3 * (1 / 3)
    # A fused multiply-add does not round the product, and so leaves the product's rounding error.
    assert abs(exact(accumulate(source, out, scale=-1 / 3))[0]) <= 2.0**-54


# numpy, which does the interpreter's arithmetic, warns about the overflow under test.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_overflow_becomes_infinity_and_nan_stays_nan() -> None:
    source = torch.tensor([1e30, -1e30, NAN, float("inf")], device=DEVICE)
    out = torch.zeros(4, dtype=torch.float16, device=DEVICE)
    cast_copy(source, out, scale=2.0)
    assert out.tolist()[:2] == [float("inf"), -float("inf")]
    assert out[2].isnan()
    assert out[3] == float("inf")
    accumulate(torch.full_like(source, -float("inf")), out)
    assert out.isnan().tolist() == [True, False, True, True]


@pytest.mark.reference_allowed
@by_source
@pytest.mark.parametrize("scale", SCALES)
def test_strided_sources_land_in_the_order_of_their_flattening(source_dtype: torch.dtype, scale: float) -> None:
    transposed = random(21 * 13, source_dtype, seed=6).view(13, 21).t()
    stepped = random(30, source_dtype, seed=7)[::3]
    expanded = random(1, source_dtype, seed=8).expand(5)
    for source in (transposed, stepped, expanded, random(11, source_dtype, seed=9)):
        out = torch.full((source.numel(),), NAN, device=DEVICE)
        cast_copy(source, out, scale=scale)
        allowed_cast(source, torch.float32, scale).assert_contains(out)
        before = random(source.numel(), torch.float32, seed=10)
        allowed_sum(source, before, scale).assert_contains(accumulate(source, before.clone(), scale=scale))


@pytest.mark.reference_allowed
def test_a_plain_copy_keeps_the_payload_of_nans() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC12345, -4], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, device=DEVICE)
    cast_copy(bits.view(torch.float32), out)
    assert torch.equal(out.view(torch.int32), bits)
