"""Float64 oracle of the kernels: which results the stated numerics allow, computed without torch's arithmetic.

Every format's values are exact in float64, and so is the product of two fp32 values; only fp64 arithmetic has to
allow for the oracle's own rounding. Rounding to a format is done here by scaling to integers, not by casting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[np.float64]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PRECISION_AND_MIN_EXPONENT = {torch.float32: (24, -126), torch.bfloat16: (8, -126), torch.float16: (11, -14)}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The smallest and largest result allowed for each element; equal where the numerics leave no choice."""

    low: Values
    high: Values

    def assert_contains(self, result: torch.Tensor) -> None:
        values = exact(result)
        is_bad = ~((self.low <= values) & (values <= self.high))
        if is_bad.any():
            k = int(np.flatnonzero(is_bad)[0])
            raise AssertionError(
                f"{int(is_bad.sum())} of {values.size} {result.dtype} elements are wrong; the first is {k}: found "
                f"{values[k]!r}, wanted {self.low[k]!r} to {self.high[k]!r}"
            )


def exact(tensor: torch.Tensor) -> Values:
    """Return a tensor's values, flattened, without any rounding."""
    return tensor.detach().cpu().double().reshape(-1).numpy()


def allowed_cast(
    source: torch.Tensor, out_dtype: torch.dtype, scale: float, *, truncates_bf16: bool = False
) -> Allowed:
    """Return what ``cast(scale * source)`` may be: one value, or two neighbours with ``truncates_bf16``.

    ``truncates_bf16`` is for Triton's interpreter, which drops bits where the hardware rounds.
    """
    is_double = torch.float64 in (source.dtype, out_dtype)
    product = exact(source) * (scale if is_double else float(np.float32(scale)))
    computed = product if is_double else round_to(product, torch.float32)
    return _narrow(computed, computed, out_dtype, truncates_bf16)


def allowed_sum(source: torch.Tensor, before: torch.Tensor, scale: float, *, truncates_bf16: bool = False) -> Allowed:
    """Return what ``before + scale * source`` may be in ``before.dtype``, with or without a fused multiply-add."""
    is_double = torch.float64 in (source.dtype, before.dtype)
    product = exact(source) * (scale if is_double else float(np.float32(scale)))
    total = exact(before) + product
    # Half a unit in the last place for the sum, and as much for the product unless it is fused or scale is 1; twice
    # that in fp64, where the two lines above round as well. Below the normal range the unit is a constant.
    unit, tiny = (2.0**-52, 0.0) if is_double else (2.0**-24 * (1 + 2.0**-20), 2.0**-149)
    slack = unit * (np.abs(total) + (0.0 if scale == 1.0 else np.abs(product))) + tiny
    return _narrow(total - slack, total + slack, before.dtype, truncates_bf16)


def round_to(values: Values, dtype: torch.dtype, rounding: np.ufunc = np.rint) -> Values:
    """Round to the nearest value of a format, ties to even (or by ``np.floor``, ``np.ceil``); too large gives inf."""
    if dtype is torch.float64:
        return values
    precision, min_exponent = _PRECISION_AND_MIN_EXPONENT[dtype]
    _, exponent = np.frexp(values)
    quantum = np.maximum(exponent - precision, min_exponent - precision + 1)
    rounded: Values = np.ldexp(rounding(np.ldexp(values, -quantum)), quantum)
    rounded[np.abs(rounded) > torch.finfo(dtype).max] *= np.inf
    return rounded


def _narrow(low: Values, high: Values, dtype: torch.dtype, truncates_bf16: bool) -> Allowed:
    if dtype is torch.float64:
        return Allowed(low, high)
    # 16 bits are reached through fp32, also from fp64.
    low, high = round_to(low, torch.float32), round_to(high, torch.float32)
    if truncates_bf16 and dtype is torch.bfloat16:
        return Allowed(round_to(low, dtype, np.floor), round_to(high, dtype, np.ceil))
    return Allowed(round_to(low, dtype), round_to(high, dtype))
