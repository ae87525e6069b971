"""Eight-bit weights for the wire: per-tensor FP8, MXFP8 with power-of-two scales, int8 in blocks. In plain torch.

FP8 is E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). MXFP8 is that of the OCP Microscaling Formats
specification 1.0: 32 elements share a scale 2 ** (e - 127), e in one byte, e = exponent of the largest magnitude - 8.
Nothing depends on where a shard begins: scales are those of whole tensors or of blocks that the caller lays out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dbuffer_kernels.dynamic_map import QUANT_BLOCK

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MX_BLOCK = 32
# Of the largest power of two that E4M3 holds: 2 ** 8 = 256.
_MX_EMAX = 8
_INT8_MAX = 127.0
RUNS = ("int8_block", "mxfp8")
"""Kinds whose blocks are elements that follow each other."""
CHUNK = 1 << 22
"""Elements that are in fp32 at once on their way into another dtype: a multiple of all blocks."""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """How a flat buffer of ``num_rows`` equal shards travels: each a row of codes, one byte an element, then scales.

    Attributes:
        kind: "fp8" (a scale per tensor, not in the rows), "int8_block" (fp32, 256 elements), "mxfp8" (E8M0, 32) or
            "mxfp8 columns" (E8M0, of 32 rows of a column; scale q of a tensor lies in the row of its element 32 q).
        shard_numel: a multiple of what shares a scale. tensors: first element, elements and width of each.
        tables: of the kernel, by device, made when it starts first.
    """

    kind: str
    shard_numel: int
    num_rows: int
    tensors: tuple[tuple[int, int, int], ...]
    tables: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, kind: str, shard_numel: int, num_rows: int, offsets: Sequence[int], shapes: Sequence[Sequence[int]]
    ) -> CodedRows:
        """Lay out tensors; blocks of a kind that needs no tensors run through the whole buffer."""
        if kind in RUNS:
            return cls(kind, shard_numel, num_rows, ((0, shard_numel * num_rows, 1),))
        found = [(offset, math.prod(shape), shape[-1]) for offset, shape in zip(offsets, shapes, strict=True)]
        return cls(kind, shard_numel, num_rows, tuple(found))

    @property
    def block(self) -> int:
        """Elements that share a scale; 0: a tensor's."""
        return {"fp8": 0, "int8_block": QUANT_BLOCK}.get(self.kind, MX_BLOCK)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return wire_bytes(self.kind, self.shard_numel)


def wire_bytes(kind: str, numel: int) -> int:
    """Return the bytes of the codes and scales of ``numel`` elements of a flat buffer."""
    scales = {"fp8": 0, "int8_block": 4 * numel // QUANT_BLOCK}
    return numel + scales.get(kind, numel // MX_BLOCK)


def scales_of(amax: Tensor, kind: str) -> Tensor:
    """Return the scales of blocks with these largest magnitudes (fp32, not negative).

    FP8: fp32, 448 / largest, 1 where that is 0. int8: fp32, largest / 127. MXFP8: E8M0 bytes, 255 is NaN.
    """
    if kind == "fp8":
        return torch.where(amax > 0, FP8_MAX / amax, torch.ones_like(amax))
    if kind == "int8_block":
        return amax / _INT8_MAX
    biased = (amax.contiguous().view(torch.int32) >> 23) & 0xFF
    found = (biased - _MX_EMAX).clamp(min=0)
    return torch.where(biased == 0xFF, 0xFF, found).to(torch.uint8)


def encode(values: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Return bytes: values over scales (FP8: times), rounded to nearest even and saturated; ``scales`` broadcasts.

    E4M3, or integers from -127 to 127, where NaN and a scale of 0 give 0.
    """
    values = values.float()
    if kind == "int8_block":
        ratios = values / scales.masked_fill(scales == 0, 1.0)
        return ratios.nan_to_num(nan=0.0).clamp(-_INT8_MAX, _INT8_MAX).round().to(torch.int8).view(torch.uint8)
    ratios = values * scales if kind == "fp8" else values / _mx_scales(scales)
    return ratios.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def _mx_scales(exponents: Tensor) -> Tensor:
    """Return the fp32 scales of E8M0 bytes."""
    # The exponent's bits are the byte itself; 2 ** -127 is subnormal, and 255 is a NaN with a bit of mantissa.
    bits = exponents.to(torch.int32) << 23
    return torch.where((exponents == 0) | (exponents == 0xFF), bits | 0x400000, bits).view(torch.float32)


def reference_decode(rows: Tensor, layout: CodedRows, scales: Tensor | None, out: Tensor) -> None:
    """Do what the op of this name says, in chunks."""
    rows = rows.view(layout.num_rows, layout.row_bytes)
    codes, block, is_int8 = rows[:, : layout.shard_numel].reshape(-1), layout.block or 1, layout.kind == "int8_block"
    codes = codes.view(torch.int8 if is_int8 else FP8)
    if scales is None:
        scales = rows[:, layout.shard_numel :].reshape(-1)
        scales = scales.view(torch.float32) if is_int8 else _mx_scales(scales)
    for index, (offset, numel, width) in enumerate(layout.tensors):
        step = max(CHUNK // (block * width), 1) * block * width
        for start in range(offset, offset + numel, step):
            stop = min(start + step, offset + numel)
            values = codes[start:stop].float()
            if layout.kind == "fp8":
                values = values / scales[index]
            else:
                values = values.view(-1, block, width) * scales[start // block : stop // block].view(-1, 1, width)
            out[start:stop].copy_(values.view(-1))
