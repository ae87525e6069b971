"""``checksum``: 64 bits over the values of a tensor, a sum of integers that any sharding repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels import reference
from dbuffer_kernels.backends import runs_on_triton, without_grad
from dbuffer_kernels.launch import BLOCK, device_function, launch
from dbuffer_kernels.reference import CHECKSUM_BLOCK

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl

MAX_PROGRAMS = 2048
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

assert BLOCK == CHECKSUM_BLOCK


@without_grad
def checksum(source: Tensor, *, key: int, first_element: int = 0) -> Tensor:
    """Return the sum modulo 2**64 of each value's bits times an odd number: 0-d int64; nothing waits for the device.

    The odd number depends on ``key`` and on the element's index in the whole tensor alone, so checksums of shards add
    up (modulo 2**64) to that of the whole tensor, and one changed element always changes the sum.

    Moves ``source.itemsize`` bytes per element, once, with one 64-bit multiplication and addition. On CUDA allocates 8
    bytes for each of at most 2048 programs; the CPU runs ``reference.checksum``, which states its own.

    Args:
        source: any shape, contiguous, of elements of 1, 2, 4 or 8 bytes. May have no elements.
        key: any integer; its low 64 bits count. Another one for each tensor.
        first_element: index in the whole tensor of the first element of ``source``.
    Raises:
        ValueError: memory that is not contiguous, other elements, or a negative ``first_element``.
    """
    if not source.is_contiguous() or source.itemsize not in _INTEGERS or source.is_complex():
        raise ValueError(
            f"checksum: source is {source.dtype} with strides {source.stride()}; wanted contiguous memory of elements "
            "of 1, 2, 4 or 8 bytes. Pass source.contiguous(), of a complex tensor torch.view_as_real(source)."
        )
    if first_element < 0:
        raise ValueError(f"checksum: first_element={first_element}; wanted the shard's offset, at least 0.")
    bits = source.detach().view(-1).view(_INTEGERS[source.itemsize])
    key = reference.signed(key)
    if not runs_on_triton(source):
        return reference.checksum(bits, key=key, first_element=first_element)
    first_block = first_element // BLOCK
    num_blocks = -(-(first_element + bits.numel()) // BLOCK) - first_block if bits.numel() else 0
    num_programs = min(num_blocks, MAX_PROGRAMS)
    partial = torch.zeros(num_programs, dtype=torch.int64, device=source.device)
    skipped = first_element - first_block * BLOCK
    launch(
        checksum_kernel, num_programs, source.device, bits, partial, bits.numel(), num_blocks, first_block, skipped, key
    )
    return partial.sum()


def checksum_kernel(
    source: tl.tensor,
    partial: tl.tensor,
    numel: tl.int64,
    num_blocks: tl.int64,
    first_block: tl.int64,
    skipped: tl.int64,
    key: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """Sum every k-th block of the whole tensor, k being the number of programs; ``skipped`` lie before ``source``."""
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    # In registers for all blocks of a program, so that an element costs one multiplication.
    weights = odd_number(place.to(tl.int64)).to(tl.int64, bitcast=True)
    total = tl.zeros((), dtype=tl.int64)
    for block in range(program, num_blocks, tl.num_programs(0)):
        index = block * BLOCK - skipped + place
        value = tl.load(source + index, mask=(index >= 0) & (index < numel), other=0).to(tl.int64)
        total += tl.sum(value * weights, axis=0) * odd_number(block + first_block + key).to(tl.int64, bitcast=True)
    tl.store(partial + program, total)


@device_function
def odd_number(number: tl.tensor) -> tl.tensor:
    """Return what ``reference.odd_numbers`` defines, as uint64."""
    mixed = (number.to(tl.int64).to(tl.uint64) + tl.full((), 1, tl.uint64)) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    mixed = (mixed ^ (mixed >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return (mixed ^ (mixed >> 31)) | tl.full((), 1, tl.uint64)
