"""The Triton kernels of ``elementwise``: one pass over two contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from dbuffer_kernels.dtypes import compute_dtype
from dbuffer_kernels.launch import BLOCK, device_function, element_type, launch

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


def launch_elementwise(kernel: Callable[..., None], source: Tensor, out: Tensor, scale: float) -> Tensor:
    """Start a kernel of the signature (source, out, numel, scale, COMPUTE, BLOCK) on contiguous tensors, return out."""
    numel = out.numel()
    compute = element_type(compute_dtype(source.dtype, out.dtype))
    launch(kernel, -(-numel // BLOCK), out.device, source, out, numel, float(scale), COMPUTE=compute)
    return out


def cast_kernel(
    source: tl.tensor, out: tl.tensor, numel: tl.int64, scale: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Cast one block of contiguous memory. ``source`` and ``out`` are pointers, 16-byte aligned for full speed."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    # tl.full takes the compiler's fp64 scalar and the interpreter's Python float alike, without passing by fp32.
    factor = tl.full((), scale, COMPUTE)
    # Whole blocks carry no mask: a mask at an odd numel would split every 16-byte access into single elements.
    if start + BLOCK <= numel:
        store_rounded(out + index, tl.load(source + index).to(COMPUTE) * factor, None)
    else:
        mask = index < numel
        store_rounded(out + index, tl.load(source + index, mask=mask).to(COMPUTE) * factor, mask)


def accumulate_kernel(
    source: tl.tensor, out: tl.tensor, numel: tl.int64, scale: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Add one block of contiguous memory; scalar and branches follow cast_kernel, where their reasons stand."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    factor = tl.full((), scale, COMPUTE)
    if start + BLOCK <= numel:
        total = tl.load(out + index).to(COMPUTE) + tl.load(source + index).to(COMPUTE) * factor
        store_rounded(out + index, total, None)
    else:
        mask = index < numel
        addend = tl.load(source + index, mask=mask).to(COMPUTE) * factor
        store_rounded(out + index, tl.load(out + index, mask=mask).to(COMPUTE) + addend, mask)


@device_function
def store_rounded(pointer: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    """Store to nearest even, from fp64 to 16 bits by way of fp32, as torch does (docs/design/kernels.md, numerics)."""
    if pointer.dtype.element_ty.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
