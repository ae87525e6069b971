"""``cast_stochastic``: write fp32 into bf16 with random rounding that any sharding repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels import reference
from dbuffer_kernels.backends import runs_on_triton, without_grad
from dbuffer_kernels.elementwise import check_pair
from dbuffer_kernels.launch import BLOCK, device_function, launch

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


@without_grad
def cast_stochastic(source: Tensor, out: Tensor, *, seed: int, first_element: int = 0) -> Tensor:
    """Write ``source`` into ``out``, each value rounded to one of its two bf16 neighbours, and return ``out``.

    The neighbour further from zero is taken with probability (distance to the nearer to zero) / (distance of the two),
    in steps of 2**-16, so the expected result is the source value. Values that bf16 holds, infinities included, stay;
    above the largest bf16 the neighbour is infinity; NaN becomes a quiet NaN with its sign. The random bits of an
    element depend on ``seed`` and on its index in the whole buffer alone: however a buffer is cut into shards, on
    whatever device, the result is the same to the bit.

    Moves 6 bytes per element, each once: 1 Gi elements take at best 1.3 ms at the 4.8 TB/s of an H200 (elements * 6
    bytes / bandwidth). About 20 integer operations per element, close to what an H200 does in that time, so count on
    a little less than full bandwidth. On CUDA nothing is allocated; the CPU runs ``reference.cast_stochastic``, which
    states its own.

    Args:
        source: fp32, contiguous.
        out: bf16, contiguous, same numel, on ``source``'s device. Written behind autograd's back on CUDA.
        seed: any Python integer; its low 64 bits count. A training loop passes another one for each step.
        first_element: index in the whole buffer of the first element of ``source``: shard length times shard number.
    Raises:
        ValueError: other dtypes, numel or device, memory that is not contiguous, or a negative ``first_element``.
    """
    check_pair("cast_stochastic", source, out, 1.0)
    if source.dtype is not torch.float32 or out.dtype is not torch.bfloat16:
        raise ValueError(
            f"cast_stochastic: found {source.dtype} to {out.dtype}; wanted float32 to bfloat16. For other pairs use "
            "cast_copy, which rounds to nearest."
        )
    if not source.is_contiguous():
        raise ValueError(
            f"cast_stochastic: source has strides {source.stride()}; wanted contiguous memory, because an element's "
            "random bits come from its position. Pass a piece of the flat buffer."
        )
    if first_element < 0:
        raise ValueError(f"cast_stochastic: first_element={first_element}; wanted the shard's offset, at least 0.")
    if not runs_on_triton(out):
        return reference.cast_stochastic(source, out, seed=seed, first_element=first_element)
    numel = out.numel()
    keys = reference.rounding_keys(seed)
    launch(stochastic_kernel, -(-numel // BLOCK), out.device, source, out, numel, first_element, *keys)
    return out


def stochastic_kernel(
    source: tl.tensor,
    out: tl.tensor,
    numel: tl.int64,
    first_element: tl.int64,
    low_key: tl.int64,
    high_key: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """Round one block of contiguous memory; branches follow cast_kernel, where their reasons stand."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    # All pointers move to the block: what is left of 64 bits are one sum and one comparison for each element.
    source += start
    out += start
    begin = first_element + start
    if start + BLOCK <= numel:
        tl.store(out + index, round_randomly(tl.load(source + index), begin, index, low_key, high_key))
    else:
        mask = index < (numel - start).to(tl.int32)
        value = tl.load(source + index, mask=mask)
        tl.store(out + index, round_randomly(value, begin, index, low_key, high_key), mask=mask)


@device_function
def round_randomly(
    value: tl.tensor, begin: tl.tensor, index: tl.tensor, low_key: tl.int64, high_key: tl.int64
) -> tl.tensor:
    """Round fp32 values to bf16 by the bits that ``reference.rounding_bits`` defines for ``begin + index``."""
    random = random_bits(begin, index, tl.full((), low_key, tl.uint32), tl.full((), high_key, tl.uint32))
    bits = value.to(tl.uint32, bitcast=True)
    # A carry out of the lower half is the rounding away from zero; a NaN's could run into the sign.
    rounded = (bits + random) >> 16
    rounded = tl.where(value == value, rounded, (bits >> 16) | 0x40)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@device_function
def random_bits(begin: tl.tensor, index: tl.tensor, low_key: tl.tensor, high_key: tl.tensor) -> tl.tensor:
    """Return the 16 bits that ``reference.rounding_bits`` defines for ``begin + index``, as uint32.

    ``begin`` is one of 64 bits, ``index`` many of 32, none below zero. Of a key the low 32 bits count.
    """
    first = begin.to(tl.uint32)
    low = first + index.to(tl.uint32)
    high = (begin >> 32).to(tl.uint32)
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    mixed = low ^ low_key.to(tl.uint32) ^ tl.where(low < first, (high + 1).to(tl.uint32) * golden, high * golden)
    mixed = (mixed ^ (mixed >> 16)) * tl.full((), 0x21F0AAAD, tl.uint32)
    mixed += high_key.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 15)) * tl.full((), 0xD35A2D97, tl.uint32)
    return mixed >> 16
