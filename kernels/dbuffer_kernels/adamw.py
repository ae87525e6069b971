"""``adamw``: one AdamW step over ranges of flat buffers, in one launch and one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dbuffer_kernels import reference
from dbuffer_kernels.backends import runs_on_triton, without_grad
from dbuffer_kernels.elementwise_kernels import store_rounded
from dbuffer_kernels.launch import device_function, element_type
from dbuffer_kernels.reference import AdamWBuffers
from dbuffer_kernels.segments import Segments, find_segment
from dbuffer_kernels.split import load_joined, store_split

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


@without_grad
def adamw(buffers: AdamWBuffers, segments: Segments, rows: Tensor, *, clip: Tensor | None = None) -> None:
    """Take one AdamW step on every element of ``segments``; elements outside are neither read nor written.

    The formula, in the order of ``torch.optim.AdamW`` (Loshchilov, Hutter, "Decoupled weight decay regularization",
    2019), with the columns of ``rows``::

        g = gradient * sign * clip
        w = weight * decay                        decay = 1 - lr * weight_decay
        m = lerp(exp_avg, g, 1 - beta1)
        v = exp_avg_sq * beta2 + (1 - beta2) * g * g
        w = w - lr / (1 - beta1 ** step) * m / (sqrt(v) / sqrt(1 - beta2 ** step) + eps)

    in fp32 (fp64 when a buffer is fp64); w, m and v are rounded to nearest even once, when they are stored. With fp32
    buffers on the CPU the result is that of ``torch.optim.AdamW(foreach=False)`` to the bit; on CUDA multiply and
    add may fuse.

    Moves per element the gradient once, weight and moments twice, and ``model_weight`` once: 30 bytes with all in
    fp32 and a bf16 ``model_weight``, 28 with a remainder instead of an fp32 weight, 18 with bf16 gradient and moments
    as well. About 40 flops per element: memory bound. On CUDA nothing is allocated after the
    first call with the same ``segments``; the CPU runs ``reference.adamw``, which states its own.

    Args:
        buffers: what is read and written.
        segments: which elements, and the row of each.
        rows: fp64 of shape (rows, 8) on the buffers' device, made by ``adamw_row`` or ``adamw_rows``.
        clip: a 0-d fp32 tensor on that device, multiplied into every gradient; read by the kernel, never by the host.
    Raises:
        ValueError: segments of buffers of another length, too few rows, or another ``clip``.
    """
    weight = buffers.weight
    segments.check("adamw", [weight], rows, reference.NUM_COLUMNS, clip)
    if not runs_on_triton(weight):
        reference.adamw(buffers, segments.ranges, rows, clip=clip)
        return
    # A kernel takes no absent tensors; what is marked absent is never read, so any pointer will do.
    model, remainder = buffers.model_weight, buffers.remainder
    segments.launch(
        adamw_kernel,
        weight,
        buffers.gradient,
        weight,
        buffers.exp_avg,
        buffers.exp_avg_sq,
        weight if model is None else model,
        weight if remainder is None else remainder,
        rows if clip is None else clip,
        rows,
        COMPUTE=element_type(buffers.compute_dtype),
        HAS_CLIP=clip is not None,
        HAS_MODEL=model is not None,
        IS_SPLIT=remainder is not None,
    )


def adamw_row(
    step: float, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, maximize: bool = False
) -> list[float]:
    """Return one row of hyperparameters for ``adamw``, in fp64 on the host.

    Args:
        step: how many steps were taken, this one included: 1 in the first.
    """
    beta1, beta2 = betas
    return [
        -1.0 if maximize else 1.0,
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        -(lr / (1 - beta1**step)),
        (1 - beta2**step) ** 0.5,
        eps,
    ]


def adamw_rows(
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> Tensor:
    """Return one row for each element of ``step``, computed on its device: nothing waits, and a CUDA graph may hold it.

    Args:
        step: (n,) or 0-d, how many steps were taken, this one included. lr: a number, or a tensor on that device.
    Returns:
        fp64 of shape (n, 8).
    """
    steps = step.to(torch.float64).view(-1)
    make: Any = adamw_row
    columns = make(steps, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
    rows = torch.empty(len(steps), reference.NUM_COLUMNS, dtype=torch.float64, device=step.device)
    for index, column in enumerate(columns):
        rows[:, index] = column
    return rows


def adamw_kernel(
    gradient: tl.tensor,
    weight: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    model: tl.tensor,
    remainder: tl.tensor,
    clip: tl.tensor,
    rows: tl.tensor,
    table: tl.tensor,
    COMPUTE: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    HAS_MODEL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update the part of one segment that lies in one block; ``table`` is that of ``Segments``."""
    entry, start, first, stop = find_segment(table, 4, BLOCK)
    row = rows + tl.load(entry + 3) * 8
    factor = tl.load(row).to(COMPUTE)
    if HAS_CLIP:
        factor *= tl.load(clip).to(COMPUTE)
    index = start + tl.arange(0, BLOCK)
    # Whole blocks carry no mask: it would split every 16-byte access into single elements.
    if (first <= start) & (start + BLOCK <= stop):
        update(index, None, gradient, weight, exp_avg, exp_avg_sq, model, remainder, factor, row, HAS_MODEL, IS_SPLIT)
    else:
        mask = (index >= first) & (index < stop)
        update(index, mask, gradient, weight, exp_avg, exp_avg_sq, model, remainder, factor, row, HAS_MODEL, IS_SPLIT)


@device_function
def update(
    index: tl.tensor,
    mask: tl.tensor,
    gradient: tl.tensor,
    weight: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    model: tl.tensor,
    remainder: tl.tensor,
    factor: tl.tensor,
    row: tl.tensor,
    HAS_MODEL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Read, step and write the elements ``index`` (all of them where ``mask`` is None) in the dtype of ``factor``."""
    m = tl.load(exp_avg + index, mask=mask).to(factor.dtype)
    v = tl.load(exp_avg_sq + index, mask=mask).to(factor.dtype)
    m, v = step(index, mask, gradient, weight, m, v, model, remainder, factor, row, HAS_MODEL, IS_SPLIT)
    store_rounded(exp_avg + index, m, mask)
    store_rounded(exp_avg_sq + index, v, mask)


@device_function
def step(
    index: tl.tensor,
    mask: tl.tensor,
    gradient: tl.tensor,
    weight: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    model: tl.tensor,
    remainder: tl.tensor,
    factor: tl.tensor,
    row: tl.tensor,
    HAS_MODEL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Step and write the weights ``index`` by their gradients and moments ``m`` and ``v``; return the new moments."""
    g = tl.load(gradient + index, mask=mask).to(factor.dtype) * factor
    w = load_joined(weight + index, remainder + index, mask) if IS_SPLIT else tl.load(weight + index, mask=mask)
    w = w.to(factor.dtype) * tl.load(row + 1).to(factor.dtype)
    towards = tl.load(row + 2).to(factor.dtype)
    # As torch's lerp: from the nearer end, so that a weight of 1 gives the gradient itself.
    m = tl.where(towards < 0.5, m + towards * (g - m), g - (g - m) * (1.0 - towards))
    v = v * tl.load(row + 3).to(factor.dtype) + tl.load(row + 4).to(factor.dtype) * g * g
    denominator = divide(root(v), tl.load(row + 6).to(factor.dtype)) + tl.load(row + 7).to(factor.dtype)
    w += divide(tl.load(row + 5).to(factor.dtype) * m, denominator)
    store_weight(index, mask, weight, model, remainder, w, HAS_MODEL, IS_SPLIT)
    return m, v


@device_function
def store_weight(
    index: tl.tensor,
    mask: tl.tensor,
    weight: tl.tensor,
    model: tl.tensor,
    remainder: tl.tensor,
    value: tl.tensor,
    HAS_MODEL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Write new weights, in two halves or rounded, and their copy."""
    if IS_SPLIT:
        store_split(weight + index, remainder + index, value, mask)
    else:
        store_rounded(weight + index, value, mask)
    if HAS_MODEL:
        store_rounded(model + index, value, mask)


@device_function
def divide(dividend: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    """Divide with correct rounding; Triton's ``/`` on fp32 is off by up to two units."""
    if dividend.dtype == tl.float32:
        return tl.div_rn(dividend, divisor)
    return dividend / divisor


@device_function
def root(value: tl.tensor) -> tl.tensor:
    """Return the correctly rounded square root; ``tl.sqrt`` is that in fp64 only."""
    if value.dtype == tl.float32:
        return tl.sqrt_rn(value)
    return tl.sqrt(value)
