"""Optimizers over sharded parameters, and the gradient norm over all of them."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dbuffer.collectives import all_reduce
from dbuffer.mesh import MeshAxis
from dbuffer.placements import BufferPlacement
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.grad_attribute import grads_of
from megatron_fsdp.module import units_below
from megatron_fsdp.nonfinite import clip_factor, may_step, readings_of
from megatron_fsdp.optimizer_fresh_state import show_fresh_state
from megatron_fsdp.optimizer_state import lay_out_loaded_state, parameters_of, refuse_split_weights
from megatron_fsdp.parameter_group import ParameterGroup, group_of_parameter, refreshes_itself

__all__ = ["clip_grad_norm_", "fully_shard_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def fully_shard_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Refresh the compute weights in one pass right after every ``optimizer.step()``, instead of at the next forward.

    The optimizer may be any ``torch.optim.Optimizer`` over ``model.parameters()`` of sharded modules; its param
    groups are kept. Without this
    call training is as correct: the next forward sees that main weights changed.

    The state dict of an optimizer that has not stepped shows its state, of zeros, as Megatron-FSDP's does, so that
    ``torch.distributed.checkpoint.load`` reads a checkpoint into it; ``load_state_dict`` takes it over if it did.

    Raises:
        ConfigError: the optimizer has no sharded parameter; it was probably built before ``fully_shard``. Or it has
            weights that are split (``MixedPrecisionPolicy.split_main_params``), which ``AdamW`` alone steps.
    """
    refuse_split_weights(optimizer)
    groups: dict[int, weakref.ref[ParameterGroup]] = {}
    for parameter in parameters_of(optimizer):
        group = group_of_parameter(parameter)
        if group is not None:
            groups[id(group)] = weakref.ref(group)
    if not groups:
        raise ConfigError(
            "fully_shard_optimizer: none of the optimizer's parameters is sharded. Build the optimizer after "
            "fully_shard, from model.parameters()."
        )
    references = list(groups.values())
    refreshes_itself(optimizer)
    show_fresh_state(optimizer)
    optimizer.register_load_state_dict_post_hook(lay_out_loaded_state)
    optimizer.register_step_pre_hook(functools.partial(_before_step, references))
    optimizer.register_step_post_hook(functools.partial(_after_step, references))
    return optimizer


def _before_step(references: Iterable[weakref.ref[ParameterGroup]], optimizer: Optimizer, *_: Any) -> None:
    if getattr(optimizer, "steps_split_weights", False):
        # The flat AdamW reads gradients of any dtype, and those of split weights may be wider than the parameters.
        return
    for reference in references:
        group = reference()
        if group is not None and group.gradients is not None:
            group.gradients.match_parameter_dtype()


def _after_step(references: Iterable[weakref.ref[ParameterGroup]], *_: Any) -> None:
    for reference in references:
        group = reference()
        if group is not None:
            if group.gradients is not None:
                group.gradients.restore_dtype()
            group.catch_up()


def clip_grad_norm_(
    model: nn.Module, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients of a sharded model so that their global norm is at most ``max_norm``.

    One pass over each flat gradient shard and one all-reduce of a scalar per distinct mesh, whatever the number of
    parameters. Gradients that the user put in ``.grad`` count and are scaled as those that backward made. Parameters
    that are not sharded (ignored ones) are taken in as they are on this rank.

    Args:
        model: a module with sharded modules in it, after the last microbatch's backward.
        max_norm: ``float("inf")`` only measures. Gradients whose norm is NaN or infinite are left as they are, for
            ``check_gradients`` to say which are concerned; ``AdamW(max_norm=)`` does the same.
        norm_type: above 0, ``float("inf")`` among them.
        error_if_nonfinite: raise where the norm is NaN or infinite; it is read on the host then.
    Returns:
        The norm before clipping, a 0-d FP32 tensor, equal on all ranks.
    Raises:
        ConfigError: another ``norm_type``.
        StateError: gradients are not final: the last backward did not synchronize; or something else is registered in
            the place of a parameter.
        NonfiniteGradientError: on every rank, for ``error_if_nonfinite``; names the first parameter.
    """
    order = float(norm_type)
    if not order > 0:
        raise ConfigError(f"clip_grad_norm_: norm_type={norm_type}; supported are numbers above 0, and inf")
    for unit in units_below(model):
        unit.settle_strangers()
    settled = [held for unit in units_below(model) for group in unit.groups for held in _held_by(group)]
    plain = [p.grad for p in model.parameters() if p.grad is not None and group_of_parameter(p) is None]
    device = next((held.group.spec.device for held in settled), plain[0].device if plain else torch.device("cpu"))
    total = _combine([_partial_norm(tensor, order) for tensor in plain], order, device)
    for axes, same_axes in _by_axes(settled):
        subtotal = _combine([_partial_norm(held.flat, order) for held in same_axes], order, device)
        for axis in axes:
            all_reduce(subtotal, axis, "max" if order == math.inf else "sum")
        total = _combine([total, subtotal], order, device)
    norm: torch.Tensor = total
    if order != math.inf:
        norm = total.sqrt() if order == 2.0 else total.pow(1.0 / order)
    if error_if_nonfinite:
        may_step(norm, "raise", lambda: readings_of(model))
    if max_norm != math.inf:
        factor = clip_factor(norm, max_norm)
        for held in settled:
            held.scale(factor)
        for tensor in plain:
            tensor.mul_(factor.to(tensor))
    return norm


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
    """Yield the gradients of a group.

    Raises:
        StateError: they are not final.
    """
    gradients = group.gradients
    if gradients is not None:
        if gradients.is_partial or gradients.is_filled:
            raise StateError(
                f"{gradients.name}: clip_grad_norm_ before gradients are final; run the last microbatch's backward "
                "with synchronization (outside of no_sync, or after set_requires_gradient_sync(True))"
            )
        final = gradients.settled()
        if final is not None:
            yield _Held(group, final.local_buffer, final.placements, gradients.scale)
        return
    # A frozen group has no buffer for what the user puts in .grad.
    for index, gradient in enumerate(grads_of(group.faces.sharded)):
        if gradient is not None:
            rows = group.faces.own_rows(index, gradient)
            yield _Held(group, rows.reshape(-1), group.main_weight.placements, functools.partial(_scale, gradient))


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.mul_(factor.to(local))


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


def _by_axes(settled: Iterable[_Held]) -> Iterable[tuple[list[MeshAxis], list[_Held]]]:
    """Split gradients by the axes over whose ranks their elements are spread."""
    split: dict[tuple[int, ...], tuple[list[MeshAxis], list[_Held]]] = {}
    for held in settled:
        axes = held.group.spread_over(held.placements)
        split.setdefault(tuple(id(axis.gather_group) for axis in axes), (axes, []))[1].append(held)
    return split.values()
