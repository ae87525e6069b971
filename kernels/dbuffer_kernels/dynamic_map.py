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
NUM_CODES = 256
LARGEST_SCALES = (2.0**64, torch.finfo(torch.float32).max)
"""Of signed and of unsigned values: the largest square, and its root."""
_EXPONENTS = 7
_LOW_32 = 0xFFFFFFFF


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


def quantize_blocks(
    values: Tensor, *, signed: bool, first_position: int | None = None, keys: tuple[int, int] = (0, 0)
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of values whose blocks of 256 begin at their first element.

    A scale is the largest magnitude of its block; a code stands for the value nearest to value / scale, the lower one
    of two. A block of zeros has scale 0. With ``first_position`` a value between two of the map takes the upper one
    with probability (distance to the lower) / (distance of the two), in steps of 2 ** -16, by bits that its position
    and the keys alone decide.

    Unsigned values are what a step divides by the root of: where one rounded to zero, a moment beside it that did not
    would make a step of any size. So one above zero never has the code of zero. And larger scales than
    ``LARGEST_SCALES`` are these: where a square is above what FP32 holds, others of its block stay numbers.

    Args:
        values: fp32, 1-D, none below zero unless ``signed``. first_position: of the first value, for stochastic
            rounding; None rounds to nearest.
        keys: as ``rounding_keys`` returns them.
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
    tables = map_tables(values.device)
    least = 0 if signed else (values > 0).to(torch.uint8)
    if first_position is None:
        return torch.bucketize(ratios, tables[2 if signed else 3][:-1]).to(torch.uint8).clamp_(min=least), scales
    table = tables[0 if signed else 1]
    lower = torch.bucketize(ratios, table[1:], right=True)
    below, above = table[lower], table[(lower + 1).clamp_(max=NUM_CODES - 1)]
    index = torch.arange(first_position, first_position + numel, device=values.device)
    is_up = rounding_bits(index, *keys).float() * (above - below) < (ratios - below) * 65536.0
    return (lower + is_up).clamp_(max=NUM_CODES - 1).to(torch.uint8).clamp_(min=least), scales


def dequantize_blocks(codes: Tensor, scales: Tensor, *, signed: bool, first_element: int = 0) -> Tensor:
    """Return the fp32 values of codes.

    Args:
        codes: uint8, 1-D. scales: fp32, of the blocks of which some element is in ``codes``, or of more behind them.
        first_element: where in the first of these blocks the codes begin.
    """
    table = map_tables(codes.device)[0 if signed else 1]
    block = torch.arange(first_element, first_element + codes.numel(), device=codes.device) // QUANT_BLOCK
    return table[codes.long()] * scales[block]


def rounding_keys(seed: int) -> tuple[int, int]:
    """Return the two 32-bit keys of a seed: the halves of its splitmix64 value, so that near seeds share nothing.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the finalizer of
    Vigna's splitmix64.
    """
    mixed = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return mixed & _LOW_32, mixed >> 32


def rounding_bits(index: Tensor, low_key: int, high_key: int) -> Tensor:
    """Return 16 random bits for each index (int64), which both keys and all 64 bits of the index decide.

    A multiply-xorshift hash of 32 bits with the constants of Wellons' "hash prospector"; the second key goes in
    between the multiplications, so that two seeds do not give the same bits at swapped indices.
    """
    mixed = (index & _LOW_32) ^ low_key ^ ((((index >> 32) & _LOW_32) * 0x9E3779B9) & _LOW_32)
    mixed = ((mixed ^ (mixed >> 16)) * 0x21F0AAAD) & _LOW_32
    mixed = (mixed + high_key) & _LOW_32
    # The product may pass 2**63 and turn negative, but its lower half is right.
    mixed = ((mixed ^ (mixed >> 15)) * 0xD35A2D97) & _LOW_32
    return mixed >> 16
