"""Dynamic maps: 8-bit codes for values in [-1, 1] or [0, 1], dense around zero; and block-wise quantization with them.

Source: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), with the map
of 7 exponent bits that bitsandbytes and torchao publish.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

QUANT_BLOCK = 256
"""Elements that share one scale."""
LARGEST_SCALES = (2.0**64, torch.finfo(torch.float32).max)
"""Largest scales of (signed, unsigned) values: the square root of fp32's largest number, and that number itself."""
_EXPONENTS = 7


@functools.cache
def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 values of codes 0 to 255, ascending.

    Decade i, of 0 to 6, has size 10 ** (i - 6). Its values are the midpoints of 2 ** i equal parts of [0.1, 1], once
    per sign; an unsigned map has twice as many parts. Zero and one are added, so the least value of a signed map is
    -0.993.
    """
    values = [0.0, 1.0]
    for decade in range(_EXPONENTS):
        edges = _parts_of_decade(2**decade if signed else 2 ** (decade + 1))
        middles = (10.0 ** (decade + 1 - _EXPONENTS) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values += [*middles, *(-middle for middle in middles)] if signed else middles
    return tuple(sorted(values))


def _parts_of_decade(count: int) -> Tensor:
    """Return the boundaries of ``count`` equal parts of [0.1, 1] in fp32, each rounded once.

    The steps start at the nearer end. This equals ``torch.linspace(0.1, 1, count + 1)`` on a CPU with fused
    multiply-add, which produced the published maps.
    """
    first, last = torch.tensor(0.1), torch.tensor(1.0)
    step = ((last - first) / count).double()
    index = torch.arange(count + 1, dtype=torch.float64)
    ends = torch.where(index < (count + 1) // 2, first.double() + step * index, last.double() - step * (count - index))
    return ends.float()


@functools.cache
def map_tables(device: torch.device) -> Tensor:
    """Return fp32 (4, 256): the signed map, the unsigned map, and the 255 midpoints between neighbours of each map."""
    maps = [torch.tensor(dynamic_map(signed=signed)) for signed in (True, False)]
    middles = [torch.cat([(row[:-1].double() + row[1:].double()).div(2).float(), row[-1:]]) for row in maps]
    return torch.stack([*maps, *middles]).to(device)


def num_blocks(numel: int) -> int:
    """Return the number of blocks that cover ``numel`` elements; the last block may be short."""
    return -(-numel // QUANT_BLOCK)


def quantize_blocks(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize values in blocks of 256 elements, counted from the first one; return codes and scales.

    A scale is the largest magnitude of its block. A code stands for the map's value nearest to value / scale; ties go
    to the lower value. A block of zeros has scale 0.

    AdamW divides by the square root of the unsigned values. If such a value were rounded to zero and the first moment
    were not, the step could become arbitrarily large, so a value above zero never gets the code of zero. Scales are
    limited to ``LARGEST_SCALES``: if the square of one gradient overflows fp32, the rest of its block stays finite.

    Args:
        values: fp32, 1-D, none below zero unless ``signed``.
    Returns:
        Codes, uint8 of the same length; and scales, fp32, one per block.
    """
    numel = values.numel()
    padded = torch.nn.functional.pad(values, (0, -numel % QUANT_BLOCK)).view(-1, QUANT_BLOCK)
    scales = padded.abs().amax(1) if padded.numel() else padded.new_empty(0)
    scales.clamp_(max=LARGEST_SCALES[0 if signed else 1])
    ratios = (padded / scales.masked_fill(scales == 0, 1.0)[:, None]).view(-1)[:numel]
    # A NaN in the block makes its scale NaN, so the block decodes to NaN whatever its codes are.
    ratios = torch.where(ratios.isnan(), 0.0, ratios)
    least = 0 if signed else (values > 0).to(torch.uint8)
    middles = map_tables(values.device)[2 if signed else 3][:-1]
    return torch.bucketize(ratios, middles).to(torch.uint8).clamp_(min=least), scales


def dequantize_blocks(codes: Tensor, scales: Tensor, *, signed: bool, first_element: int = 0) -> Tensor:
    """Return the fp32 values of codes.

    Args:
        codes: uint8, 1-D. scales: fp32, one per block that ``codes`` touches, in order; more may follow.
        first_element: position of the first code within the first of these blocks.
    """
    table = map_tables(codes.device)[0 if signed else 1]
    block = torch.arange(first_element, first_element + codes.numel(), device=codes.device) // QUANT_BLOCK
    return table[codes.long()] * scales[block]
