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


# Elements whose moments the reference decodes to fp32 at a time: whole blocks.
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class CodedSegment(Segment):
    """Elements ``start`` to ``stop`` of a flat buffer, updated with one row of hyperparameters.

    Attributes:
        start: a multiple of 256, where a block begins.
        plain: offset of its fp32 moments in the plain moments; None: its moments are coded.
    """

    plain: int | None = None


@dataclass(frozen=True, slots=True)
class Int8Moments:
    """Both moments of a flat buffer of ``numel`` elements, 1-D on one device.

    Attributes:
        exp_avg, exp_avg_sq: codes, uint8 (numel,), of the signed and of the unsigned map.
        exp_avg_scale, exp_avg_sq_scale: fp32 (ceil(numel / 256),), one per block, counted from the first element.
        plain_exp_avg, plain_exp_avg_sq: fp32, concatenated, for tensors whose moments are not coded.
    Raises:
        ValueError: a tensor has the wrong length or dtype.
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
    """The flat buffers of AdamW steps with 8-bit moments; all others are as in ``AdamWBuffers``.

    Raises:
        ValueError: a tensor has an unsupported shape, device or dtype; fp64 is unsupported.
    """

    gradient: Tensor
    weight: Tensor
    moments: Int8Moments
    model_weight: Tensor | None = None
    remainder: Tensor | None = None

    def __post_init__(self) -> None:
        # Passing the weight as moments checks all other buffers.
        checked = AdamWBuffers(self.gradient, self.weight, self.weight, self.weight, self.model_weight, self.remainder)
        device = self.weight.device
        check_tensor("Int8AdamWBuffers: codes", self.moments.exp_avg, self.weight.shape, (torch.uint8,), device)
        if checked.compute_dtype is not torch.float32:
            raise ValueError("Int8AdamWBuffers: found fp64. fix: use fp32, bf16 or fp16")


class CodedSegments(SegmentTable[CodedSegment]):
    """Ranges that ``int8_adamw`` updates; each starts at a multiple of 256.

    The table has two more columns: the plain moments' offset minus the segment's start, and whether moments are plain.
    """

    grain = QUANT_BLOCK
    columns = 6

    def rest(self, segment: CodedSegment) -> tuple[int, ...]:
        """Return the two extra columns; see ``SegmentTable``."""
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
    """Take one step of ``adamw`` with moments stored in 8 bits; formula and ``rows`` as in ``adamw``.

    A moment is its code's value times the scale of its block of 256 elements, counted from the buffer's first element.
    The step is computed in fp32, then ``quantize_blocks`` stores the moments with new scales. The weights are updated
    before the moments are rounded.

    Memory traffic per element: the gradient once, the weight and two codes twice; 14.06 bytes with bf16 gradients and
    weights in two halves. Codes are computed by formula, except for a last comparison. Therefore the two maps, 4 KiB,
    are read from the cache only four times per element.

    Args:
        buffers: the buffers to read and write. segments: the ranges to update. rows: as in ``adamw``.
        clip: a 0-d fp32 tensor, multiplied into every gradient.
    Raises:
        ValueError: the segments were made for another length, or ``rows`` has too few rows.
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
        # Arguments marked absent are never read, so any pointer will do.
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
    """Do the same as ``int8_adamw`` in plain torch: decode, ``reference_adamw``, encode, in chunks of whole blocks.

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
    """Update the part of one segment within one block; ``table`` is the table of ``CodedSegments``."""
    entry, start, first, stop = find_segment(table, 6, BLOCK)
    row = rows + tl.load(entry + 3) * 8
    factor = tl.load(row).to(tl.float32)
    if HAS_CLIP:
        factor *= tl.load(clip).to(tl.float32)
    # All pointers are moved to the block's start, so that 32-bit offsets suffice: they take half of the registers.
    pointers = (gradient + start, weight + start, model + start, remainder + start)
    first = tl.maximum(first - start, 0).to(tl.int32)
    stop = tl.minimum(stop - start, BLOCK).to(tl.int32)
    # One row per block of 256 elements, which share a scale. Whole programs have no mask: it would split wide accesses.
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
    """Decode, step as in ``adamw``, and encode the elements ``index``, (blocks, 256).

    ``exp_avg`` and ``exp_avg_sq`` are pairs of pointers: (codes, scales).
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
    """Write ``value``, (blocks, 256), as codes and scales; ``MAP`` is the offset of its map within ``maps``."""
    codes, scales = moment
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if mask is not None:
        bits = tl.where(mask, bits, 0)
    # Magnitudes have the same order as their bits, and NaN is the largest, so that it becomes the scale.
    most = tl.max(bits, axis=1)
    # LARGEST_SCALES as bits.
    largest: tl.constexpr = 0x5F800000 if MAP == 0 else 0x7F7FFFFF
    most = tl.where(most <= 0x7F800000, tl.minimum(most, largest), most)
    scale = most.to(tl.float32, bitcast=True)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    ratio = divide(value, tl.broadcast_to(divisor[:, None], value.shape))
    # A NaN in the block makes its scale NaN, so the block decodes to NaN whatever its codes are.
    ratio = tl.where(ratio == ratio, ratio, 0.0)
    code = code_below(ratio, MAP)
    code += (tl.load(maps + 512 + MAP + code) < ratio).to(tl.int32)
    if MAP != 0:
        # A second moment above zero must not become zero; see quantize_blocks.
        code = tl.maximum(code, (value > 0.0).to(tl.int32))
    tl.store(codes + index, code.to(tl.uint8), mask=mask)
    tl.store(scales, scale, mask=is_part)


@device_function
def code_below(ratio: tl.tensor, MAP: tl.constexpr) -> tl.tensor:
    """Return, by the map's formula, the nearest code or the one before it; at most 254.

    Decade k of ``dynamic_map`` has 2 ** k parts (twice as many if unsigned) with consecutive codes. The formula aims
    half a part low, so that rounding errors never exceed the right code (docs/design/low_precision.md, "Codes").
    """
    magnitude = tl.abs(ratio)
    # A float's bits are its base-2 logarithm in units of 2 ** -23, minus at most 0.086. A decade therefore starts at
    # 0.998 to 1.06 times its power of ten. Parts are wide enough that either decade gives a usable code there.
    decade = ((magnitude.to(tl.int32, bitcast=True) >> 11) * 1233 - 523_940_000) >> 24
    decade = tl.minimum(tl.maximum(decade, 0), 6)
    unsigned: tl.constexpr = 0 if MAP == 0 else 1
    # Conversions are 8x slower than additions, so integers and floats are converted in the bits of 1.5 * 2 ** 23.
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
