"""Published block-wise dynamic quantization in numpy, one element at a time if affordable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dbuffer_kernels.dynamic_map import dynamic_map


@dataclass(frozen=True)
class Encoded:
    codes: Any
    scales: Any


def published_map(*, signed: bool) -> list[float]:
    """The definition of "8-bit Optimizers via Block-wise Quantization", app. F, with torch's own linspace."""
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1)
        middles = (10 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)).tolist()
        values += middles + ([-middle for middle in middles] if signed else [])
    return sorted(values)


def decoded(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    table = np.array(dynamic_map(signed=signed), dtype=np.float32)
    blocks = np.arange(codes.numel()) // 256
    return torch.from_numpy(table[codes.cpu().numpy()] * scales.cpu().numpy()[blocks]).to(codes.device)


def encoded(values: torch.Tensor, *, signed: bool) -> Encoded:
    """Find codes by looking at all 256 values.

    Unsigned maps encode only zero as zero. Scales are limited to the largest number, and to its root.
    """
    table = np.array(dynamic_map(signed=signed), dtype=np.float32)
    flat = values.cpu().numpy()
    codes, scales = [], []
    for start in range(0, len(flat), 256):
        block = flat[start : start + 256]
        scale = np.abs(block).max()
        scale = np.minimum(scale, np.float32(2.0**64) if signed else np.finfo(np.float32).max)
        scales.append(scale)
        ratios = np.zeros_like(block) if scale == 0 else np.clip((block / scale).astype(np.float32), -1, 1)
        # argmin returns the lower one of two equally near values.
        codes += [int(np.argmin(np.abs(table.astype(np.float64) - float(ratio)))) for ratio in ratios]
    if not signed:
        codes = [max(code, 1) if value > 0 else code for code, value in zip(codes, flat, strict=True)]
    return Encoded(np.array(codes, dtype=np.uint8), np.array(scales, dtype=np.float32))
