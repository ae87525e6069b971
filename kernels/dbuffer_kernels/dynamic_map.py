"""Dynamic maps: 8-bit codes for values between -1 and 1 (or 0 and 1), dense around zero, and blocks that use them.

Source: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), with the
map of 7 exponent bits that bitsandbytes and torchao publish.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

QUANT_BLOCK = 256
"""Elements that share one scale."""
LARGEST_SCALES = (2.0**64, torch.finfo(torch.float32).max)
"""Of signed and of unsigned values: the largest square, and its root."""
_EXPONENTS = 7


@functools.cache
def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 values that codes 0 to 255 stand for, ascending.

    Decade i of 0 to 6, of size 10 ** (i - 6), holds the middles of 2 ** i equal parts of [0.1, 1], once for each sign;
    an unsigned map has twice as many parts. Zero and one complete it, so the least value of a signed map is -0.993.
    """
    values = [0.0, 1.0]
    for decade in range(_EXPONENTS):
        edges = _parts_of_decade(2**decade if signed else 2 ** (decade + 1))
        middles = (10.0 ** (decade + 1 - _EXPONENTS) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        values += [*middles, *(-middle for middle in middles)] if signed else middles
    return tuple(sorted(values))


def _parts_of_decade(count: int) -> Tensor:
    """Return the ends of equal parts of [0.1, 1] in fp32: steps of fp32 from the nearer end, each rounded once.

    That is ``torch.linspace(0.1, 1, count + 1)`` on a CPU with fused multiply-add, from which the published maps come.
    """
    first, last = torch.tensor(0.1), torch.tensor(1.0)
    step = ((last - first) / count).double()
    index = torch.arange(count + 1, dtype=torch.float64)
    ends = torch.where(index < (count + 1) // 2, first.double() + step * index, last.double() - step * (count - index))
    return ends.float()


@functools.cache
def map_tables(device: torch.device) -> Tensor:
    """Return fp32 (4, 256): signed values, unsigned values, and the 255 middles between neighbours of each."""
    maps = [torch.tensor(dynamic_map(signed=signed)) for signed in (True, False)]
    middles = [torch.cat([(row[:-1].double() + row[1:].double()).div(2).float(), row[-1:]]) for row in maps]
    return torch.stack([*maps, *middles]).to(device)


def num_blocks(numel: int) -> int:
    """Return how many blocks cover ``numel`` elements; the last may be short."""
    return -(-numel // QUANT_BLOCK)


def quantize_blocks(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of values whose blocks of 256 begin at their first element.

    A scale is the largest magnitude of its block; a code stands for the value nearest to value / scale, the lower one
    of two. A block of zeros has scale 0.

    Unsigned values are what a step divides by the root of: where one rounded to zero, a moment beside it that did not
    would make a step of any size. So one above zero never has the code of zero. And larger scales than
    ``LARGEST_SCALES`` are these: where a square is above what FP32 holds, others of its block stay numbers.

    Args:
        values: fp32, 1-D, none below zero unless ``signed``.
    Returns:
        uint8 of the same length; fp32, one for each block.
    """
    numel = values.numel()
    padded = torch.nn.functional.pad(values, (0, -numel % QUANT_BLOCK)).view(-1, QUANT_BLOCK)
    scales = padded.abs().amax(1) if padded.numel() else padded.new_empty(0)
    scales.clamp_(max=LARGEST_SCALES[0 if signed else 1])
    ratios = (padded / scales.masked_fill(scales == 0, 1.0)[:, None]).view(-1)[:numel]
    # Infinity over infinity, in a block that is spoiled either way.
    ratios = torch.where(ratios.isnan(), 0.0, ratios)
    least = 0 if signed else (values > 0).to(torch.uint8)
    middles = map_tables(values.device)[2 if signed else 3][:-1]
    return torch.bucketize(ratios, middles).to(torch.uint8).clamp_(min=least), scales


def dequantize_blocks(codes: Tensor, scales: Tensor, *, signed: bool, first_element: int = 0) -> Tensor:
    """Return the fp32 values of codes.

    Args:
        codes: uint8, 1-D. scales: fp32, of the blocks of which some element is in ``codes``, or of more behind them.
        first_element: where in the first of these blocks the codes begin.
    """
    table = map_tables(codes.device)[0 if signed else 1]
    block = torch.arange(first_element, first_element + codes.numel(), device=codes.device) // QUANT_BLOCK
    return table[codes.long()] * scales[block]
