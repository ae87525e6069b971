"""Matrix products that are added to what lies in a buffer."""

from __future__ import annotations

import torch

from dbuffer_kernels.launch import is_on_gpu


def add_product(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, overwrite: bool = False
) -> None:
    """Add ``scale * (left @ right)`` to ``out``, or write it there, in one matrix product.

    Args:
        left: (rows, n), or (experts, rows, n). right: (n, columns), or with as many experts. out: (rows, columns), or
            with experts, of the same dtype, or FP32 for 16-bit factors, whose sums are not rounded to 16 bits then; may
            be uninitialised where it is overwritten.
    """
    if out.dtype is not left.dtype and not is_on_gpu(out):
        # Only CUDA has products of another dtype than their factors.
        left, right = left.to(out.dtype), right.to(out.dtype)
    is_batched = left.ndim == 3
    beta = 0.0 if overwrite else 1.0
    if out.dtype is not left.dtype:
        add = torch.baddbmm if is_batched else torch.addmm
        add(out, left, right, out_dtype=out.dtype, beta=beta, alpha=scale, out=out)
    elif overwrite and (scale == 1.0 or out.dtype is torch.float16):
        (torch.bmm if is_batched else torch.mm)(left, right, out=out)
        if scale != 1.0:
            # A small fp16 gradient loses bits to the scale: as many, and after the same rounding, as without fusion.
            out.mul_(scale)
    else:
        (out.baddbmm_ if is_batched else out.addmm_)(left, right, beta=beta, alpha=scale)
