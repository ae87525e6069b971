"""Clipping of gradients that rest sharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
from torch import nn

from dbuffer.dtensor.reads import reduce_norm
from dbuffer.mesh import MeshAxis
from dbuffer.placements import BufferPlacement
from megatron_fsdp.checks.unowned_params import refuse_unowned
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.param_loops import grads_of
from megatron_fsdp.engine.params import own_rows
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.engine.unsharded_param import UnshardedParam
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.exact_norm import exact_norm
from megatron_fsdp.optim.local_parts import axes_of, local_of
from megatron_fsdp.optim.nonfinite import may_step, readings_of

__all__ = ["agreed_norm", "are_beside_plain", "by_axes", "clip_factor", "clip_grad_norm_", "total_norm"]

Each = TypeVar("Each")
# A CPU adds FP32 powers nearly in a row: the norm of thirty million random numbers at once is 0.2 % off.
_MAX_IN_A_ROW = 1 << 14
Spread = Collection[tuple[Iterable[MeshAxis], list[torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class HeldGradients:
    """Gradients of one group on this rank.

    Attributes:
        flat: their elements. placements: of the buffer that they lie in. scale: multiplies them, wherever they lie.
    """

    group: ParameterGroup
    flat: torch.Tensor
    placements: Sequence[BufferPlacement]
    scale: Callable[[torch.Tensor], None]


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of this norm are multiplied by: as in ``torch.nn.utils``, just below max_norm / norm."""
    # A norm that is not finite clips nothing: NaN times every gradient would hide where it came from.
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0).where(norm.isfinite(), 1.0)


def clip_grad_norm_(
    model: nn.Module, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients of a sharded model so that their global norm is at most ``max_norm``.

    This takes one pass over each flat gradient shard and one all-reduce of a scalar per distinct mesh. It includes and
    scales gradients that the user assigned to ``.grad``, and this rank's gradients of ``ignored_params``. If the model
    has any of these, another all-reduce takes the largest norm of all ranks.

    Args:
        model: a module with sharded modules in it, after the last microbatch's backward.
        max_norm: ``float("inf")`` only measures. Gradients with a NaN or infinite norm are not scaled, so that
            ``check_gradients`` can name them; ``AdamW(max_norm=)`` does the same.
        norm_type: above 0, ``float("inf")`` among them.
        error_if_nonfinite: raise where the norm is NaN or infinite; it is read on the host then.
    Returns:
        The norm before clipping, a 0-d FP32 tensor, equal on all ranks.
    Raises:
        ConfigError: another ``norm_type``, or something else than a model.
        StateError: gradients are not final because the last backward did not synchronize; another tensor is registered
            in the place of a parameter; or a trained parameter belongs to no unit.
        NonfiniteGradientError: on every rank, for ``error_if_nonfinite``; names the first parameter.

    Example:
        model(batch).square().mean().backward()
        norm = clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
    """
    order = float(norm_type)
    if not order > 0 or not isinstance(model, nn.Module):
        _refuse_norm(model, norm_type)
    units = list(units_below(model))
    for unit in units:
        unit.check_replaced_params()
    held = [each for unit in units for group in unit.groups for each in _held_by(group)]
    # The gradient of a currently gathered weight is among the group's gradients.
    own = [p for p in model.parameters() if group_of_parameter(p) is None and not isinstance(p, UnshardedParam)]
    trained = [p for p in own if p.grad is not None]
    if trained and any(group.spec.mesh.size() > 1 for unit in units for group in unit.groups):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        refuse_unowned(trained, "clip_grad_norm_", names)
    plain = [p.grad for p in trained if p.grad is not None]
    device = next((each.group.spec.device for each in held), plain[0].device if plain else torch.device("cpu"))
    spread = by_axes((each.group.spread_over(each.placements), each.flat) for each in held)
    is_invariant = any(each.group.spec.dtypes.reduction for each in held)
    norm = total_norm([*([((), plain)] if plain else ()), *spread], order, device, is_invariant=is_invariant)
    if own:
        # Although they may all be frozen here: other ranks may train them.
        norm = agreed_norm(norm, [group for unit in units for group in unit.groups])
    if error_if_nonfinite:
        may_step(norm, "raise", lambda: readings_of(model))
    if max_norm != math.inf:
        factor = clip_factor(norm, max_norm)
        for each in held:
            each.scale(factor)
        for tensor in plain:
            tensor.mul_(factor.to(tensor))
    return norm


def total_norm(spread: Spread, order: float, device: torch.device, *, is_invariant: bool) -> torch.Tensor:
    """Return the norm over all ranks of sharded gradients; ``is_invariant``: as ``exact_norm``, to the bit."""
    if is_invariant:
        return exact_norm(list(spread), order, device)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for axes, tensors in spread:
        subtotal = _combine([_power(tensor, order) for tensor in tensors], order).to(device)  # one copy, not many
        for axis in axes:
            reduce_norm(subtotal, axis, "max" if order == math.inf else "sum", "the norm of all gradients")
        total = _combine([total, subtotal], order)
    return total if order == math.inf else total.sqrt() if order == 2.0 else total.pow(1.0 / order)


def agreed_norm(norm: torch.Tensor, groups: Sequence[ParameterGroup]) -> torch.Tensor:
    """Return the largest norm of any rank; NaN if one rank has it.

    Gradients of plain parameters may differ between ranks, which have to clip and to skip alike.
    """
    # Positive numbers have the order of their bits, and those of NaN are the largest.
    bits = norm.to(groups[0].spec.compute_device if groups else norm.device, torch.float64).abs().view(torch.int64)
    for axis in axes_of(groups):
        reduce_norm(bits, axis, "max", "the norm of all gradients")
    return bits.view(torch.float64).to(norm)


def are_beside_plain(groups: Iterable[ParameterGroup]) -> bool:
    """Return whether a model of these groups has parameters in no unit, such as those of ``ignored_params``.

    Frozen ones count, because ranks may freeze different ones, and all of them have to take part in ``agreed_norm``.
    """
    modules = {group.module() for group in groups}
    roots = {unit.root for module in modules if module is not None for unit in units_below(module)}
    outermost = [root.outermost() for root in roots]
    return any(
        group_of_parameter(parameter) is None and not isinstance(parameter, UnshardedParam)
        for unit in outermost
        if unit is not None
        for module in (reference() for reference in unit.modules)
        if module is not None
        for parameter in module.parameters()
    )


def _power(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """Return the sum of powers (or the maximum) of one tensor, as a 0-d FP32 tensor (FP64 for FP64 gradients)."""
    dtype = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    if not gradient.numel():
        return torch.zeros((), dtype=dtype, device=gradient.device)
    norm: torch.Tensor
    if gradient.is_cpu and gradient.numel() > _MAX_IN_A_ROW:
        parts = torch._foreach_norm(gradient.reshape(-1).split(_MAX_IN_A_ROW), order, dtype=dtype)
        norm = torch.linalg.vector_norm(torch.stack(parts), order, dtype=torch.float64).to(dtype)
    else:
        norm = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return norm if order == math.inf else norm.square() if order == 2.0 else norm.pow(order)


def _combine(parts: list[torch.Tensor], order: float) -> torch.Tensor:
    widest = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    stacked = torch.stack([part.to(device=parts[0].device, dtype=widest) for part in parts])
    return stacked.amax() if order == math.inf else stacked.sum()


def by_axes(pairs: Iterable[tuple[Iterable[MeshAxis], Each]]) -> Collection[tuple[Iterable[MeshAxis], list[Each]]]:
    """Group the items by the mesh axes over which they are sharded."""
    split: dict[tuple[int, ...], tuple[Iterable[MeshAxis], list[Each]]] = {}
    for axes, each in pairs:
        split.setdefault(tuple(id(axis.gather_group) for axis in axes), (axes, []))[1].append(each)
    return split.values()


def _held_by(group: ParameterGroup) -> Iterable[HeldGradients]:
    """Return the gradients of a group, which must be final."""
    gradients = group.gradient_buffer
    if gradients is None:
        return _of_frozen(group)
    binding = gradients.binding
    is_partial = binding.sum is not None and binding.sum.is_in_main_grad
    if is_partial or gradients.is_filled:
        _refuse_pending(binding.name)
    final = binding.final_gradients()
    return [] if final is None else [HeldGradients(group, final.local_buffer, final.placements, binding.scale)]


def _of_frozen(group: ParameterGroup) -> Iterator[HeldGradients]:
    """Yield the gradients that the user put in ``.grad`` of a group that is frozen, which has no buffer for it."""
    for index, gradient in enumerate(grads_of(group.fsdp_params.sharded_params)):
        if gradient is not None:
            rows, placements = own_rows(group.fsdp_params, index, gradient), group.main_weight.placements
            yield HeldGradients(group, rows.reshape(-1), placements, functools.partial(_scale, gradient))


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    local = local_of(tensor)
    local.mul_(factor.to(local))


def _refuse_norm(model: object, norm_type: float) -> NoReturn:
    """Raise a ``ConfigError`` that says what ``clip_grad_norm_`` takes."""
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"clip_grad_norm_: norm_type={norm_type} is not supported. fix: give a number above 0, or inf"
        )
    raise ConfigError(
        f"clip_grad_norm_: found a {type(model).__name__}, wanted the model. fix: give the model itself, or "
        "its parameters to torch.nn.utils.clip_grad_norm_."
    )


def _refuse_pending(name: str) -> NoReturn:
    """Raise a ``StateError`` for the gradients of a unit that are still being summed up."""
    raise StateError(
        f"{name}: clip_grad_norm_ before gradients are final. fix: run the last microbatch's "
        "backward with synchronization (outside of no_sync, or after set_requires_gradient_sync(True))"
    )
