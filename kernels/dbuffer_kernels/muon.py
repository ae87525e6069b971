"""``muon_momentum`` and ``muon_apply``: the element-wise parts of a Muon step, one pass over flat buffers each.

Newton-Schulz on whole matrices runs between the two: the first writes its input, the second reads its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels.adamw import store_weight, weight_form
from dbuffer_kernels.launch import compute_dtype, device_function, element_type, runs_on_triton, without_grad
from dbuffer_kernels.segments import Segments, find_segment
from dbuffer_kernels.split import join_weight, load_joined, split_weight

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl

_NUM_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class MuonWeights:
    """The tensors that ``muon_apply`` writes, 1-D and of one length.

    Attributes:
        weight: the main weights, or their upper halves if there is a ``remainder``.
        model_weight: their copy in compute dtype, or None.
        remainder: int16, the lower halves of FP32 weights, or None.
    """

    weight: Tensor
    model_weight: Tensor | None = None
    remainder: Tensor | None = None


@without_grad
def muon_momentum(
    gradient: Tensor, momentum: Tensor, out: Tensor, segments: Segments, rows: Tensor, *, clip: Tensor | None = None
) -> None:
    """Update the momentum of every element of ``segments``, and write the input of Newton-Schulz to ``out``.

    In the order and with the roundings of ``torch.optim.Muon``, with the columns ``(mu, is Nesterov)`` of ``rows``::

        g = gradient * clip
        momentum = lerp(momentum, g, 1 - mu)
        out = lerp(g, momentum, mu) if is Nesterov else momentum

    On the CPU the result equals torch's bit for bit. Memory traffic: the gradient and ``out`` once, the momentum twice.
    That is 14 bytes per element with an FP32 gradient and momentum and a bf16 ``out``; memory bound.

    Args:
        gradient, momentum, out: 1-D, of one length; elements of ``out`` outside ``segments`` are not written.
        rows: fp64 of shape (rows, 2) on the same device.
        clip: a 0-d fp32 tensor on that device, multiplied into every gradient.
    Raises:
        ValueError: the segments were made for another length, or ``rows`` has too few rows.
    """
    segments.check("muon_momentum", [gradient, momentum, out], rows, _NUM_COLUMNS, clip)
    if runs_on_triton(out):
        compute = element_type(compute_dtype(momentum.dtype, momentum.dtype))
        factor = rows if clip is None else clip
        pointers = (gradient, momentum, out, factor, rows)
        segments.launch(muon_momentum_kernel, out, *pointers, COMPUTE=compute, HAS_CLIP=clip is not None)
        return
    table_of_rows = rows.tolist()
    for segment in segments.ranges:
        place = slice(segment.start, segment.stop)
        mu, is_nesterov = table_of_rows[segment.row]
        g = gradient[place].to(momentum.dtype)
        if clip is not None:
            g = g * clip.to(g.dtype)
        kept = momentum[place]
        kept.lerp_(g, 1 - mu)
        out[place].copy_(g.lerp(kept, mu) if is_nesterov else kept)


@without_grad
def muon_apply(update: Tensor, weights: MuonWeights, segments: Segments, rows: Tensor) -> None:
    """Decay the weights of ``segments`` and add their update: ``w = w * decay; w = w + alpha * update``.

    Both operations round, as in ``torch.optim.Muon``. The columns of ``rows`` are ``(decay, alpha)``: decay is
    ``1 - lr * weight_decay``, alpha is minus the learning rate times the matrix's factor. Memory traffic: the update
    and ``model_weight`` once, the weights twice; 12 bytes per element with FP32 weights, a bf16 update and a bf16 copy.

    Args:
        update: 1-D, as long as the weights.
        rows: fp64 of shape (rows, 2) on the same device.
    Raises:
        ValueError: the segments were made for another length, or ``rows`` has too few rows.
    """
    segments.check("muon_apply", [update, weights.weight], rows, _NUM_COLUMNS)
    weight, model, remainder = weights.weight, weights.model_weight, weights.remainder
    if runs_on_triton(weight):
        compute = torch.float32 if remainder is not None else compute_dtype(weight.dtype, weight.dtype)
        segments.launch(
            muon_apply_kernel,
            weight,
            update,
            weight,
            weight if model is None else model,
            weight if remainder is None else remainder,
            rows,
            COMPUTE=element_type(compute),
            FORM=weight_form(model, remainder),
        )
        return
    table_of_rows = rows.tolist()
    for segment in segments.ranges:
        place = slice(segment.start, segment.stop)
        decay, alpha = table_of_rows[segment.row]
        w = weight[place]
        if remainder is not None:
            w = join_weight(w, remainder[place], torch.empty_like(w, dtype=torch.float32))
        w.mul_(decay).add_(update[place], alpha=alpha)
        if remainder is not None:
            split_weight(w, weight[place], remainder[place])
        if model is not None:
            model[place].copy_(w)


def muon_momentum_kernel(
    gradient: tl.tensor,
    momentum: tl.tensor,
    out: tl.tensor,
    clip: tl.tensor,
    rows: tl.tensor,
    table: tl.tensor,
    COMPUTE: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update the part of one segment within one block; ``table`` is the table of ``Segments``."""
    entry, start, first, stop = find_segment(table, 4, BLOCK)
    row = rows + tl.load(entry + 3) * 2
    factor = tl.full((), 1.0, COMPUTE)
    if HAS_CLIP:
        factor = tl.load(clip).to(COMPUTE)
    index = start + tl.arange(0, BLOCK)
    # Whole blocks have no mask, because a mask would split every 16-byte access into single elements.
    if (first <= start) & (start + BLOCK <= stop):
        move(index, None, (gradient, momentum, out), factor, row)
    else:
        move(index, (index >= first) & (index < stop), (gradient, momentum, out), factor, row)


@device_function
def move(index: tl.tensor, mask: tl.tensor, pointers: tl.tuple, factor: tl.tensor, row: tl.tensor) -> None:
    """Read, step and write the elements ``index`` in the dtype of ``factor``; ``mask`` None: all of them."""
    gradient, momentum, out = pointers
    mu = tl.load(row)
    g = tl.load(gradient + index, mask=mask).to(factor.dtype) * factor
    kept = tl.load(momentum + index, mask=mask).to(factor.dtype)
    kept = interpolated(kept, g, (1.0 - mu).to(factor.dtype)).to(momentum.dtype.element_ty)
    tl.store(momentum + index, kept, mask=mask)
    kept = kept.to(factor.dtype)
    seen = tl.where(tl.load(row + 1) != 0.0, interpolated(g, kept, mu.to(factor.dtype)), kept)
    # Rounded to the momentum's dtype first, because torch computes the update in that dtype.
    tl.store(out + index, seen.to(momentum.dtype.element_ty).to(out.dtype.element_ty), mask=mask)


@device_function
def interpolated(begin: tl.tensor, end: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Return torch's lerp: from the nearer end, with product and sum fused."""
    difference = end - begin
    return tl.where(weight < 0.5, tl.fma(weight, difference, begin), tl.fma(-difference, 1.0 - weight, end))


def muon_apply_kernel(
    update: tl.tensor,
    weight: tl.tensor,
    model: tl.tensor,
    remainder: tl.tensor,
    rows: tl.tensor,
    table: tl.tensor,
    COMPUTE: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update the part of one segment within one block; ``table`` is the table of ``Segments``."""
    entry, start, first, stop = find_segment(table, 4, BLOCK)
    row = rows + tl.load(entry + 3) * 2
    how = (tl.load(row).to(COMPUTE), tl.load(row + 1).to(COMPUTE))
    index = start + tl.arange(0, BLOCK)
    if (first <= start) & (start + BLOCK <= stop):
        add(index, None, update, (weight, model, remainder), how, FORM)
    else:
        add(index, (index >= first) & (index < stop), update, (weight, model, remainder), how, FORM)


@device_function
def add(
    index: tl.tensor, mask: tl.tensor, update: tl.tensor, pointers: tl.tuple, how: tl.tuple, FORM: tl.constexpr
) -> None:
    """Read, step and write the elements ``index`` in the dtype of ``how``; ``mask`` None: all of them."""
    weight, _, remainder = pointers
    decay, alpha = how
    if FORM == 2:
        w = load_joined(weight + index, remainder + index, mask) * decay
    else:
        # torch rounds between the two operations, which matters for 16-bit weights.
        w = tl.load(weight + index, mask=mask).to(decay.dtype) * decay
        w = w.to(weight.dtype.element_ty).to(decay.dtype)
    w = tl.fma(tl.load(update + index, mask=mask).to(decay.dtype), alpha, w)
    store_weight(index, mask, pointers, w, FORM)
