"""``decode_rows``: what ranks gathered in 8 bits, codes and scales as they arrive, becomes weights in one launch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels.adamw import divide
from dbuffer_kernels.elementwise import store_rounded
from dbuffer_kernels.launch import (
    BLOCK,
    FLOAT_DTYPES,
    check_tensor,
    device_function,
    launch,
    runs_on_triton,
    without_grad,
)
from dbuffer_kernels.quantize import MX_BLOCK, RUNS, CodedRows, reference_decode

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl

_KINDS = ("fp8", "int8_block", "mxfp8", "mxfp8 columns")


@without_grad
def decode_rows(rows: Tensor, layout: CodedRows, scales: Tensor | None, out: Tensor) -> None:
    """Write the values of coded rows, code times scale (for FP8 code over scale) in fp32, rounded once to nearest even.

    Padding between tensors is undefined. Moves per element its code, its part of a scale and what is written, each
    once: 3.03 bytes for MXFP8 into bf16.

    Args:
        rows: uint8, 1-D, all of ``layout``'s. scales: fp32, one for each tensor, for FP8; else None.
        out: 1-D floating point of ``num_rows * shard_numel`` elements.
    Raises:
        ValueError: memory of another length.
    """
    check_tensor("decode_rows: rows", rows, (layout.num_rows * layout.row_bytes,), (torch.uint8,), out.device)
    check_tensor("decode_rows: out", out, (layout.num_rows * layout.shard_numel,), FLOAT_DTYPES, out.device)
    assert (scales is None) is not (layout.kind == "fp8")
    if not runs_on_triton(out):
        reference_decode(rows, layout, scales, out)
        return
    columns = _columns(layout)
    tile = MX_BLOCK * columns if layout.kind == "mxfp8 columns" else BLOCK
    counts = [-(-numel // tile) for _, numel, _ in layout.tensors]
    if out.device not in layout.tables:
        # Of each tensor its first tile, first element, width and elements; a power of two of them.
        table = [(sum(counts[:index]), *tensor) for index, tensor in enumerate(layout.tensors)]
        table += [(sum(counts), 0, 0, 0)] * ((1 << (len(table) - 1).bit_length()) - len(table))
        layout.tables[out.device] = torch.tensor(table, dtype=torch.int64).T.contiguous().to(out.device)
    tensors = layout.tables[out.device]
    of_rows = rows.view(torch.float32) if layout.kind == "int8_block" else rows
    launch(
        decode_kernel,
        sum(counts),
        out.device,
        rows,
        of_rows if scales is None else scales,
        out,
        tensors,
        layout.shard_numel,
        layout.row_bytes,
        KIND=_KINDS.index(layout.kind),
        COLUMNS=columns,
        TENSORS=tensors.shape[1],
        # Rows that begin anywhere else are read byte by byte.
        IS_WIDE=columns % 16 == 0 and layout.row_bytes % 16 == 0,
        block=tile,
    )


def _columns(layout: CodedRows) -> int:
    """Return the columns of a tile, a power of two: elements of one rank, for blocks within rows those of one scale."""
    if layout.kind in RUNS:
        return layout.block
    starts = [layout.shard_numel, *(offset for offset, _, _ in layout.tensors)]
    return math.gcd(128, *(starts if layout.kind == "fp8" else [width for _, _, width in layout.tensors]))


def decode_kernel(
    rows: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    tensors: tl.tensor,
    shard_numel: tl.int64,
    row_bytes: tl.int64,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
    TENSORS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Decode one tile, BLOCK // COLUMNS rows: of elements that follow each other, or for kind 3 of 32 rows of a matrix.

    ``KIND`` is that of ``_KINDS``. A tile's row lies in one rank's row; its rows need not lie in the same one.
    """
    tile = tl.program_id(0).to(tl.int64)
    known = tl.arange(0, TENSORS)
    tensor = tl.sum((tl.load(tensors + known) <= tile).to(tl.int32)) - 1
    entry = tensors + tensor
    tile -= tl.load(entry)
    offset = tl.load(entry + TENSORS)
    row = tl.arange(0, BLOCK // COLUMNS)
    column = tl.arange(0, COLUMNS)
    if KIND == 3:
        width = tl.load(entry + 3 * TENSORS)
        tiles = width // COLUMNS
        above, left = tile // tiles * width, tile % tiles * COLUMNS
        start = offset + above * 32 + left + row * width
        scale_index = (offset // 32 + above + left + column)[None, :]
        per_rank = shard_numel // 32
        mask = None
    else:
        inside = tile * BLOCK + row * COLUMNS
        start = offset + inside
        scale_index = (start // COLUMNS)[:, None]
        per_rank = shard_numel // COLUMNS
        mask = (inside < tl.load(entry + 2 * TENSORS))[:, None]
    source = start + start // shard_numel * (row_bytes - shard_numel)
    if IS_WIDE:
        start = tl.multiple_of(start, 16)
        source = tl.multiple_of(source, 16)
    code = tl.load(rows + source[:, None] + column[None, :], mask=mask)
    if KIND == 0:
        value = from_e4m3(code)
        value = divide(value, tl.broadcast_to(tl.load(scales + tensor), value.shape))
    else:
        rank = scale_index // per_rank
        place = scale_index - rank * per_rank
        if KIND == 1:
            scale = tl.load(scales + (rank * row_bytes + shard_numel) // 4 + place, mask=mask)
            value = code.to(tl.int8, bitcast=True).to(tl.float32) * scale
        else:
            scale = tl.load(scales + rank * row_bytes + shard_numel + place, mask=mask).to(tl.int32)
            # The exponent's bits are the byte itself; 2 ** -127 is subnormal, and 255 is NaN.
            bits = (scale << 23) | tl.where((scale == 0) | (scale == 255), 0x400000, 0)
            value = from_e4m3(code) * bits.to(tl.float32, bitcast=True)
    store_rounded(out + start[:, None] + column[None, :], value, mask)


@device_function
def from_e4m3(code: tl.tensor) -> tl.tensor:
    """Return the fp32 values of E4M3 bytes, on any architecture."""
    code = code.to(tl.int32)
    # Exponent and mantissa stand in fp32's own places, whose bias is 120 more; subnormals come out right as well.
    value = (((code & 0x80) << 24) | ((code & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)
