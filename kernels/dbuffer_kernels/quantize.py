"""``encode_row`` and ``decode_rows``: communicate weights as int8, in blocks of 256 elements with an fp32 scale each.

A rank sends its shard as a row of bytes: the codes, one byte per element, then the scales. Blocks are counted from the
first element of the flat buffer and shards never cut a block, so results do not depend on how it is sharded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels.dynamic_map import QUANT_BLOCK
from dbuffer_kernels.elementwise_kernels import store_rounded
from dbuffer_kernels.launch import BLOCK, FLOAT_DTYPES, check_tensor, launch, runs_on_triton, without_grad

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl

_LARGEST = 127.0
# Elements converted to fp32 at a time: a multiple of the block size.
_CHUNK = 1 << 22


def row_bytes(numel: int) -> int:
    """Return the number of bytes for codes and scales of ``numel`` elements, a multiple of the block size."""
    return numel + 4 * numel // QUANT_BLOCK


@without_grad
def encode_row(values: Tensor, row: Tensor) -> None:
    """Quantize ``values`` to int8 with one scale per block, and write codes and scales to ``row``.

    A scale is the block's largest magnitude / 127; a code is value / scale, rounded to nearest even. NaN values and
    blocks with scale 0 get code 0.

    Args:
        values: floating point, 1-D, whole blocks. row: uint8, 1-D, ``row_bytes(values.numel())`` long.
    """
    numel = values.numel()
    codes, scales = row[:numel].view(torch.int8), row[numel:].view(torch.float32)
    for start in range(0, numel, _CHUNK):
        blocks = values[start : start + _CHUNK].view(-1, QUANT_BLOCK)
        own = blocks.abs().amax(1).float() / _LARGEST
        ratios = blocks.float() / own.masked_fill(own == 0, 1.0)[:, None]
        ratios = ratios.nan_to_num(nan=0.0).clamp(-_LARGEST, _LARGEST).round()
        codes[start : start + blocks.numel()].view(blocks.shape).copy_(ratios)
        scales[start // QUANT_BLOCK :][: len(own)].copy_(own)


@without_grad
def decode_rows(rows: Tensor, shard_numel: int, out: Tensor) -> None:
    """Decode the rows of all ranks into ``out``: code times scale in fp32, rounded once to nearest even.

    Memory traffic per element: its code, its share of a scale, and the output; 3.02 bytes into bf16.

    Args:
        rows: uint8, 1-D, the ranks' rows one after another. shard_numel: elements per row. out: floating point, 1-D.
    Raises:
        ValueError: ``rows`` or ``out`` has the wrong length.
    """
    numel, length = out.numel(), row_bytes(shard_numel)
    check_tensor("decode_rows: rows", rows, (numel // shard_numel * length,), (torch.uint8,), out.device)
    check_tensor("decode_rows: out", out, (rows.numel() // length * shard_numel,), FLOAT_DTYPES, out.device)
    if not runs_on_triton(out):
        reference_decode(rows, shard_numel, out)
        return
    launch(
        decode_kernel,
        -(-numel // BLOCK),
        out.device,
        rows,
        rows.view(torch.float32),
        out,
        numel // QUANT_BLOCK,
        shard_numel // QUANT_BLOCK,
        # If rows do not start at multiples of 16, the kernel reads them byte by byte.
        IS_WIDE=length % 16 == 0,
    )


def reference_decode(rows: Tensor, shard_numel: int, out: Tensor) -> None:
    """Do the same as ``decode_rows`` in plain torch, in chunks."""
    for row, shard in zip(rows.view(-1, row_bytes(shard_numel)), out.view(-1, shard_numel), strict=True):
        codes, scales = row[:shard_numel].view(torch.int8), row[shard_numel:].view(torch.float32)
        for start in range(0, shard_numel, _CHUNK):
            values = codes[start : start + _CHUNK].float().view(-1, QUANT_BLOCK)
            values *= scales[start // QUANT_BLOCK :][: len(values), None]
            shard[start : start + values.numel()].copy_(values.view(-1))


def decode_kernel(
    rows: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_blocks: tl.int64,
    blocks_per_row: tl.int64,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Decode BLOCK // 256 blocks, each within one rank's row. ``scales`` is ``rows`` viewed as fp32."""
    block = tl.program_id(0).to(tl.int64) * (BLOCK // 256) + tl.arange(0, BLOCK // 256)
    column = tl.arange(0, 256)
    mask = block < num_blocks
    rank = block // blocks_per_row
    # Skip the scales of all earlier rows, 4 bytes per block.
    source = block * 256 + rank * blocks_per_row * 4
    if IS_WIDE:
        source = tl.multiple_of(source, 16)
    code = tl.load(rows + source[:, None] + column[None, :], mask=mask[:, None])
    # Counted in fp32, the codes of one block take the space of 64 scales.
    scale = tl.load(scales + (rank + 1) * blocks_per_row * 64 + block, mask=mask)
    value = code.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
    store_rounded(out + (block * 256)[:, None] + column[None, :], value, mask[:, None])
