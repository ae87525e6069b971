"""Oracles for the kernels of an optimizer step: bits in Python's and numpy's integers, AdamW in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tests.unit.kernels.oracle import Values, exact

Bits = NDArray[np.int64]

LOW = 0xFFFFFFFF
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the bit patterns of fp32, bf16 or int16 values as integers from 0."""
    width = {2: (torch.int16, 0xFFFF), 4: (torch.int32, LOW)}[tensor.itemsize]
    patterns: Bits = tensor.detach().cpu().contiguous().view(width[0]).reshape(-1).numpy().astype(np.int64) & width[1]
    return patterns


def from_bits(patterns: Bits) -> torch.Tensor:
    """Return the fp32 values of bit patterns."""
    return torch.from_numpy(patterns.astype(np.uint32).view(np.int32).copy()).view(torch.float32)


def awkward_values() -> torch.Tensor:
    """Return fp32 values of every exponent and sign around every place where 16 bits round, and all kinds of NaN."""
    uppers = np.concatenate([np.arange(0, 0x10000, 37), np.arange(0x7F70, 0x7F90), np.arange(0xFF70, 0xFF90)])
    lowers = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns: Bits = np.unique((uppers[:, None] << 16) + lowers[None, :])
    return from_bits(patterns)


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of one AdamW step, with common values."""

    step: int = 3
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    maximize: bool = False


@dataclass(frozen=True)
class Stepped:
    """New values in float64, and how far single precision may be from them."""

    weight: Values
    exp_avg: Values
    exp_avg_sq: Values
    slack: dict[str, Values]

    def assert_near(self, name: str, found: torch.Tensor, *, truncates_bf16: bool = False) -> None:
        """Check one buffer; ``truncates_bf16`` is for Triton's interpreter, which drops bits instead of rounding."""
        wanted: Values = getattr(self, name.replace("model_", ""))
        unit = UNIT[found.dtype] * (2 if truncates_bf16 and found.dtype is torch.bfloat16 else 1)
        allowed = self.slack[name.replace("model_", "")] + unit * np.abs(wanted) * 1.01 + 1e-38
        worst = np.max(np.abs(exact(found) - wanted) / allowed, initial=0.0)
        assert worst <= 1.0, f"{name} ({found.dtype}) is off by {worst:.3g} times what rounding explains"


def step_of(
    gradient: Values, weight: Values, moments: tuple[Values, Values], how: Hyperparameters, clip: float = 1.0
) -> Stepped:
    """Take the step that Loshchilov and Hutter define, in float64."""
    beta1, beta2 = how.betas
    g = gradient * clip * (-1 if how.maximize else 1)
    m = beta1 * moments[0] + (1 - beta1) * g
    v = beta2 * moments[1] + (1 - beta2) * g * g
    denominator = np.sqrt(v) / math.sqrt(1 - beta2**how.step) + how.eps
    change = how.lr / (1 - beta1**how.step) * m / denominator
    w = weight * (1 - how.lr * how.weight_decay) - change
    unit = 4 * UNIT[torch.float32]
    m_slack = unit * (np.abs(moments[0]) + np.abs(g))
    lost = how.lr / (1 - beta1**how.step) * m_slack / denominator
    slack = {
        "exp_avg": m_slack,
        "exp_avg_sq": unit * (np.abs(moments[1]) + g * g),
        "weight": unit * (np.abs(weight) + 4 * np.abs(change)) + lost,
    }
    return Stepped(w, m, v, slack)


def checksum_of(source: torch.Tensor, key: int, first: int) -> int:
    """Sum each value's bits, with their sign, times two odd numbers, in integers without end."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    signed = source.cpu().view(widths[source.itemsize]).tolist()
    odd = functools.cache(_odd)
    return sum(bits * odd(e % 4096) * odd(key + e // 4096) for e, bits in enumerate(signed, first)) % 2**64


def _odd(number: int) -> int:
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31 | 1
