"""Plain-torch versions of the ops: what runs on CPU, and what the Triton kernels must agree with.

They trust their arguments; the public ops of the package check them first. Numerics (docs/design/kernels.md): fp32
arithmetic, fp64 when source or out is fp64, then one cast to ``out.dtype`` with round-to-nearest-even. An fp64 result
reaches a 16-bit ``out`` by way of fp32, as torch's own conversion does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 16
"""Elements a widened temporary may hold: 256 KiB in fp32, which stays in a core's L2 cache between its two uses."""

_FULL_PRECISION = (torch.float32, torch.float64)


def compute_dtype(source_dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype the arithmetic runs in: fp64 when either side is fp64, else fp32."""
    return torch.float64 if torch.float64 in (source_dtype, out_dtype) else torch.float32


def cast_copy(source: Tensor, out: Tensor, *, scale: float = 1.0) -> Tensor:
    """Write ``cast(scale * source)`` into ``out`` and return ``out``.

    Allocates nothing when ``scale`` is 1, when the dtypes are equal and when ``out`` already has the compute dtype;
    else temporaries of ``CHUNK_NUMEL`` elements (of the whole source if that is non-contiguous).

    Args:
        source: any shape and strides; fp32, bf16, fp16 or fp64, or any dtype equal to ``out``'s when ``scale`` is 1.
        out: contiguous, same numel as ``source``, any shape; its old contents are never read.
        scale: multiplies in the compute dtype.
    """
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


def accumulate(source: Tensor, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> Tensor:
    """Add ``scale * source`` to ``out``, or replace ``out`` by it, and return ``out``.

    Allocates nothing when the dtypes are equal and either ``scale`` is 1 or the dtype is fp32 or fp64; else
    temporaries of ``CHUNK_NUMEL`` elements (of the whole source if that is non-contiguous).

    Args:
        source: any shape and strides; fp32, bf16, fp16 or fp64.
        out: contiguous, same numel as ``source``, any shape.
        scale: multiplies ``source`` in the compute dtype, with or without a fused multiply-add.
        overwrite: do not read ``out``, so that NaNs in uninitialised memory cannot leak into the result.
    """
    if overwrite:
        return cast_copy(source, out, scale=scale)
    target = out if out.shape == source.shape else out.view(source.shape)
    if source.dtype is out.dtype and (scale == 1.0 or out.dtype in _FULL_PRECISION):
        target.add_(source, alpha=scale)
        return out
    # Widened first: torch's CPU add on two bf16 tensors rounds alpha itself to bf16, an error of up to 2**-9.
    compute = compute_dtype(source.dtype, out.dtype)
    for piece, target_piece in _chunks(source, target):
        target_piece.add_(piece.to(compute), alpha=scale)
    return out


def pack(
    sources: Sequence[Tensor], out: Tensor, offsets: Sequence[int], *, scale: float = 1.0, accumulate: bool = False
) -> Tensor:
    """Write or add ``scale * sources[k]``, flattened, at ``out[offsets[k]:]`` for each k and return ``out``.

    Args:
        sources: tensors of any shape, strides and float dtype; may be empty or hold tensors without elements.
        out: 1-D and contiguous; elements outside the ranges are neither read nor written.
        offsets: first element of each source's range in ``out``; the ranges are in bounds and disjoint.
        scale: multiplies every source in the compute dtype of its pair.
        accumulate: add to ``out`` instead of overwriting it.
    """
    for source, offset in zip(sources, offsets, strict=True):
        _add_or_write(source, out[offset : offset + source.numel()], scale=scale, overwrite=not accumulate)
    return out


# pack's argument `accumulate` hides the op of that name inside it.
_add_or_write = accumulate


def _chunks(source: Tensor, target: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Pair up pieces of at most ``CHUNK_NUMEL`` elements; a strided source is one piece, because flattening copies."""
    if source.numel() <= CHUNK_NUMEL or not source.is_contiguous():
        return ((source, target),)
    return zip(torch.split(source.view(-1), CHUNK_NUMEL), torch.split(target.view(-1), CHUNK_NUMEL), strict=True)
