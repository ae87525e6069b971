"""Dynamic maps and block-wise quantization against their published definition, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dbuffer_kernels import CodedSegment, CodedSegments, dequantize_blocks, dynamic_map, quantize_blocks
from dbuffer_kernels.dynamic_map import rounding_keys
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


def test_stochastic_codes_depend_on_position_and_keys_alone_and_are_right_on_average() -> None:
    values = torch.rand(1024)
    keys = rounding_keys(3)
    codes, _ = quantize_blocks(values, signed=True, first_position=5, keys=keys)
    assert np.array_equal(codes.numpy(), encoded(values, signed=True, position=5, keys=keys).codes)
    later, _ = quantize_blocks(values[256:], signed=True, first_position=5 + 256, keys=keys)
    assert torch.equal(later, codes[256:])
    draws = torch.stack(
        [
            dequantize_blocks(
                *quantize_blocks(values, signed=True, first_position=0, keys=rounding_keys(seed)), signed=True
            )
            for seed in range(400)
        ]
    )
    # Steps of the map are at most 0.015 wide: the mean of 400 draws is off by 0.0004 on average.
    assert (draws.mean(0) - values).abs().mean() < 0.0005


@pytest.mark.parametrize("keys", [None, rounding_keys(3)])
def test_a_square_above_zero_is_never_stored_as_zero(keys: tuple[int, int] | None) -> None:
    values = torch.tensor([1e20, 1e-20, 0.0, 1e-38]).repeat(100)
    position = None if keys is None else 0
    codes, scales = quantize_blocks(values, signed=False, first_position=position, keys=keys or (0, 0))
    assert torch.equal(dequantize_blocks(codes, scales, signed=False) > 0, values > 0)
    assert np.array_equal(codes.numpy(), encoded(values, signed=False, keys=keys).codes)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("keys", [None, rounding_keys(3)])
def test_a_value_beyond_the_largest_scale_leaves_others_of_its_block_numbers(
    signed: bool, keys: tuple[int, int] | None
) -> None:
    values = torch.tensor([3e38, 0.0, 1e10, float("inf")])
    values = torch.cat([values, -values]) if signed else values
    position = None if keys is None else 0
    codes, scales = quantize_blocks(values, signed=signed, first_position=position, keys=keys or (0, 0))
    wanted = encoded(values, signed=signed, keys=keys)
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
