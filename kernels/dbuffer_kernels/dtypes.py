"""The dtypes that the ops compute with, and what is said of tensors that they cannot write."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

FLOAT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""What the ops compute with; other dtypes can only be copied."""


def compute_dtype(source_dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype the arithmetic runs in: fp64 when either side is fp64, else fp32."""
    return torch.float64 if torch.float64 in (source_dtype, out_dtype) else torch.float32


def refuse_pair(op: str, source: Tensor, out: Tensor) -> NoReturn:
    """Raise a ValueError that says why ``op`` cannot write ``source`` to ``out``."""
    if source.numel() != out.numel():
        raise ValueError(
            f"{op}: source has {source.numel()} elements {tuple(source.shape)}, out has {out.numel()} "
            f"{tuple(out.shape)}; wanted the same number. Pass the slice of out that belongs to this source."
        )
    if not out.is_contiguous():
        raise ValueError(
            f"{op}: out of shape {tuple(out.shape)} has strides {out.stride()}; wanted contiguous memory. Pass a view "
            "of the flat buffer, or write to a contiguous tensor and copy it over."
        )
    raise ValueError(f"{op}: source is on {source.device}, out on {out.device}; wanted one device. Move source.")


def refuse_dtypes(op: str, source_dtype: torch.dtype, out_dtype: torch.dtype) -> NoReturn:
    """Raise a ValueError that says between which dtypes ``op`` computes."""
    raise ValueError(
        f"{op}: cannot compute from {source_dtype} to {out_dtype}; wanted float32, bfloat16, float16 or float64 on "
        "both sides (other dtypes can only be copied: equal dtypes, scale 1). Convert source first."
    )
