"""What every Triton kernel must do, run by test_triton.py in a process of its own.

On the CPU under TRITON_INTERPRET=1, which has to be set before Triton is imported; else on CUDA. The oracle is float64,
never the reference: its ops are made to fail here, so that a case cannot pass without its kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from dbuffer_kernels import accumulate, cast_copy, elementwise, pack, reference
from tests.functional.kernels.on_triton import DEVICE, INTERPRETS, SIZES, count_launches, guarded, only_kernels, random
from tests.harness.grids import covering
from tests.unit.kernels.oracle import DTYPES, allowed_cast, allowed_sum, exact

SCALES = (1.0, 1 / 3, -2.0)
NAN = float("nan")

# test_triton.py asks for every pair of values in `make test`, and for all combinations at night and on a GPU.
CHOOSE = list if os.environ.get("GRID", "whole") == "whole" else covering
by_source = pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
by_types = pytest.mark.parametrize(("source_dtype", "out_dtype"), list(product(DTYPES, DTYPES)), ids=str)
by_types_and_scale = pytest.mark.parametrize(
    ("source_dtype", "out_dtype", "scale"), CHOOSE(product(DTYPES, DTYPES, SCALES)), ids=str
)


@pytest.fixture(autouse=True)
def _only_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    is_allowed = "reference_allowed" in request.keywords
    ops = () if is_allowed else ("reference_cast", "reference_accumulate")
    with (
        only_kernels(monkeypatch, elementwise, ops),
        only_kernels(monkeypatch, reference, () if is_allowed else ("pack",)),
    ):
        yield


@by_types_and_scale
def test_cast_copy_is_rounded_once_and_stays_inside_out(
    source_dtype: torch.dtype, out_dtype: torch.dtype, scale: float
) -> None:
    scale = 0.7 if source_dtype is out_dtype and scale == 1.0 else scale
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


# A gap of 8 elements keeps what follows aligned, one of 5 does not.
@pytest.mark.parametrize(
    ("source_dtype", "out_dtype", "scale", "adds", "gap"),
    CHOOSE(product(DTYPES, DTYPES, SCALES, (False, True), (8, 5))),
    ids=str,
)
def test_pack_fills_its_ranges_and_leaves_the_gaps(
    source_dtype: torch.dtype, out_dtype: torch.dtype, scale: float, adds: bool, gap: int
) -> None:
    sizes = (4096, 0, 1, 3, 7, 1023, 4097)
    offsets, end = [], gap
    for numel in sizes:
        offsets.append(end)
        end += numel + gap
    sources = [random(numel, source_dtype, seed=k) for k, numel in enumerate(sizes)]
    before = random(end, out_dtype, seed=99) if adds else torch.full((end,), NAN, dtype=out_dtype, device=DEVICE)
    out = before.clone()
    assert pack(sources, out, offsets, scale=scale, accumulate=adds) is out
    is_gap = torch.ones(end, dtype=torch.bool)
    for source, offset in zip(sources, offsets, strict=True):
        mine = slice(offset, offset + source.numel())
        is_gap[mine] = False
        if adds:
            allowed = allowed_sum(source, before[mine], scale, truncates_bf16=INTERPRETS)
        else:
            allowed = allowed_cast(source, out_dtype, scale, truncates_bf16=INTERPRETS)
        allowed.assert_contains(out[mine])
    assert torch.equal(out[is_gap].cpu().nan_to_num(7.0), before[is_gap].cpu().nan_to_num(7.0))


def test_pack_starts_one_kernel_for_each_dtype_among_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch)
    out = torch.zeros(20_000, device=DEVICE)
    pack([random(5000, torch.float32, 1), random(1, torch.float32, 2), random(0, torch.float32, 3)], out, [0, 5000, 9])
    assert started == [3]
    started.clear()
    mixed = [random(5, torch.bfloat16, 1), random(7, torch.float16, 2), random(9, torch.bfloat16, 3)]
    pack(mixed, out, [10_000, 11_000, 12_000])
    assert started == [2, 1]
    for source, offset in zip(mixed, (10_000, 11_000, 12_000), strict=True):
        assert torch.equal(out[offset : offset + source.numel()], source.float())
    started.clear()
    pack([], out, [])
    pack([random(0, torch.float32, 1)], out, [20_000])
    assert started == []


def test_pack_reads_every_block_of_a_source_whose_range_comes_last_in_the_list_first_in_out() -> None:
    sources = [random(4097, torch.float32, 1), random(8193, torch.float32, 2)]
    out = torch.zeros(4097 + 8193, device=DEVICE)
    pack(sources, out, [8193, 0])
    assert torch.equal(out, torch.cat([sources[1], sources[0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_a_plain_pack_moves_bits_even_those_of_nans_and_integers(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (4097 * dtype.itemsize,), dtype=torch.uint8)
    source = bits.to(DEVICE).view(dtype)
    out = torch.zeros(5000, dtype=dtype, device=DEVICE)
    pack([source], out, [8])
    assert torch.equal(out[8 : 8 + 4097].view(torch.uint8), source.view(torch.uint8))
    assert not out[:8].view(torch.uint8).any()
    assert not out[8 + 4097 :].view(torch.uint8).any()


@by_source
def test_sources_that_start_off_a_16_byte_boundary_are_read_right(source_dtype: torch.dtype) -> None:
    source = random(4200, source_dtype, seed=4)[1:4098]
    out = torch.zeros(4097, dtype=torch.float64, device=DEVICE)
    cast_copy(source, out, scale=2.0)
    assert torch.equal(out, source.double() * 2)
    accumulate(source, out, scale=-1.0)
    assert torch.equal(out, source.double())
    packed = torch.zeros(4100, dtype=torch.float64, device=DEVICE)
    pack([source], packed, [2], scale=2.0)
    assert torch.equal(packed[2:4099], source.double() * 2)


def test_a_scale_in_fp64_arithmetic_keeps_all_its_bits() -> None:
    source = torch.tensor([3.0], dtype=torch.float64, device=DEVICE)
    out = torch.zeros_like(source)
    assert exact(cast_copy(source, out, scale=1 / 3))[0] == 3 * (1 / 3)
    assert exact(accumulate(source, out, scale=-1 / 3))[0] == 0.0
    assert exact(pack([source], out, [0], scale=1 / 3))[0] == 3 * (1 / 3)


# numpy, which does the interpreter's arithmetic, warns of what is asked for here.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_overflow_becomes_infinity_and_nan_stays_nan() -> None:
    source = torch.tensor([1e30, -1e30, NAN, float("inf")], device=DEVICE)
    out = torch.zeros(4, dtype=torch.float16, device=DEVICE)
    cast_copy(source, out)
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
    dense = random(11, source_dtype, seed=9)
    sources, offsets = [transposed, stepped, expanded, dense], [4, 280, 300, 310]
    for source in sources:
        out = torch.full((source.numel(),), NAN, device=DEVICE)
        cast_copy(source, out, scale=scale)
        allowed_cast(source, torch.float32, scale).assert_contains(out)
        before = random(source.numel(), torch.float32, seed=10)
        allowed_sum(source, before, scale).assert_contains(accumulate(source, before.clone(), scale=scale))
    out = torch.full((330,), 5.0, device=DEVICE)
    pack(sources, out, offsets, scale=scale)
    for source, offset in zip(sources, offsets, strict=True):
        allowed_cast(source, torch.float32, scale).assert_contains(out[offset : offset + source.numel()])
    assert int((out == 5.0).sum()) == 330 - sum(source.numel() for source in sources)


@pytest.mark.reference_allowed
def test_a_plain_copy_keeps_the_payload_of_nans() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC12345, -4], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, device=DEVICE)
    cast_copy(bits.view(torch.float32), out)
    assert torch.equal(out.view(torch.int32), bits)
