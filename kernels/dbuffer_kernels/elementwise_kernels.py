"""The Triton kernel of ``elementwise``: one pass over two contiguous tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from dbuffer_kernels.launch import BLOCK, compute_dtype, device_function, element_type, launch

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


def launch_elementwise(source: Tensor, out: Tensor, scale: float, *, adds: bool) -> Tensor:
    """Write ``scale * source`` to ``out``, or add it, and return ``out``; both tensors are contiguous."""
    numel = out.numel()
    compute = element_type(compute_dtype(source.dtype, out.dtype))
    num_blocks = -(-numel // BLOCK)
    launch(elementwise_kernel, num_blocks, out.device, source, out, numel, float(scale), COMPUTE=compute, ADDS=adds)
    return out


def elementwise_kernel(
    source: tl.tensor,
    out: tl.tensor,
    numel: tl.int64,
    scale: tl.float64,
    COMPUTE: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Cast or add one block of contiguous memory; the pointers must be 16-byte aligned for full speed."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    # tl.full accepts the compiler's fp64 scalar and the interpreter's Python float, without rounding to fp32.
    factor = tl.full((), scale, COMPUTE)
    # Whole blocks have no mask: with an odd numel, a mask would split every 16-byte access into single elements.
    if start + BLOCK <= numel:
        move(source + index, out + index, None, factor, ADDS)
    else:
        move(source + index, out + index, index < numel, factor, ADDS)


@device_function
def move(source: tl.tensor, out: tl.tensor, mask: tl.tensor, factor: tl.tensor, ADDS: tl.constexpr) -> None:
    """Write ``factor`` times the source elements, or add it, in the dtype of ``factor``."""
    value = tl.load(source, mask=mask).to(factor.dtype) * factor
    if ADDS:
        value = tl.load(out, mask=mask).to(factor.dtype) + value
    store_rounded(out, value, mask)


@device_function
def store_rounded(pointer: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    """Store, rounded to nearest even. fp64 is first rounded to fp32 if the target has 16 bits, as in torch.

    See docs/design/kernels.md, numerics.
    """
    if pointer.dtype.element_ty.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
