"""``cast_copy`` and ``accumulate``: write a scaled tensor to another of any float dtype, or add it, in one pass.

Each op has a CPU reference, which its Triton kernel must match. The kernel does not check its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dbuffer_kernels.elementwise_kernels import launch_elementwise
from dbuffer_kernels.launch import FLOAT_DTYPES, FORCED, LAUNCHERS, compute_dtype, runs_on_triton

CHUNK_NUMEL = 1 << 16
"""Most elements of a widened temporary: 256 KiB in fp32, which stay in a core's L2 cache between their two uses."""


def cast_copy(source: Tensor, out: Tensor, *, scale: float = 1.0) -> Tensor:
    """Write ``cast(scale * source)`` to ``out`` and return ``out``; elements keep their flat order.

    The product is fp32 (fp64 if either dtype is fp64), rounded once to nearest even. With ``scale`` 1 and equal dtypes
    this is a bit-exact copy of any dtype, including NaN payloads. Autograd does not record it.

    Memory traffic: ``source.itemsize + out.itemsize`` bytes per element; memory bound everywhere. On CUDA, a scaled
    contiguous source of another dtype runs a Triton kernel, which allocates nothing. All other cases run
    ``reference_cast``, which needs no temporaries if ``scale`` is 1 or the dtypes are equal.

    Args:
        source: any shape and strides, on ``out``'s device; fp32, bf16, fp16 or fp64, or for a plain copy any dtype.
        out: contiguous, same numel, any shape. It may be ``source`` itself, but must not overlap it in part. Some
            backends increment its version counter.
        scale: a Python number; passed to the kernel as fp64 and rounded to the compute dtype there.
    Raises:
        ValueError: numel or device differ, ``out`` is not contiguous, or a dtype has no arithmetic here.
    """
    if source.requires_grad or out.requires_grad:
        cast_copy(source.detach(), out.detach(), scale=scale)
        return out
    check_pair("cast_copy", source, out, scale)
    # torch's own copy moves the same bytes in one kernel. Launching it takes 1 us of host time; Triton takes 26 us.
    if scale == 1.0 or (out.is_cuda and _torch_does_the_same(source, out)):
        return reference_cast(source, out, scale=scale)
    if (out.is_cuda or LAUNCHERS or FORCED) and runs_on_triton(out) and source.is_contiguous():
        return launch_elementwise(source, out, scale, adds=False)
    return reference_cast(source, out, scale=scale)


def accumulate(source: Tensor, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> Tensor:
    """Add ``scale * source`` to ``out`` and return ``out``; with ``overwrite``, replace ``out`` as ``cast_copy`` does.

    The sum is fp32 (fp64 if either dtype is fp64), possibly with a fused multiply-add, and is rounded to ``out.dtype``
    once, to nearest even. Autograd does not record it.

    Memory traffic: ``source.itemsize + 2 * out.itemsize`` bytes per element; temporaries as in ``cast_copy``.

    Args:
        source: any shape and strides, on ``out``'s device; fp32, bf16, fp16 or fp64.
        out: contiguous, same numel, any shape; fp32, bf16, fp16 or fp64. Otherwise as in ``cast_copy``.
        scale: a Python number; passed to the kernel as fp64 and rounded to the compute dtype there.
        overwrite: never read ``out``, so that NaNs in uninitialised memory cannot leak into the result.
    Raises:
        ValueError: numel or device differ, ``out`` is not contiguous, or a dtype has no arithmetic here.
    """
    if overwrite:
        return cast_copy(source, out, scale=scale)
    if source.requires_grad or out.requires_grad:
        accumulate(source.detach(), out.detach(), scale=scale)
        return out
    check_pair("accumulate", source, out, scale)
    check_dtypes("accumulate", source.dtype, out.dtype)
    if out.is_cuda and _torch_does_the_same(source, out):
        target = out if out.shape == source.shape else out.view(source.shape)
        target.add_(source, alpha=scale)
        return out
    if (out.is_cuda or LAUNCHERS or FORCED) and runs_on_triton(out) and source.is_contiguous():
        return launch_elementwise(source, out, scale, adds=True)
    return reference_accumulate(source, out, scale=scale)


def _torch_does_the_same(source: Tensor, out: Tensor) -> bool:
    """Return whether one torch operator gives the same bits as the Triton kernel: for equal dtypes on a GPU.

    ``mul`` and ``add_`` then compute in fp32 (fp64 in fp64), round once, and fuse products and sums. They move as many
    bytes in one kernel, and launching takes 2 to 5 us of host time; Triton takes 26 us.
    """
    return source.dtype is out.dtype and not FORCED and not LAUNCHERS


def reference_cast(source: Tensor, out: Tensor, *, scale: float = 1.0) -> Tensor:
    """Do the same as ``cast_copy``; temporaries have chunk size, or the size of a non-contiguous source."""
    target = out if out.shape == source.shape else out.view(source.shape)
    if scale == 1.0:
        target.copy_(source)
    elif source.dtype is out.dtype:
        torch.mul(source, scale, out=target)
    else:
        compute = compute_dtype(source.dtype, out.dtype)
        for piece, target_piece in _chunks(source, target):
            if out.dtype is compute:
                target_piece.copy_(piece).mul_(scale)
            else:
                target_piece.copy_(piece.to(compute).mul(scale))
    return out


def reference_accumulate(source: Tensor, out: Tensor, *, scale: float = 1.0) -> Tensor:
    """Do the same as ``accumulate``; temporaries have chunk size, or the size of a non-contiguous source."""
    target = out if out.shape == source.shape else out.view(source.shape)
    if source.dtype is out.dtype and (scale == 1.0 or out.dtype.itemsize >= 4):
        target.add_(source, alpha=scale)
        return out
    # Widened first: torch's CPU add on two bf16 tensors rounds alpha to bf16, an error of up to 2**-9.
    compute = compute_dtype(source.dtype, out.dtype)
    for piece, target_piece in _chunks(source, target):
        target_piece.add_(piece.to(compute), alpha=scale)
    return out


def _chunks(source: Tensor, target: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield pairs of pieces of at most ``CHUNK_NUMEL`` elements; a strided source stays whole, as flattening copies."""
    if source.numel() <= CHUNK_NUMEL or not source.is_contiguous():
        return ((source, target),)
    return zip(flat_chunks(source), flat_chunks(target), strict=True)


def flat_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return pieces of at most ``CHUNK_NUMEL`` elements of a contiguous tensor."""
    return torch.split(tensor.view(-1), CHUNK_NUMEL)


def check_pair(op: str, source: Tensor, out: Tensor, scale: float) -> None:
    """Raise ValueError unless ``op`` can write ``source`` to ``out``; a valid call costs under a microsecond."""
    is_alike = source.shape == out.shape or source.numel() == out.numel()
    if not is_alike or not out.is_contiguous() or source.device != out.device:
        raise ValueError(
            f"{op}: source is {tuple(source.shape)} on {source.device}, out {tuple(out.shape)} with strides "
            f"{out.stride()} on {out.device}; wanted as many elements in contiguous memory on one device. fix: pass "
            "the slice of the flat buffer that belongs to this source."
        )
    if scale != 1.0 or source.dtype is not out.dtype:
        check_dtypes(op, source.dtype, out.dtype)


def check_dtypes(op: str, source_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Raise ValueError unless ``op`` can compute with both dtypes."""
    if source_dtype not in FLOAT_DTYPES or out_dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{op}: cannot compute from {source_dtype} to {out_dtype}; wanted float32, bfloat16, float16 or float64 on "
            "both sides (other dtypes can only be copied: equal dtypes, scale 1). fix: convert the source first."
        )
