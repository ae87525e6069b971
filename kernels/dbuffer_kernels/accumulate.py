"""``accumulate``: add a scaled tensor to another of any float dtype, in one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from dbuffer_kernels import reference
from dbuffer_kernels.cast import check_dtypes, check_pair, launch_elementwise, write
from dbuffer_kernels.launch import runs_on_triton, without_grad

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


@without_grad
def accumulate(source: Tensor, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> Tensor:
    """Add ``scale * source`` to ``out``, or replace ``out`` by it, and return ``out``.

    The sum is fp32 (fp64 when either dtype is fp64), with or without a fused multiply-add, and is rounded to
    ``out.dtype`` to nearest even once. Not recorded by autograd.

    Moves ``source.itemsize + 2 * out.itemsize`` bytes per element (``source.itemsize + out.itemsize`` with
    ``overwrite``): 10 to add bf16 to fp32, so 1 Gi elements take at best 2.2 ms at the 4.8 TB/s of an H200. Two flops
    per element: memory bound everywhere. On CUDA nothing is allocated for a contiguous source; other sources, and the
    CPU, run ``reference.accumulate``, which states its own.

    Args:
        source: any shape and strides, on ``out``'s device; fp32, bf16, fp16 or fp64.
        out: contiguous, same numel, any shape; fp32, bf16, fp16 or fp64. May be ``source`` itself, but must not overlap
            it in part. Written behind autograd's back on CUDA: its version counter does not move.
        scale: a Python number; passed to the kernel as fp64 and rounded to the compute dtype there.
        overwrite: never read ``out``, so that NaNs in uninitialised memory cannot leak into the result.
    Raises:
        ValueError: other numel or device, non-contiguous ``out``, or a dtype that has no arithmetic here.
    """
    check_pair("accumulate", source, out, scale)
    if overwrite:
        return write(source, out, scale)
    check_dtypes("accumulate", source.dtype, out.dtype)
    if runs_on_triton(out) and source.is_contiguous():
        launch_elementwise(accumulate_kernel, source, out, scale)
        return out
    return reference.accumulate(source, out, scale=scale)


def accumulate_kernel(
    source: tl.tensor, out: tl.tensor, numel: tl.int64, scale: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Add one block of contiguous memory. ``source`` and ``out`` are pointers, 16-byte aligned for full speed.

    Branches, the fp32 step and the scalar follow cast_kernel, where their reasons stand.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    factor = tl.full((), scale, COMPUTE)
    if start + BLOCK <= numel:
        total = tl.load(out + start + index).to(COMPUTE) + tl.load(source + start + index).to(COMPUTE) * factor
        if out.dtype.element_ty.primitive_bitwidth == 16:
            total = total.to(tl.float32)
        tl.store(out + start + index, total.to(out.dtype.element_ty))
    else:
        mask = start + index < numel
        addend = tl.load(source + start + index, mask=mask).to(COMPUTE) * factor
        total = tl.load(out + start + index, mask=mask).to(COMPUTE) + addend
        if out.dtype.element_ty.primitive_bitwidth == 16:
            total = total.to(tl.float32)
        tl.store(out + start + index, total.to(out.dtype.element_ty), mask=mask)
