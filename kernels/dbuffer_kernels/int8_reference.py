"""AdamW with moments in 8 bits, in plain torch: what the kernel of ``int8_adamw`` must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dbuffer_kernels import reference
from dbuffer_kernels.dynamic_map import QUANT_BLOCK, dequantize_blocks, num_blocks, quantize_blocks
from dbuffer_kernels.reference import AdamWBuffers, Segment

# Elements of which moments are there in fp32 at once: whole blocks.
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class CodedSegment(Segment):
    """Elements ``start`` to ``stop`` of a flat buffer, updated with one row of hyperparameters.

    Attributes:
        start: a multiple of 256 elements, where a block begins. position: of its first element, which decides the
            random bits of stochastic rounding.
        plain: where its fp32 moments begin in the plain ones; None: it has codes.
    """

    position: int = 0
    plain: int | None = None


@dataclass(frozen=True, slots=True)
class Int8Moments:
    """Both moments of a flat buffer of ``numel`` elements, 1-D on one device.

    Attributes:
        exp_avg, exp_avg_sq: codes, uint8 (numel,), of the signed and of the unsigned map.
        exp_avg_scale, exp_avg_sq_scale: fp32 (ceil(numel / 256),), of blocks that are counted from the first element.
        plain_exp_avg, plain_exp_avg_sq: fp32, one after the other those of the tensors that have no codes.
    Raises:
        ValueError: a tensor of another length or dtype.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_scale: Tensor
    plain_exp_avg: Tensor
    plain_exp_avg_sq: Tensor

    def __post_init__(self) -> None:
        numel, num_plain = self.exp_avg.numel(), self.plain_exp_avg.numel()
        fp32 = torch.float32
        for name, wanted, dtype in (
            ("exp_avg", numel, torch.uint8),
            ("exp_avg_sq", numel, torch.uint8),
            ("exp_avg_scale", num_blocks(numel), fp32),
            ("exp_avg_sq_scale", num_blocks(numel), fp32),
            ("plain_exp_avg", num_plain, fp32),
            ("plain_exp_avg_sq", num_plain, fp32),
        ):
            tensor = getattr(self, name)
            if tensor.shape != (wanted,) or tensor.dtype is not dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"Int8Moments: {name} is {tensor.dtype} {tuple(tensor.shape)}; wanted {dtype} ({wanted},)"
                )


@dataclass(frozen=True, slots=True)
class Int8AdamWBuffers:
    """The flat buffers of AdamW steps with moments in 8 bits; the others are as in ``AdamWBuffers``.

    Raises:
        ValueError: a tensor of another shape, device or dtype, fp64 included.
    """

    gradient: Tensor
    weight: Tensor
    moments: Int8Moments
    model_weight: Tensor | None = None
    remainder: Tensor | None = None

    def __post_init__(self) -> None:
        # The weight stands in for moments, so that the rest is checked as for plain ones.
        checked = AdamWBuffers(self.gradient, self.weight, self.weight, self.weight, self.model_weight, self.remainder)
        if checked.compute_dtype is not torch.float32 or self.moments.exp_avg.numel() != self.weight.numel():
            raise ValueError(
                f"Int8AdamWBuffers: gradient {self.gradient.dtype}, weight {self.weight.dtype} of "
                f"{self.weight.numel()} elements, moments of {self.moments.exp_avg.numel()}; wanted fp32, bf16 or fp16 "
                "and one length."
            )


def int8_adamw(
    buffers: Int8AdamWBuffers,
    segments: Sequence[CodedSegment],
    rows: Tensor,
    *,
    keys: Tensor | None = None,
    clip: Tensor | None = None,
) -> None:
    """Take the step that the op of this name states: decode, ``reference.adamw``, encode, in chunks of whole blocks.

    Allocates temporaries of ``2 ** 18`` elements.
    """
    for segment in segments:
        if segment.plain is not None:
            _step_plain(buffers, segment, segment.plain, rows, clip)
            continue
        own = None if keys is None else keys[segment.row].tolist()
        for start in range(segment.start, segment.stop, _CHUNK):
            part = slice(start, min(start + _CHUNK, segment.stop))
            _step_coded(buffers, part, segment, rows, own, clip)


def _step_plain(
    buffers: Int8AdamWBuffers, segment: CodedSegment, plain: int, rows: Tensor, clip: Tensor | None
) -> None:
    moments = buffers.moments
    part = slice(segment.start, segment.stop)
    own = slice(plain, plain + segment.stop - segment.start)
    _step(buffers, part, moments.plain_exp_avg[own], moments.plain_exp_avg_sq[own], rows[segment.row], clip)


def _step_coded(
    buffers: Int8AdamWBuffers,
    part: slice,
    segment: CodedSegment,
    rows: Tensor,
    keys: Sequence[int] | None,
    clip: Tensor | None,
) -> None:
    moments = buffers.moments
    blocks = slice(part.start // QUANT_BLOCK, num_blocks(part.stop))
    stored = (
        (moments.exp_avg[part], moments.exp_avg_scale[blocks], True),
        (moments.exp_avg_sq[part], moments.exp_avg_sq_scale[blocks], False),
    )
    values = [dequantize_blocks(codes, scales, signed=signed) for codes, scales, signed in stored]
    _step(buffers, part, values[0], values[1], rows[segment.row], clip)
    position = None if keys is None else segment.position + part.start - segment.start
    for number, (value, (codes, scales, signed)) in enumerate(zip(values, stored, strict=True)):
        own = (0, 0) if keys is None else (keys[2 * number], keys[2 * number + 1])
        new_codes, new_scales = quantize_blocks(value, signed=signed, first_position=position, keys=own)
        codes.copy_(new_codes)
        scales.copy_(new_scales)


def _step(
    buffers: Int8AdamWBuffers, part: slice, exp_avg: Tensor, exp_avg_sq: Tensor, row: Tensor, clip: Tensor | None
) -> None:
    model, remainder = buffers.model_weight, buffers.remainder
    pieces = AdamWBuffers(
        buffers.gradient[part],
        buffers.weight[part],
        exp_avg,
        exp_avg_sq,
        None if model is None else model[part],
        None if remainder is None else remainder[part],
    )
    reference.adamw(pieces, [Segment(0, exp_avg.numel())], row[None], clip=clip)
