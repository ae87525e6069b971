"""``int8_adamw``: one AdamW step over flat buffers whose moments are 8-bit codes, in one launch and one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels.adamw import NUM_COLUMNS, AdamWBuffers, divide, reference_adamw, step, update, weight_form
from dbuffer_kernels.dynamic_map import QUANT_BLOCK, dequantize_blocks, map_tables, num_blocks, quantize_blocks
from dbuffer_kernels.launch import check_tensor, device_function, runs_on_triton, without_grad
from dbuffer_kernels.segments import Segment, SegmentTable, find_segment

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


# Elements of which the reference has moments in fp32 at once: whole blocks.
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class CodedSegment(Segment):
    """Elements ``start`` to ``stop`` of a flat buffer, updated with one row of hyperparameters.

    Attributes:
        start: a multiple of 256 elements, where a block begins.
        plain: where its fp32 moments begin in the plain ones; None: it has codes.
    """

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
        sizes = numel, numel, num_blocks(numel), num_blocks(numel), num_plain, num_plain
        for index, (name, size) in enumerate(zip(self.__slots__, sizes, strict=True)):
            dtype, tensor = torch.uint8 if index < 2 else torch.float32, getattr(self, name)
            check_tensor(f"Int8Moments: {name}", tensor, (size,), (dtype,), tensor.device)


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
        device = self.weight.device
        check_tensor("Int8AdamWBuffers: codes", self.moments.exp_avg, self.weight.shape, (torch.uint8,), device)
        if checked.compute_dtype is not torch.float32:
            raise ValueError("Int8AdamWBuffers: found fp64; wanted fp32, bf16 or fp16.")


class CodedSegments(SegmentTable[CodedSegment]):
    """Ranges that ``int8_adamw`` updates, each from a multiple of 256 on.

    The table has two more columns: plain offset counted from the buffer's first element, and whether moments are plain.
    """

    grain = QUANT_BLOCK
    columns = 6

    def rest(self, segment: CodedSegment) -> tuple[int, ...]:
        """See ``SegmentTable``."""
        plain = 0 if segment.plain is None else segment.plain - segment.start
        return plain, segment.plain is not None


@without_grad
def int8_adamw(
    buffers: Int8AdamWBuffers,
    segments: CodedSegments,
    rows: Tensor,
    *,
    clip: Tensor | None = None,
) -> None:
    """Take one step of ``adamw`` with moments that are stored in 8 bits; its formula and ``rows`` are those.

    A moment is code times scale of its block of 256 elements, counted from the buffer's first; the step is taken in
    fp32, and ``quantize_blocks`` stores the result with new scales. Weights never see the rounding of their own step.

    Moves per element the gradient once, the weight and two codes twice: 14.06 bytes with bf16 gradients and weights in
    two halves. Codes are computed up to the last comparison, so the two code books, 4 KiB, are read from the cache four
    times per element.

    Args:
        buffers: what is read and written. segments: which elements. rows: as in ``adamw``.
        clip: a 0-d fp32 tensor, multiplied into every gradient.
    Raises:
        ValueError: segments of buffers of another length, or too few rows.
    """
    weight = buffers.weight
    segments.check("int8_adamw", [weight], rows, NUM_COLUMNS, clip)
    if not runs_on_triton(weight):
        reference_int8_adamw(buffers, segments.ranges, rows, clip=clip)
        return
    moments = buffers.moments
    segments.launch(
        int8_adamw_kernel,
        weight,
        buffers.gradient,
        weight,
        moments.exp_avg,
        moments.exp_avg_sq,
        moments.exp_avg_scale,
        moments.exp_avg_sq_scale,
        moments.plain_exp_avg,
        moments.plain_exp_avg_sq,
        # What is marked absent is never read, so any pointer will do.
        weight if buffers.model_weight is None else buffers.model_weight,
        weight if buffers.remainder is None else buffers.remainder,
        rows if clip is None else clip,
        rows,
        map_tables(weight.device),
        HAS_CLIP=clip is not None,
        FORM=weight_form(buffers.model_weight, buffers.remainder),
    )


def reference_int8_adamw(
    buffers: Int8AdamWBuffers,
    segments: Sequence[CodedSegment],
    rows: Tensor,
    *,
    clip: Tensor | None = None,
) -> None:
    """Take the step that the op of this name states: decode, ``reference_adamw``, encode, in chunks of whole blocks.

    Allocates temporaries of ``2 ** 18`` elements.
    """
    for segment in segments:
        if segment.plain is not None:
            _step_plain(buffers, segment, segment.plain, rows, clip)
            continue
        for start in range(segment.start, segment.stop, _CHUNK):
            part = slice(start, min(start + _CHUNK, segment.stop))
            _step_coded(buffers, part, rows[segment.row], clip)


def _step_plain(
    buffers: Int8AdamWBuffers, segment: CodedSegment, plain: int, rows: Tensor, clip: Tensor | None
) -> None:
    moments = buffers.moments
    part = slice(segment.start, segment.stop)
    own = slice(plain, plain + segment.stop - segment.start)
    _step(buffers, part, moments.plain_exp_avg[own], moments.plain_exp_avg_sq[own], rows[segment.row], clip)


def _step_coded(buffers: Int8AdamWBuffers, part: slice, row: Tensor, clip: Tensor | None) -> None:
    moments = buffers.moments
    blocks = slice(part.start // QUANT_BLOCK, num_blocks(part.stop))
    stored = (
        (moments.exp_avg[part], moments.exp_avg_scale[blocks], True),
        (moments.exp_avg_sq[part], moments.exp_avg_sq_scale[blocks], False),
    )
    values = [dequantize_blocks(codes, scales, signed=signed) for codes, scales, signed in stored]
    _step(buffers, part, values[0], values[1], row, clip)
    for value, (codes, scales, signed) in zip(values, stored, strict=True):
        new_codes, new_scales = quantize_blocks(value, signed=signed)
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
    reference_adamw(pieces, [Segment(0, exp_avg.numel())], row[None], clip=clip)


def int8_adamw_kernel(
    gradient: tl.tensor,
    weight: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    exp_avg_scale: tl.tensor,
    exp_avg_sq_scale: tl.tensor,
    plain_exp_avg: tl.tensor,
    plain_exp_avg_sq: tl.tensor,
    model: tl.tensor,
    remainder: tl.tensor,
    clip: tl.tensor,
    rows: tl.tensor,
    maps: tl.tensor,
    table: tl.tensor,
    HAS_CLIP: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update the part of one segment that lies in one block; ``table`` is that of ``CodedSegments``."""
    entry, start, first, stop = find_segment(table, 6, BLOCK)
    row = rows + tl.load(entry + 3) * 8
    factor = tl.load(row).to(tl.float32)
    if HAS_CLIP:
        factor *= tl.load(clip).to(tl.float32)
    # All pointers move to the block, for offsets of 32 bits: they take half of the registers.
    pointers = (gradient + start, weight + start, model + start, remainder + start)
    first = tl.maximum(first - start, 0).to(tl.int32)
    stop = tl.minimum(stop - start, BLOCK).to(tl.int32)
    # A row for each block of 256, which shares a scale. Whole programs carry no mask: it would split wide accesses.
    block = tl.arange(0, BLOCK // 256)
    index = (block * 256)[:, None] + tl.arange(0, 256)[None, :]
    mask = (index >= first) & (index < stop)
    how = (row, factor)
    if tl.load(entry + 5) != 0:
        plain = tl.load(entry + 4) + start
        update(index, mask, pointers, (plain_exp_avg + plain, plain_exp_avg_sq + plain), how, FORM)
    else:
        scales = start // 256 + block
        m = (exp_avg + start, exp_avg_scale + scales)
        v = (exp_avg_sq + start, exp_avg_sq_scale + scales)
        if (first == 0) & (stop == BLOCK):
            coded_update(index, None, None, pointers, m, v, how, maps, FORM)
        else:
            is_part = (block * 256 >= first) & (block * 256 < stop)
            coded_update(index, mask, is_part, pointers, m, v, how, maps, FORM)


@device_function
def coded_update(
    index: tl.tensor,
    mask: tl.tensor,
    is_part: tl.tensor,
    pointers: tl.tuple,
    exp_avg: tl.tuple,
    exp_avg_sq: tl.tuple,
    how: tl.tuple,
    maps: tl.tensor,
    FORM: tl.constexpr,
) -> None:
    """Decode, step as ``adamw`` does, and encode the elements ``index``, (blocks, 256).

    Moments are pointers of codes and scales.
    """
    m_codes, m_scale = exp_avg
    v_codes, v_scale = exp_avg_sq
    m = tl.load(maps + tl.load(m_codes + index, mask=mask).to(tl.int32)) * tl.load(m_scale, mask=is_part)[:, None]
    v = tl.load(maps + 256 + tl.load(v_codes + index, mask=mask).to(tl.int32))
    v *= tl.load(v_scale, mask=is_part)[:, None]
    m, v = step(index, mask, pointers, (m, v), how, FORM)
    store_coded(index, mask, is_part, m, exp_avg, maps, 0)
    store_coded(index, mask, is_part, v, exp_avg_sq, maps, 256)


@device_function
def store_coded(
    index: tl.tensor,
    mask: tl.tensor,
    is_part: tl.tensor,
    value: tl.tensor,
    moment: tl.tuple,
    maps: tl.tensor,
    MAP: tl.constexpr,
) -> None:
    """Write ``value``, (blocks, 256), as codes and scales; ``MAP`` is where its map begins in the maps."""
    codes, scales = moment
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if mask is not None:
        bits = tl.where(mask, bits, 0)
    # Magnitudes order as their bits do, and NaN comes last, so that it reaches the scale.
    most = tl.max(bits, axis=1)
    # LARGEST_SCALES in bits.
    largest: tl.constexpr = 0x5F800000 if MAP == 0 else 0x7F7FFFFF
    most = tl.where(most <= 0x7F800000, tl.minimum(most, largest), most)
    scale = most.to(tl.float32, bitcast=True)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    ratio = divide(value, tl.broadcast_to(divisor[:, None], value.shape))
    # Infinity over infinity, in a block that is spoiled either way.
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    code = code_below(ratio, MAP)
    code += (tl.load(maps + 512 + MAP + code) < ratio).to(tl.int32)
    if MAP != 0:
        # Of squares none above zero becomes zero: see quantize_blocks.
        code = tl.maximum(code, (value > 0.0).to(tl.int32))
    tl.store(codes + index, code.to(tl.uint8), mask=mask)
    tl.store(scales, scale, mask=is_part)


@device_function
def code_below(ratio: tl.tensor, MAP: tl.constexpr) -> tl.tensor:
    """Return a code that is the nearest one or the one before it, at most 254, from the map's formula.

    Decade k of ``dynamic_map`` has 2 ** k parts (unsigned: twice as many), whose codes follow each other. Half a part
    further down rounding here cannot lead beyond the code wanted (docs/design/low_precision.md, "Codes").
    """
    magnitude = tl.abs(ratio)
    # The bits of a float are its logarithm to base 2, 2 ** -23 each, less at most 0.086. So a decade begins at 0.998 to
    # 1.06 times its power of ten, and parts are wide enough for either neighbour to know the codes there.
    decade = ((magnitude.to(tl.int32, bitcast=True) >> 11) * 1233 - 523_940_000) >> 24
    decade = tl.minimum(tl.maximum(decade, 0), 6)
    unsigned: tl.constexpr = 0 if MAP == 0 else 1
    # Conversions are an eighth as fast as sums: integers become floats, and back, in the bits of 1.5 * 2 ** 23.
    power = (0x4B400006 - decade).to(tl.float32, bitcast=True) - 12582912.0
    in_decade = tl.minimum(magnitude * tl.exp2(power * 3.32192809489), 1.25)
    width = ((decade + (127 + unsigned)) << 23).to(tl.float32, bitcast=True)
    part = (in_decade - 0.1) * (width * 1.11111111111) - 1.0
    part = (part + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    parts = tl.full((), 1 + unsigned, tl.int32) << decade
    place = parts + tl.minimum(tl.maximum(part, -1), parts - 1)
    if MAP != 0:
        return place - 1
    return tl.where(ratio < 0.0, tl.maximum(126 - place, 0), 127 + place)
