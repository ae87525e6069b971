"""The dtypes that the ops compute with."""

from __future__ import annotations

import torch

FLOAT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
"""What the ops compute with; other dtypes can only be copied."""


def compute_dtype(source_dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype the arithmetic runs in: fp64 when either side is fp64, else fp32."""
    return torch.float64 if torch.float64 in (source_dtype, out_dtype) else torch.float32
