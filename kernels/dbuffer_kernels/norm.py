"""``sum_of_squares``: the squared norm of a flat buffer and the number of its non-finite values, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels.elementwise import flat_chunks
from dbuffer_kernels.launch import (
    BLOCK,
    FLOAT_DTYPES,
    check_tensor,
    compute_dtype,
    element_type,
    launch,
    runs_on_triton,
    without_grad,
)

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl

MAX_PROGRAMS = 4096
"""Programs of the first stage: a few for each place on the largest GPU, and as many as one block of the second adds."""


@without_grad
def sum_of_squares(source: Tensor, out: Tensor | None = None) -> Tensor:
    """Return (sum of the squares, number of NaNs and infinities) of a tensor; nothing waits for the device.

    Squares are summed in fp32 (fp64 for fp64), strided over at most 4096 programs, then in fp64, always in the same
    order: the same tensor gives the same bits on the same device. A square beyond fp32 makes the sum infinite, as in
    ``torch.linalg.vector_norm``.

    Moves ``source.itemsize`` bytes per element, once, and 128 KiB between the two launches.

    Args:
        source: any shape, contiguous; fp32, bf16, fp16 or fp64. May have no elements.
        out: where to write; fp64 of shape (2,), contiguous, on ``source``'s device. None makes one.
    Raises:
        ValueError: a non-contiguous ``source``, a dtype that is none of the four, or another ``out``.
    """
    check_tensor("sum_of_squares: source", source, source.shape, FLOAT_DTYPES, source.device)
    if out is None:
        out = torch.empty(2, dtype=torch.float64, device=source.device)
    check_tensor("sum_of_squares: out", out, (2,), (torch.float64,), source.device)
    if not runs_on_triton(source):
        return reference_sum_of_squares(source, out)
    num_programs = min(-(-source.numel() // BLOCK), MAX_PROGRAMS)
    if num_programs == 0:
        return out.zero_()
    partial = torch.empty(2 * num_programs, dtype=torch.float64, device=source.device)
    compute = element_type(compute_dtype(source.dtype, source.dtype))
    launch(squares_kernel, num_programs, source.device, source, partial, source.numel(), COMPUTE=compute)
    launch(total_kernel, 1, source.device, partial, out, num_programs, block=MAX_PROGRAMS)
    return out


def reference_sum_of_squares(source: Tensor, out: Tensor) -> Tensor:
    """Sum chunks in fp32 (fp64 for fp64), and their sums in fp64; allocates one chunk."""
    compute = compute_dtype(source.dtype, source.dtype)
    total = torch.zeros((), dtype=torch.float64, device=source.device)
    num_bad = torch.zeros((), dtype=torch.float64, device=source.device)
    for piece in flat_chunks(source):
        # Not torch.dot, which adds 65,536 products in a row and loses two digits.
        subtotal = piece.to(compute).square().sum()
        total += subtotal
        # On the CPU looking costs nothing, and a finite sum proves that every value is finite.
        if not source.is_cpu or not subtotal.isfinite():
            num_bad += piece.numel() - piece.isfinite().sum()
    out[0], out[1] = total, num_bad
    return out


def squares_kernel(
    source: tl.tensor, partial: tl.tensor, numel: tl.int64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Sum every k-th block, k being the number of programs; ``partial`` is (programs, 2) in fp64."""
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=COMPUTE)
    num_bad = tl.zeros((BLOCK,), dtype=tl.int32)
    # Whole blocks carry no mask (see elementwise_kernel); one program has the last block, if that is not whole.
    while start + BLOCK <= numel:
        value = tl.load(source + start + index).to(COMPUTE)
        total += value * value
        # Only of a finite value is the difference from itself zero.
        num_bad += tl.where(value - value == 0.0, 0, 1)
        start += stride
    if start < numel:
        value = tl.load(source + start + index, mask=start + index < numel, other=0.0).to(COMPUTE)
        total += value * value
        num_bad += tl.where(value - value == 0.0, 0, 1)
    tl.store(partial + 2 * program, tl.sum(total, axis=0).to(tl.float64))
    tl.store(partial + 2 * program + 1, tl.sum(num_bad, axis=0).to(tl.float64))


def total_kernel(partial: tl.tensor, out: tl.tensor, num_programs: tl.int64, BLOCK: tl.constexpr) -> None:
    """Add up what ``squares_kernel`` left, in one program."""
    index = tl.arange(0, BLOCK)
    mask = index < num_programs
    total = tl.load(partial + 2 * index, mask=mask, other=0.0)
    num_bad = tl.load(partial + 2 * index + 1, mask=mask, other=0.0)
    tl.store(out, tl.sum(total, axis=0))
    tl.store(out + 1, tl.sum(num_bad, axis=0))
