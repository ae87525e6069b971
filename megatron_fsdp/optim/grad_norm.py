"""Clipping of gradients that rest sharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer.collectives import all_reduce
from dbuffer.mesh import MeshAxis
from dbuffer.placements import BufferPlacement
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.exact_norm import exact_norm
from megatron_fsdp.optim.nonfinite import may_step, readings_of
from megatron_fsdp.runtime.step.fsdp_params import grads_of
from megatron_fsdp.runtime.step.grad_state import GradState
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter
from megatron_fsdp.runtime.step.unit import units_below
from megatron_fsdp.runtime.weights.param_layout import own_rows

__all__ = ["by_axes", "clip_factor", "clip_grad_norm_"]

Each = TypeVar("Each")


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of this norm are multiplied by, that of ``torch.nn.utils.clip_grad_norm_``.

    It is just below max_norm / norm, never above 1. But a norm that is not finite clips nothing: NaN times every
    gradient would make every weight NaN, and hide where it came from.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0).where(norm.isfinite(), 1.0)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients of a sharded model so that their global norm is at most ``max_norm``.

    One pass over each flat gradient shard and one all-reduce of a scalar per distinct mesh. Gradients that the user put
    in ``.grad`` count and are scaled as well. Parameters that are not sharded are taken in as they are on this rank.

    Args:
        model: a module with sharded modules in it, after the last microbatch's backward.
        max_norm: ``float("inf")`` only measures. Gradients whose norm is NaN or infinite are left as they are, for
            ``check_gradients`` to say which are concerned; ``AdamW(max_norm=)`` does the same.
        norm_type: above 0, ``float("inf")`` among them.
        error_if_nonfinite: raise where the norm is NaN or infinite; it is read on the host then.
    Returns:
        The norm before clipping, a 0-d FP32 tensor, equal on all ranks.
    Raises:
        ConfigError: another ``norm_type``, or something else than a model.
        StateError: gradients are not final: the last backward did not synchronize; or something else is registered in
            the place of a parameter.
        NonfiniteGradientError: on every rank, for ``error_if_nonfinite``; names the first parameter.

    Example:
        model(batch).square().mean().backward()
        norm = clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
    """
    order = _checked_order(model, norm_type)
    for unit in units_below(model):
        unit.schedule.settle_replaced_params(unit)
    settled = [held for unit in units_below(model) for group in unit.groups for held in _held_by(group)]
    plain = [p.grad for p in model.parameters() if p.grad is not None and group_of_parameter(p) is None]
    device = next((held.group.spec.device for held in settled), plain[0].device if plain else torch.device("cpu"))
    spread = by_axes((held.group.spread_over(held.placements), held.flat) for held in settled)
    measure = exact_norm if any(held.group.spec.dtypes.reduction for held in settled) else _norm
    norm = measure([((), plain), *spread], order, device)
    if error_if_nonfinite:
        may_step(norm, "raise", lambda: readings_of(model))
    if max_norm != math.inf:
        factor = clip_factor(norm, max_norm)
        for held in settled:
            held.scale(factor)
        for tensor in plain:
            tensor.mul_(factor.to(tensor))
    return norm


def _checked_order(model: nn.Module, norm_type: float) -> float:
    order = float(norm_type)
    if not order > 0:
        raise ConfigError(f"clip_grad_norm_: norm_type={norm_type}; supported are numbers above 0, and inf")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"clip_grad_norm_: found a {type(model).__name__}, wanted the model. Give the model itself, or its "
            "parameters to torch.nn.utils.clip_grad_norm_."
        )
    return order


def _norm(
    spread: Sequence[tuple[Iterable[MeshAxis], list[torch.Tensor]]], order: float, device: torch.device
) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float32, device=device)
    for axes, tensors in spread:
        subtotal = _combine([_partial_norm(tensor, order) for tensor in tensors], order, device)
        for axis in axes:
            all_reduce(subtotal, axis, "max" if order == math.inf else "sum")
        total = _combine([total, subtotal], order, device)
    if order == math.inf:
        return total
    return total.sqrt() if order == 2.0 else total.pow(1.0 / order)


def _partial_norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """Return the sum of powers (or the maximum) of one tensor, as a 0-d FP32 tensor (FP64 for FP64 gradients)."""
    if not gradient.numel():
        return torch.zeros((), dtype=torch.float32, device=gradient.device)
    dtype = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    if order == math.inf:
        return norm
    return norm.square() if order == 2.0 else norm.pow(order)


def _combine(parts: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=device)
    widest = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    stacked = torch.stack([part.to(device=device, dtype=widest) for part in parts])
    return stacked.amax() if order == math.inf else stacked.sum()


def by_axes(pairs: Iterable[tuple[Iterable[MeshAxis], Each]]) -> Collection[tuple[Iterable[MeshAxis], list[Each]]]:
    """Bring together what is spread over the ranks of the same axes."""
    split: dict[tuple[int, ...], tuple[Iterable[MeshAxis], list[Each]]] = {}
    for axes, each in pairs:
        split.setdefault(tuple(id(axis.gather_group) for axis in axes), (axes, []))[1].append(each)
    return split.values()


@dataclass(frozen=True, slots=True)
class _Held:
    """Gradients of one group on this rank.

    Attributes:
        flat: their elements. placements: of the buffer that they lie in. scale: multiplies them, wherever they lie.
    """

    group: ParameterGroup
    flat: torch.Tensor
    placements: Sequence[BufferPlacement]
    scale: Callable[[torch.Tensor], None]


def _held_by(group: ParameterGroup) -> Iterator[_Held]:
    """Yield the gradients of a group, which must be final."""
    gradients = group.gradients
    if gradients is not None:
        binding = gradients.binding
        if binding.state is GradState.PARTIAL or gradients.is_filled:
            raise StateError(
                f"{binding.name}: clip_grad_norm_ before gradients are final; run the last microbatch's backward "
                "with synchronization (outside of no_sync, or after set_requires_gradient_sync(True))"
            )
        final = binding.settled()
        if final is not None:
            yield _Held(group, final.local_buffer, final.placements, binding.scale)
        return
    # A frozen group has no buffer for what the user puts in .grad.
    for index, gradient in enumerate(grads_of(group.fsdp_params.sharded_params)):
        if gradient is not None:
            rows = own_rows(group.fsdp_params, index, gradient)
            yield _Held(group, rows.reshape(-1), group.main_weight.placements, functools.partial(_scale, gradient))


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.mul_(factor.to(local))
