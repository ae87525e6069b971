"""Exact norm: the norm of gradients with the same bits under any sharding, by a sum that no order changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from dbuffer.dtensor.reads import reduce_norm
from dbuffer.mesh import MeshAxis
from megatron_fsdp.errors import ConfigError

__all__ = ["exact_norm"]

# Bits of a limb: sums of 2 ** 40 of them fit 63 bits.
_BITS, _NUM_LIMBS = 22, 3
_CHUNK = 1 << 20


def exact_norm(
    spread: Sequence[tuple[Iterable[MeshAxis], list[torch.Tensor]]], order: float, device: torch.device
) -> torch.Tensor:
    """Return the norm of gradients, a 0-d FP32 tensor, equal to the last bit however they are sharded.

    Each power is rounded to 66 bits below the largest one, by itself, and summed as integers of three limbs.

    Args:
        spread: tensors, and the axes over whose ranks their elements are spread.
        order: 1, 2 or inf. device: of the collectives.
    """
    if order not in (1.0, 2.0, math.inf):
        raise ConfigError(
            f'clip_grad_norm_: norm_type={order} with MixedPrecisionPolicy(reduction="invariant"), which has norms '
            "that no sharding changes of the orders 1, 2 and inf. fix: give one of these"
        )
    largest = _largest(spread, device)
    if order == math.inf:
        return largest.float()
    exponent = torch.frexp(largest).exponent.double()
    limbs = torch.zeros(_NUM_LIMBS, dtype=torch.int64, device=device)
    for axes, tensors in spread:
        part = torch.zeros_like(limbs)
        for chunk in (chunk for tensor in tensors for chunk in tensor.detach().reshape(-1).split(_CHUNK)):
            part += _limbs(chunk.double() * torch.exp2(-exponent).to(chunk.device), order).to(device)
        for axis in axes:
            reduce_norm(part, axis, "sum", "the norm of all gradients")
        limbs += part
    weights = [2.0 ** (-_BITS * place) for place in range(1, _NUM_LIMBS + 1)]
    total = sum(
        (limb.double() * weight for limb, weight in zip(limbs, weights, strict=True)), torch.zeros_like(largest)
    )
    norm = (total.sqrt() if order == 2.0 else total) * torch.exp2(exponent)
    return norm.where(largest.isfinite(), largest).float()


def _largest(spread: Iterable[tuple[Iterable[MeshAxis], list[torch.Tensor]]], device: torch.device) -> torch.Tensor:
    """Return the largest magnitude in FP64. A NaN wins, because its bits are the largest."""
    largest = torch.zeros((), dtype=torch.int64, device=device)
    for axes, tensors in spread:
        bits = largest.clone()
        for tensor in tensors:
            if tensor.numel():
                found = torch.linalg.vector_norm(tensor.detach(), math.inf).double().abs().view(torch.int64)
                bits = torch.maximum(bits, found.to(device))
        for axis in axes:
            reduce_norm(bits, axis, "max", "the norm of all gradients")
        largest = torch.maximum(largest, bits)
    return largest.view(torch.float64)


def _limbs(scaled: torch.Tensor, order: float) -> torch.Tensor:
    """Return the sums of the limbs of powers of numbers below 1."""
    rest = scaled.square() if order == 2.0 else scaled.abs()
    found = []
    for _ in range(_NUM_LIMBS):
        rest = rest * 2.0**_BITS
        whole = rest.floor()
        found.append(whole.long().sum())
        rest = rest - whole
    return torch.stack(found)
