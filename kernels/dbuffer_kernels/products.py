"""Matrix products that are added to an output buffer."""

from __future__ import annotations

import torch

from dbuffer_kernels.launch import is_on_gpu


def add_product(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, overwrite: bool = False
) -> None:
    """Add ``scale * (left @ right)`` to ``out``, or overwrite it, in one matrix product.

    Args:
        left: (rows, n) or (experts, rows, n). right: (n, columns) or (experts, n, columns).
        out: (rows, columns) or (experts, rows, columns), of the same dtype. For 16-bit factors it may be FP32; the sums
            are then not rounded to 16 bits. It may be uninitialised if ``overwrite``.
    """
    if out.dtype is not left.dtype and not is_on_gpu(out):
        # Only CUDA has products with an output dtype other than the factors'.
        left, right = left.to(out.dtype), right.to(out.dtype)
    is_batched = left.ndim == 3
    beta = 0.0 if overwrite else 1.0
    if out.dtype is not left.dtype:
        add = torch.baddbmm if is_batched else torch.addmm
        add(out, left, right, out_dtype=out.dtype, beta=beta, alpha=scale, out=out)
    elif overwrite and (scale == 1.0 or out.dtype is torch.float16):
        (torch.bmm if is_batched else torch.mm)(left, right, out=out)
        if scale != 1.0:
            # Small fp16 gradients lose bits here, but no more than without fusion, where the product is rounded too.
            out.mul_(scale)
    else:
        (out.baddbmm_ if is_batched else out.addmm_)(left, right, beta=beta, alpha=scale)
