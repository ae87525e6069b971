"""``checksum``: a 64-bit integer checksum of a tensor that does not depend on how the tensor is sharded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels.launch import BLOCK, device_function, launch, runs_on_triton, without_grad

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl

MAX_PROGRAMS = 2048
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Blocks that the reference sums at a time: 512 KiB in int64, which stay in a core's cache between the passes.
_NUM_BLOCKS = 16


@without_grad
def checksum(source: Tensor, *, key: int, first_element: int = 0) -> Tensor:
    """Return the sum modulo 2**64 of each value's bits times an odd number, as a 0-d int64 tensor, without a host wait.

    The odd number depends only on ``key`` and the element's index in the whole tensor. Checksums of shards therefore
    add up, modulo 2**64, to the checksum of the whole tensor. Changing a single element always changes the sum.

    Memory traffic: ``source.itemsize`` bytes per element, with one 64-bit multiplication and addition.

    Args:
        source: any shape, contiguous, with elements of 1, 2, 4 or 8 bytes; may be empty.
        key: any integer, different for each tensor; only its low 64 bits are used.
        first_element: index of the first element of ``source`` in the whole tensor.
    Raises:
        ValueError: ``source`` is not contiguous or has other elements, or ``first_element`` is negative.
    """
    if not source.is_contiguous() or source.itemsize not in _INTEGERS or source.is_complex():
        raise ValueError(
            f"checksum: source is {source.dtype} with strides {source.stride()}; wanted contiguous memory of elements "
            "of 1, 2, 4 or 8 bytes. fix: pass source.contiguous(), or torch.view_as_real(source) of a complex tensor."
        )
    if first_element < 0:
        raise ValueError(f"checksum: first_element={first_element}. fix: give the shard's offset, at least 0")
    bits = source.detach().view(-1).view(_INTEGERS[source.itemsize])
    key = _signed(key)
    if not runs_on_triton(source):
        return reference_checksum(bits, key=key, first_element=first_element)
    first_block = first_element // BLOCK
    num_blocks = -(-(first_element + bits.numel()) // BLOCK) - first_block if bits.numel() else 0
    num_programs = min(num_blocks, MAX_PROGRAMS)
    partial = torch.zeros(num_programs, dtype=torch.int64, device=source.device)
    skipped = first_element - first_block * BLOCK
    launch(
        checksum_kernel, num_programs, source.device, bits, partial, bits.numel(), num_blocks, first_block, skipped, key
    )
    return partial.sum()


def reference_checksum(bits: Tensor, *, key: int, first_element: int) -> Tensor:
    """Return the sum modulo 2**64 of ``bits[i] * odd(place) * odd(key + block)``, 0-d int64.

    Element ``first_element + i`` of the whole tensor is at position ``place`` of block ``block`` of ``BLOCK`` elements.
    """
    weights = _weights_of_places(bits.device)
    block, place = divmod(first_element, BLOCK)
    # Partial blocks at both ends are summed alone; whole blocks in between several at a time.
    head = min(-place % BLOCK, bits.numel())
    tail = (bits.numel() - head) % BLOCK
    start, body, end = bits.split([head, bits.numel() - head - tail, tail])
    sums = [(start * weights[place : place + head]).sum().view(1)] if head else []
    products = torch.empty(_NUM_BLOCKS, BLOCK, dtype=torch.int64, device=bits.device)
    for blocks in body.view(-1, BLOCK).split(_NUM_BLOCKS) if len(body) else ():
        sums.append(products[: len(blocks)].copy_(blocks).mul_(weights).sum(dim=1))
    if tail:
        sums.append((end * weights[:tail]).sum().view(1))
    of_blocks = torch.cat([products.new_empty(0), *sums])
    numbers = torch.arange(block, block + len(of_blocks), device=bits.device)
    return (of_blocks * _odd_numbers(numbers + key)).sum()


@functools.cache
def _weights_of_places(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _odd_numbers(torch.arange(BLOCK, device=device))


def _odd_numbers(numbers: Tensor) -> Tensor:
    """Return a pseudo-random odd 64-bit number per int64 integer: its splitmix64 hash with the lowest bit set."""
    mixed = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _signed(number: int) -> int:
    """Return the low 64 bits of an integer as a signed int64 value."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(numbers: Tensor, places: int) -> Tensor:
    # torch shifts arithmetically, so the copies of the sign bit are masked.
    return (numbers >> places) & ((1 << (64 - places)) - 1)


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
    """Sum every k-th block of the whole tensor for k programs; the first block starts ``skipped`` before ``source``."""
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    # In registers for all blocks of a program, so that each element costs one multiplication.
    weights = odd_number(place.to(tl.int64)).to(tl.int64, bitcast=True)
    total = tl.zeros((), dtype=tl.int64)
    for block in range(program, num_blocks, tl.num_programs(0)):
        index = block * BLOCK - skipped + place
        value = tl.load(source + index, mask=(index >= 0) & (index < numel), other=0).to(tl.int64)
        total += tl.sum(value * weights, axis=0) * odd_number(block + first_block + key).to(tl.int64, bitcast=True)
    tl.store(partial + program, total)


@device_function
def odd_number(number: tl.tensor) -> tl.tensor:
    """Return the odd number that ``_odd_numbers`` defines, as uint64."""
    mixed = (number.to(tl.int64).to(tl.uint64) + tl.full((), 1, tl.uint64)) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    mixed = (mixed ^ (mixed >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return (mixed ^ (mixed >> 31)) | tl.full((), 1, tl.uint64)
