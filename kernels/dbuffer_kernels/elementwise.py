"""``cast_copy`` and ``accumulate``: write a scaled tensor into another of any float dtype, or add it, in one pass.

Each stands beside what runs on CPU, and what its Triton kernel must agree with; that trusts its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dbuffer_kernels.elementwise_kernels import launch_elementwise
from dbuffer_kernels.launch import FLOAT_DTYPES, FORCED, LAUNCHERS, compute_dtype, runs_on_triton

CHUNK_NUMEL = 1 << 16
"""Elements a widened temporary may hold: 256 KiB in fp32, which stays in a core's L2 cache between its two uses."""


def cast_copy(source: Tensor, out: Tensor, *, scale: float = 1.0) -> Tensor:
    """Write ``cast(scale * source)`` into ``out`` and return ``out``; element i goes to element i of the flat order.

    The product is fp32 (fp64 when either dtype is fp64) and is rounded to nearest even once. With ``scale`` 1 and
    equal dtypes this is a bit-exact copy of any dtype, NaN payloads included. Not recorded by autograd.

    Moves ``source.itemsize + out.itemsize`` bytes per element, each once: memory bound everywhere. On CUDA a scaled
    contiguous source of another dtype runs a Triton kernel, which allocates nothing. Everything else runs
    ``reference_cast``, which states its own temporaries: none with ``scale`` 1 or one dtype.

    Args:
        source: any shape and strides, on ``out``'s device; fp32, bf16, fp16 or fp64, or for a plain copy any dtype.
        out: contiguous, same numel, any shape. May be ``source`` itself, but must not overlap it in part. Its version
            counter moves or does not, by what runs.
        scale: a Python number; passed to the kernel as fp64 and rounded to the compute dtype there.
    Raises:
        ValueError: other numel or device, non-contiguous ``out``, or a dtype that has no arithmetic here.
    """
    if source.requires_grad or out.requires_grad:
        cast_copy(source.detach(), out.detach(), scale=scale)
        return out
    check_pair("cast_copy", source, out, scale)
    # torch's own copy moves the same bytes in one kernel, and starting it takes 1 us of the host where Triton takes 26.
    if scale == 1.0 or (out.is_cuda and _torch_does_the_same(source, out)):
        return reference_cast(source, out, scale=scale)
    if (out.is_cuda or LAUNCHERS or FORCED) and runs_on_triton(out) and source.is_contiguous():
        return launch_elementwise(source, out, scale, adds=False)
    return reference_cast(source, out, scale=scale)


def accumulate(source: Tensor, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> Tensor:
    """Add ``scale * source`` to ``out``, or replace ``out`` by it as ``cast_copy`` does, and return ``out``.

    The sum is fp32 (fp64 when either dtype is fp64), with or without a fused multiply-add, and is rounded to
    ``out.dtype`` to nearest even once. Not recorded by autograd.

    Moves ``source.itemsize + 2 * out.itemsize`` bytes per element; allocates as ``cast_copy`` does.

    Args:
        source: any shape and strides, on ``out``'s device; fp32, bf16, fp16 or fp64.
        out: contiguous, same numel, any shape; fp32, bf16, fp16 or fp64. Otherwise as in ``cast_copy``.
        scale: a Python number; passed to the kernel as fp64 and rounded to the compute dtype there.
        overwrite: never read ``out``, so that NaNs in uninitialised memory cannot leak into the result.
    Raises:
        ValueError: other numel or device, non-contiguous ``out``, or a dtype that has no arithmetic here.
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
    """Whether one operator of torch's gives the bits that the Triton kernel gives: one dtype, on a GPU.

    There ``mul`` and ``add_`` compute in fp32 (fp64 in fp64), round once, and fuse products and sums. They read and
    write as many bytes in one kernel, and starting it takes 2 to 5 us of the host; Triton takes 26.
    """
    return source.dtype is out.dtype and not FORCED and not LAUNCHERS


def reference_cast(source: Tensor, out: Tensor, *, scale: float = 1.0) -> Tensor:
    """Do what ``cast_copy`` does, with temporaries of a chunk, or of a whole source that is not contiguous."""
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
    """Do what ``accumulate`` does, with temporaries of a chunk, or of a whole source that is not contiguous."""
    target = out if out.shape == source.shape else out.view(source.shape)
    if source.dtype is out.dtype and (scale == 1.0 or out.dtype.itemsize >= 4):
        target.add_(source, alpha=scale)
        return out
    # Widened first: torch's CPU add on two bf16 tensors rounds alpha itself to bf16, an error of up to 2**-9.
    compute = compute_dtype(source.dtype, out.dtype)
    for piece, target_piece in _chunks(source, target):
        target_piece.add_(piece.to(compute), alpha=scale)
    return out


def _chunks(source: Tensor, target: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Pair up pieces of at most ``CHUNK_NUMEL`` elements; a strided source is one piece, because flattening copies."""
    if source.numel() <= CHUNK_NUMEL or not source.is_contiguous():
        return ((source, target),)
    return zip(flat_chunks(source), flat_chunks(target), strict=True)


def flat_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a contiguous tensor in pieces of at most ``CHUNK_NUMEL`` elements."""
    return torch.split(tensor.view(-1), CHUNK_NUMEL)


def check_pair(op: str, source: Tensor, out: Tensor, scale: float) -> None:
    """Raise a ValueError unless ``op`` can write ``source`` to ``out``; under a microsecond when it can."""
    is_alike = source.shape == out.shape or source.numel() == out.numel()
    if not is_alike or not out.is_contiguous() or source.device != out.device:
        raise ValueError(
            f"{op}: source is {tuple(source.shape)} on {source.device}, out {tuple(out.shape)} with strides "
            f"{out.stride()} on {out.device}; wanted as many elements in contiguous memory on one device. Pass the "
            "slice of the flat buffer that belongs to this source."
        )
    if scale != 1.0 or source.dtype is not out.dtype:
        check_dtypes(op, source.dtype, out.dtype)


def check_dtypes(op: str, source_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Raise a ValueError unless both dtypes are ones that ``op`` can compute with."""
    if source_dtype not in FLOAT_DTYPES or out_dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{op}: cannot compute from {source_dtype} to {out_dtype}; wanted float32, bfloat16, float16 or float64 on "
            "both sides (other dtypes can only be copied: equal dtypes, scale 1). Convert source first."
        )
