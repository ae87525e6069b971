"""``cast_copy``: write a scaled tensor into another of any float dtype, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels import reference
from dbuffer_kernels.launch import BLOCK, element_type, launch, runs_on_triton, without_grad

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


@without_grad
def cast_copy(source: Tensor, out: Tensor, *, scale: float = 1.0) -> Tensor:
    """Write ``cast(scale * source)`` into ``out`` and return ``out``; element i goes to element i of the flat order.

    The product is fp32 (fp64 when either dtype is fp64) and is rounded to nearest even once. With ``scale`` 1 and
    equal dtypes this is a bit-exact copy of any dtype, NaN payloads included. Not recorded by autograd.

    Moves ``source.itemsize + out.itemsize`` bytes per element, each once: 6 for fp32 -> bf16, so 1 GiB of parameters
    in fp32 takes at best 0.34 ms at the 4.8 TB/s of an H200. Two flops per element at most: memory bound everywhere.
    On CUDA nothing is allocated for a contiguous source; other sources, and the CPU, run ``reference.cast_copy``,
    which states its own.

    Args:
        source: any shape and strides, on ``out``'s device; fp32, bf16, fp16 or fp64, or for a plain copy any dtype.
        out: contiguous, same numel, any shape. May be ``source`` itself, but must not overlap it in part. Written
            behind autograd's back on CUDA: its version counter does not move.
        scale: a Python number; passed to the kernel as fp64 and rounded to the compute dtype there.
    Raises:
        ValueError: other numel or device, non-contiguous ``out``, or a dtype that has no arithmetic here.
    """
    check_pair("cast_copy", source, out, scale)
    return write(source, out, scale)


def write(source: Tensor, out: Tensor, scale: float) -> Tensor:
    """Do what ``cast_copy`` does with arguments that were checked."""
    # torch's plain copy is a device memcpy, already at the roofline.
    if runs_on_triton(out) and source.is_contiguous() and not (scale == 1.0 and source.dtype is out.dtype):
        launch_elementwise(cast_kernel, source, out, scale)
        return out
    return reference.cast_copy(source, out, scale=scale)


def launch_elementwise(kernel: Callable[..., None], source: Tensor, out: Tensor, scale: float) -> None:
    """Start a kernel of the signature (source, out, numel, scale, COMPUTE, BLOCK) on two contiguous tensors."""
    numel = out.numel()
    compute = element_type(reference.compute_dtype(source.dtype, out.dtype))
    launch(kernel, -(-numel // BLOCK), out.device, source, out, numel, float(scale), COMPUTE=compute)


def check_pair(op: str, source: Tensor, out: Tensor, scale: float) -> None:
    """Raise a ValueError unless ``op`` can write ``source`` to ``out``; under a microsecond when it can."""
    if source.shape != out.shape and source.numel() != out.numel():
        raise ValueError(
            f"{op}: source has {source.numel()} elements {tuple(source.shape)}, out has {out.numel()} "
            f"{tuple(out.shape)}; wanted the same number. Pass the slice of out that belongs to this source."
        )
    if not out.is_contiguous():
        raise ValueError(
            f"{op}: out of shape {tuple(out.shape)} has strides {out.stride()}; wanted contiguous memory. Pass a view "
            "of the flat buffer, or write to a contiguous tensor and copy it over."
        )
    if source.device != out.device:
        raise ValueError(f"{op}: source is on {source.device}, out on {out.device}; wanted one device. Move source.")
    if scale != 1.0 or source.dtype is not out.dtype:
        check_dtypes(op, source.dtype, out.dtype)


def check_dtypes(op: str, source_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Raise a ValueError unless both dtypes are ones that ``op`` can compute with."""
    if source_dtype not in reference.FLOAT_DTYPES or out_dtype not in reference.FLOAT_DTYPES:
        raise ValueError(
            f"{op}: cannot compute from {source_dtype} to {out_dtype}; wanted float32, bfloat16, float16 or float64 on "
            "both sides (other dtypes can only be copied: equal dtypes, scale 1). Convert source first."
        )


def cast_kernel(
    source: tl.tensor, out: tl.tensor, numel: tl.int64, scale: tl.float64, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Cast one block of contiguous memory. ``source`` and ``out`` are pointers, 16-byte aligned for full speed."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    # tl.full takes the compiler's fp64 scalar and the interpreter's Python float alike, without passing by fp32.
    factor = tl.full((), scale, COMPUTE)
    # Whole blocks carry no mask: a mask at an odd numel would split every 16-byte access into single elements.
    if start + BLOCK <= numel:
        value = tl.load(source + start + index).to(COMPUTE) * factor
        # fp64 reaches 16 bits by way of fp32, as in torch (docs/design/kernels.md, numerics).
        if out.dtype.element_ty.primitive_bitwidth == 16:
            value = value.to(tl.float32)
        tl.store(out + start + index, value.to(out.dtype.element_ty))
    else:
        mask = start + index < numel
        value = tl.load(source + start + index, mask=mask).to(COMPUTE) * factor
        if out.dtype.element_ty.primitive_bitwidth == 16:
            value = value.to(tl.float32)
        tl.store(out + start + index, value.to(out.dtype.element_ty), mask=mask)
