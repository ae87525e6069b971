"""``encode_row`` and ``decode_rows``: weights on the wire as int8 in blocks of 256 elements that share an fp32 scale.

A rank's shard travels as a row of bytes: its codes, one byte an element, then its scales. Nothing depends on where a
shard begins, as blocks are counted from the first element of the flat buffer and shards cut none.
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
# Elements that are in fp32 at once: a multiple of the block.
_CHUNK = 1 << 22


def row_bytes(numel: int) -> int:
    """Return the bytes of the codes and scales of ``numel`` elements, whole blocks."""
    return numel + 4 * numel // QUANT_BLOCK


@without_grad
def encode_row(values: Tensor, row: Tensor) -> None:
    """Write values over their block's scale, largest magnitude / 127, rounded to nearest even, and the scales.

    NaN and a scale of 0 give 0.

    Args:
        values: floating point, 1-D, whole blocks. row: uint8, ``row_bytes`` of them.
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
    """Write the values of the rows of all ranks, code times scale in fp32, rounded once to nearest even.

    Moves per element its code, its part of a scale and what is written, each once: 3.02 bytes into bf16.

    Args:
        rows: uint8, 1-D, one row after the other. shard_numel: elements of each. out: floating point, 1-D.
    Raises:
        ValueError: memory of another length.
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
        # Rows that begin anywhere else are read byte by byte.
        IS_WIDE=length % 16 == 0,
    )


def reference_decode(rows: Tensor, shard_numel: int, out: Tensor) -> None:
    """Do what ``decode_rows`` does, in chunks."""
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
    """Decode a tile of BLOCK // 256 blocks, each of which lies in one rank's row; ``scales``: the rows as fp32."""
    block = tl.program_id(0).to(tl.int64) * (BLOCK // 256) + tl.arange(0, BLOCK // 256)
    column = tl.arange(0, 256)
    mask = block < num_blocks
    rank = block // blocks_per_row
    # The scales of each row before come between.
    source = block * 256 + rank * blocks_per_row * 4
    if IS_WIDE:
        source = tl.multiple_of(source, 16)
    code = tl.load(rows + source[:, None] + column[None, :], mask=mask[:, None])
    # A row's codes take the room of 64 scales a block.
    scale = tl.load(scales + (rank + 1) * blocks_per_row * 64 + block, mask=mask)
    value = code.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]
    store_rounded(out + (block * 256)[:, None] + column[None, :], value, mask[:, None])
