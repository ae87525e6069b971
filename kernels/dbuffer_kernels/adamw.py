"""``adamw``: one AdamW step over ranges of flat buffers, in one launch and one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dbuffer_kernels.elementwise import CHUNK_NUMEL
from dbuffer_kernels.elementwise_kernels import store_rounded
from dbuffer_kernels.launch import (
    FLOAT_DTYPES,
    check_tensor,
    device_function,
    element_type,
    runs_on_triton,
    without_grad,
)
from dbuffer_kernels.segments import Segment, Segments, find_segment
from dbuffer_kernels.split import join_weight, load_joined, split_weight, store_split

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


@dataclass(frozen=True, slots=True)
class AdamWBuffers:
    """The flat buffers of AdamW steps: 1-D, contiguous, of one length, on one device; 16-byte aligned for speed.

    They are checked when this object is made, not in every step, so keep it as long as the buffers stay the same.

    Attributes:
        gradient: read; fp32, bf16, fp16 or fp64.
        weight: updated; fp32, bf16, fp16 or fp64 (bf16 with a ``remainder``).
        exp_avg, exp_avg_sq: the moments, updated; fp32, bf16, fp16 or fp64.
        model_weight: None, or the copy in compute dtype; written with the new weight, rounded to nearest even.
        remainder: int16, updated; ``weight`` and ``remainder`` together are the fp32 weight, as in ``split_weight``.
            None: ``weight`` alone is the weight.
        compute_dtype: dtype of the arithmetic: fp64 if a buffer is fp64, else fp32.
        is_uniform: whether gradient, weight and moments all have that dtype.
    Raises:
        ValueError: a tensor has an unsupported shape, device or dtype.
    """

    gradient: Tensor
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    model_weight: Tensor | None = None
    remainder: Tensor | None = None
    compute_dtype: torch.dtype = field(init=False)
    is_uniform: bool = field(init=False)

    def __post_init__(self) -> None:
        is_split = self.remainder is not None
        for name, tensor in self.named().items():
            dtypes = {"remainder": {torch.int16}, "weight": {torch.bfloat16}} if is_split else {}
            wanted = dtypes.get(name, FLOAT_DTYPES)
            check_tensor(f"AdamWBuffers: {name}", tensor, (self.weight.numel(),), wanted, self.weight.device)
        if is_split and self.model_weight is not None:
            raise ValueError(
                "AdamWBuffers: a weight with a remainder is the model weight; wanted no other one. fix: pass "
                "model_weight=None"
            )
        is_double = any(tensor.dtype is torch.float64 for tensor in self.named().values())
        object.__setattr__(self, "compute_dtype", torch.float64 if is_double else torch.float32)
        dtypes_used = {tensor.dtype for tensor in (self.gradient, self.weight, self.exp_avg, self.exp_avg_sq)}
        object.__setattr__(self, "is_uniform", dtypes_used == {self.compute_dtype})

    def named(self) -> dict[str, Tensor]:
        """Return the buffers that are not None, by name."""
        names = ("gradient", "weight", "exp_avg", "exp_avg_sq", "model_weight", "remainder")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


NUM_COLUMNS = 8
"""Columns of a hyperparameter row.

They are: sign, decay, 1 - beta1, beta2, 1 - beta2, -step size, sqrt(bias correction 2), eps.
"""


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

    The arithmetic is in fp32 (fp64 if a buffer is fp64). w, m and v are rounded once, to nearest even, when they are
    stored. With fp32 buffers on the CPU the result equals ``torch.optim.AdamW(foreach=False)`` bit for bit. On CUDA,
    multiplications and additions may be fused.

    Memory traffic per element: the gradient once, weight and moments twice, and ``model_weight`` once. That is 30 bytes
    if all are fp32 and ``model_weight`` is bf16, at about 40 flops. On CUDA nothing is allocated after the first call
    with the same ``segments``; the CPU allocates temporaries of ``CHUNK_NUMEL`` elements.

    Args:
        buffers: the buffers to read and write.
        segments: the ranges to update, with the row of each.
        rows: fp64 of shape (rows, 8) on the buffers' device, made by ``adamw_row`` or ``adamw_rows``.
        clip: a 0-d fp32 tensor on that device, multiplied into every gradient. Only the kernel reads it, so the host
            does not wait.
    Raises:
        ValueError: the segments were made for another length, ``rows`` has too few rows, or ``clip`` has another form.
    """
    weight = buffers.weight
    segments.check("adamw", [weight], rows, NUM_COLUMNS, clip)
    if not runs_on_triton(weight):
        reference_adamw(buffers, segments.ranges, rows, clip=clip)
        return
    # A kernel needs a pointer for every argument. Arguments marked absent are never read, so any pointer will do.
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
        FORM=weight_form(model, remainder),
    )


def adamw_row(
    step: float, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, maximize: bool = False
) -> list[float]:
    """Return one row of hyperparameters for ``adamw``, in fp64 on the host.

    Args:
        step: number of steps including this one; 1 in the first step.
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
    """Return one row per element of ``step``, computed on its device, without host synchronization (CUDA graphs).

    Args:
        step: (n,) or 0-d: number of steps including this one. lr: a number, or a tensor on that device.
    Returns:
        fp64 of shape (n, 8).
    """
    steps = step.to(torch.float64).view(-1)
    make: Any = adamw_row
    columns = make(steps, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
    rows = torch.empty(len(steps), NUM_COLUMNS, dtype=torch.float64, device=step.device)
    for index, column in enumerate(columns):
        rows[:, index] = column
    return rows


def reference_adamw(
    buffers: AdamWBuffers, segments: Sequence[Segment], rows: Tensor, *, clip: Tensor | None = None
) -> None:
    """Take the step that ``adamw`` specifies, in batches of pieces that share a row."""
    values = rows.tolist()
    numel = buffers.weight.numel()
    if len(segments) == 1 and segments[0].stop - segments[0].start == numel <= CHUNK_NUMEL:
        row = values[segments[0].row]
        if buffers.is_uniform:
            _adamw_whole(buffers, row, clip)
        else:
            _adamw_batch(buffers, (slice(None),), row, clip)
        return
    for row in {segment.row for segment in segments}:
        for batch in _batches(segment for segment in segments if segment.row == row):
            _adamw_batch(buffers, batch, values[row], clip)


def _batches(segments: Iterable[Segment]) -> Iterator[list[slice]]:
    """Yield lists of pieces of the segments; a list has at most ``CHUNK_NUMEL`` elements and takes one torch call."""
    batch: list[slice] = []
    room = CHUNK_NUMEL
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            stop = min(start + room, segment.stop)
            batch.append(slice(start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], CHUNK_NUMEL
    if batch:
        yield batch


def _adamw_whole(buffers: AdamWBuffers, row: Sequence[float], clip: Tensor | None) -> None:
    """Do the same as ``_adamw_batch`` on whole buffers of the compute dtype: same operators, but without lists."""
    sign, decay, towards, beta2, rest2, minus_step_size, root_correction, eps = row
    weight, exp_avg, exp_avg_sq, gradient = buffers.weight, buffers.exp_avg, buffers.exp_avg_sq, buffers.gradient
    if clip is not None:
        gradient = gradient * (clip.to(gradient.dtype) * sign)
    elif sign != 1.0:
        gradient = gradient * sign
    weight.mul_(decay)
    exp_avg.lerp_(gradient, towards)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=rest2)
    denominator = exp_avg_sq.sqrt().div_(root_correction).add_(eps)
    weight.addcdiv_(exp_avg, denominator, value=minus_step_size)
    if buffers.model_weight is not None:
        buffers.model_weight.copy_(weight)


def _adamw_batch(buffers: AdamWBuffers, parts: Sequence[slice], row: Sequence[float], clip: Tensor | None) -> None:
    sign, decay, towards, beta2, rest2, minus_step_size, root_correction, eps = row
    compute = buffers.compute_dtype
    gradients = _widened(_cut(buffers.gradient, parts), compute)
    if clip is not None:
        gradients = list(torch._foreach_mul(gradients, clip.to(compute) * sign))
    elif sign != 1.0:
        gradients = list(torch._foreach_mul(gradients, sign))
    stored = [_cut(tensor, parts) for tensor in (buffers.weight, buffers.exp_avg, buffers.exp_avg_sq)]
    # Pieces of the compute dtype are not copied, so the arithmetic happens in place.
    weights, exp_avgs, exp_avg_sqs = (_widened(pieces, compute) for pieces in stored)
    # With a remainder, the stored weight is bf16, so ``weights`` is a new list here.
    remainders = [] if buffers.remainder is None else _cut(buffers.remainder, parts)
    for index, remainder in enumerate(remainders):
        weights[index] = join_weight(stored[0][index], remainder, torch.empty_like(gradients[index]))
    torch._foreach_mul_(weights, decay)
    torch._foreach_lerp_(exp_avgs, gradients, towards)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, rest2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, root_correction)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(weights, exp_avgs, denominators, minus_step_size)
    for index, remainder in enumerate(remainders):
        split_weight(weights[index], stored[0][index], remainder)
    if not remainders:
        _store(stored[0], weights)
    _store(stored[1], exp_avgs)
    _store(stored[2], exp_avg_sqs)
    if buffers.model_weight is not None:
        torch._foreach_copy_(_cut(buffers.model_weight, parts), weights)


def _store(pieces: list[Tensor], values: list[Tensor]) -> None:
    # Pieces of the compute dtype were changed in place.
    if pieces is not values:
        torch._foreach_copy_(pieces, values)


def _cut(tensor: Tensor, parts: Sequence[slice]) -> list[Tensor]:
    return [tensor[part] for part in parts]


def _widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return tensors if tensors[0].dtype is dtype else [tensor.to(dtype) for tensor in tensors]


def weight_form(model: Tensor | None, remainder: Tensor | None) -> int:
    """Return the form in which kernels write weights: 0: weight only, 1: weight and copy, 2: weight and remainder."""
    return 2 if remainder is not None else int(model is not None)


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
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update the part of one segment within one block; ``table`` is the table of ``Segments``."""
    entry, start, first, stop = find_segment(table, 4, BLOCK)
    row = rows + tl.load(entry + 3) * 8
    factor = tl.load(row).to(COMPUTE)
    if HAS_CLIP:
        factor *= tl.load(clip).to(COMPUTE)
    index = start + tl.arange(0, BLOCK)
    pointers = (gradient, weight, model, remainder)
    # Whole blocks have no mask, because a mask would split every 16-byte access into single elements.
    if (first <= start) & (start + BLOCK <= stop):
        update(index, None, pointers, (exp_avg, exp_avg_sq), (row, factor), FORM)
    else:
        update(index, (index >= first) & (index < stop), pointers, (exp_avg, exp_avg_sq), (row, factor), FORM)


@device_function
def update(
    index: tl.tensor, mask: tl.tensor, pointers: tl.tuple, moments: tl.tuple, how: tl.tuple, FORM: tl.constexpr
) -> None:
    """Read, step and write the elements ``index``; ``mask`` None: all of them. See ``step``."""
    exp_avg, exp_avg_sq = moments
    m = tl.load(exp_avg + index, mask=mask).to(how[1].dtype)
    v = tl.load(exp_avg_sq + index, mask=mask).to(how[1].dtype)
    m, v = step(index, mask, pointers, (m, v), how, FORM)
    store_rounded(exp_avg + index, m, mask)
    store_rounded(exp_avg_sq + index, v, mask)


@device_function
def step(
    index: tl.tensor, mask: tl.tensor, pointers: tl.tuple, moments: tl.tuple, how: tl.tuple, FORM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Compute and write the new weights of the elements ``index``; return their new moments.

    ``pointers`` are (gradient, weight, copy, remainder). ``how`` is (hyperparameter row, gradient factor); arithmetic
    is in the factor's dtype. ``FORM`` is the result of ``weight_form``.
    """
    gradient, weight, model, remainder = pointers
    m, v = moments
    row, factor = how
    g = tl.load(gradient + index, mask=mask).to(factor.dtype) * factor
    w = load_joined(weight + index, remainder + index, mask) if FORM == 2 else tl.load(weight + index, mask=mask)
    w = w.to(factor.dtype) * tl.load(row + 1).to(factor.dtype)
    towards = tl.load(row + 2).to(factor.dtype)
    # Like torch's lerp, from the nearer end, so that a weight of 1 gives exactly the gradient.
    m = tl.where(towards < 0.5, m + towards * (g - m), g - (g - m) * (1.0 - towards))
    v = v * tl.load(row + 3).to(factor.dtype) + tl.load(row + 4).to(factor.dtype) * g * g
    denominator = divide(root(v), tl.load(row + 6).to(factor.dtype)) + tl.load(row + 7).to(factor.dtype)
    w += divide(tl.load(row + 5).to(factor.dtype) * m, denominator)
    store_weight(index, mask, (weight, model, remainder), w, FORM)
    return m, v


@device_function
def store_weight(index: tl.tensor, mask: tl.tensor, pointers: tl.tuple, value: tl.tensor, FORM: tl.constexpr) -> None:
    """Write new weights in the form ``FORM`` (``weight_form``): rounded, rounded with a copy, or with a remainder."""
    weight, model, remainder = pointers
    if FORM == 2:
        store_split(weight + index, remainder + index, value, mask)
    else:
        store_rounded(weight + index, value, mask)
    if FORM == 1:
        store_rounded(model + index, value, mask)


@device_function
def divide(dividend: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    """Divide with correct rounding; Triton's ``/`` on fp32 is off by up to 2 units in the last place."""
    if dividend.dtype == tl.float32:
        return tl.div_rn(dividend, divisor)
    return dividend / divisor


@device_function
def root(value: tl.tensor) -> tl.tensor:
    """Return the correctly rounded square root; ``tl.sqrt`` rounds correctly only in fp64."""
    if value.dtype == tl.float32:
        return tl.sqrt_rn(value)
    return tl.sqrt(value)
