"""Eight-bit weights for the wire: per-tensor FP8, MXFP8 with power-of-two scales, int8 in blocks. In plain torch.

FP8 is E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). MXFP8 is that of the OCP Microscaling Formats
specification 1.0: 32 elements share a scale 2 ** (e - 127), e in one byte, e = exponent of the largest magnitude - 8.
Nothing depends on where a shard begins: scales are those of whole tensors or of blocks that the caller lays out.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MX_BLOCK = 32
# Of the largest power of two that E4M3 holds: 2 ** 8 = 256.
_MX_EMAX = 8
_INT8_MAX = 127.0


def fp8_scale(amax: Tensor) -> Tensor:
    """Return fp32 scales, 448 / amax, that bring the largest magnitude to the largest FP8 value; 1 where it is 0."""
    return torch.where(amax > 0, FP8_MAX / amax, torch.ones_like(amax))


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Return bytes: E4M3 of values * scale, rounded to nearest even and saturated; ``scale`` broadcasts."""
    return (values.float() * scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def from_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """Return fp32 values of bytes, divided by ``scale``."""
    return codes.view(FP8).float() / scale


def mx_exponents(amax: Tensor) -> Tensor:
    """Return E8M0 bytes of the scales for these largest magnitudes (fp32, not negative): 255 is NaN, 0 is 2 ** -127."""
    biased = (amax.contiguous().view(torch.int32) >> 23) & 0xFF
    found = (biased - _MX_EMAX).clamp(min=0)
    return torch.where(biased == 0xFF, 0xFF, found).to(torch.uint8)


def mx_scale(exponents: Tensor) -> Tensor:
    """Return the fp32 scales of E8M0 bytes."""
    # The exponent's bits are the byte itself; 2 ** -127 is subnormal, and 255 is a NaN with a bit of mantissa.
    bits = exponents.to(torch.int32) << 23
    return torch.where((exponents == 0) | (exponents == 0xFF), bits | 0x400000, bits).view(torch.float32)


def to_mx(values: Tensor, exponents: Tensor) -> Tensor:
    """Return bytes: E4M3 of values / scale, saturated; ``exponents`` broadcasts against ``values``."""
    return (values.float() / mx_scale(exponents)).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def from_mx(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return fp32 values of bytes; ``exponents`` broadcasts."""
    return codes.view(FP8).float() * mx_scale(exponents)


def int8_scales(amax: Tensor) -> Tensor:
    """Return fp32 scales of blocks with these largest magnitudes: amax / 127."""
    return amax / _INT8_MAX


def to_int8(values: Tensor, scales: Tensor) -> Tensor:
    """Return bytes: values / scale rounded to nearest even, -127 to 127; ``scales`` broadcasts, 0 gives 0."""
    ratios = values.float() / scales.masked_fill(scales == 0, 1.0)
    return ratios.nan_to_num(nan=0.0).clamp(-_INT8_MAX, _INT8_MAX).round().to(torch.int8).view(torch.uint8)


def from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Return fp32 values of bytes; ``scales`` broadcasts."""
    return codes.view(torch.int8).float() * scales
