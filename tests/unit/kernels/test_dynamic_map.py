"""Dynamic maps and block-wise quantization against their published definition, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dbuffer_kernels import CodedSegment, CodedSegments, dequantize_blocks, dynamic_map, quantize_blocks
from tests.unit.kernels.int8_oracle import decoded, encoded, published_map


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_the_published_one(signed: bool) -> None:
    found, wanted = dynamic_map(signed=signed), published_map(signed=signed)
    assert len(set(found)) == 256
    # linspace may differ in a last bit from one CPU to another.
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=2**-23, atol=0.0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 256, 4099])
def test_codes_and_scales_are_the_nearest_ones(signed: bool, numel: int) -> None:
    values = torch.randn(numel) * 10 ** (torch.rand(numel) * 8 - 8)
    values = values if signed else values.abs()
    codes, scales = quantize_blocks(values, signed=signed)
    wanted = encoded(values, signed=signed)
    assert np.array_equal(codes.numpy(), wanted.codes)
    assert np.array_equal(scales.numpy(), wanted.scales)
    assert torch.equal(dequantize_blocks(codes, scales, signed=signed), decoded(codes, scales, signed=signed))


def test_a_square_above_zero_is_never_stored_as_zero() -> None:
    values = torch.tensor([1e20, 1e-20, 0.0, 1e-38]).repeat(100)
    codes, scales = quantize_blocks(values, signed=False)
    assert torch.equal(dequantize_blocks(codes, scales, signed=False) > 0, values > 0)
    assert np.array_equal(codes.numpy(), encoded(values, signed=False).codes)


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_beyond_the_largest_scale_leaves_others_of_its_block_numbers(signed: bool) -> None:
    values = torch.tensor([3e38, 0.0, 1e10, float("inf")])
    values = torch.cat([values, -values]) if signed else values
    codes, scales = quantize_blocks(values, signed=signed)
    wanted = encoded(values, signed=signed)
    assert np.array_equal(codes.numpy(), wanted.codes)
    assert np.array_equal(scales.numpy(), wanted.scales)
    found = dequantize_blocks(codes, scales, signed=signed)
    assert found.isfinite().all()
    assert found[1] == 0
    assert found[3] >= found[0] > 1e19


@pytest.mark.parametrize(
    "segments", [[CodedSegment(100, 300)], [CodedSegment(0, 300), CodedSegment(300, 512)], [CodedSegment(0, 600)]]
)
def test_segments_that_cut_a_block_or_leave_the_buffer_are_refused(segments: list[CodedSegment]) -> None:
    with pytest.raises(ValueError, match="CodedSegments"):
        CodedSegments(segments, 512)
