"""Optimizers over sharded parameters, and the gradient norm over all of them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from dbuffer import DBuffer
from dbuffer.collectives import all_reduce
from dbuffer.mesh import MeshAxis
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.module import units_below
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


def clip_grad_norm_(model: nn.Module, max_norm: float, *, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of a sharded model so that their global norm is at most ``max_norm``.

    One pass over each flat gradient shard and one all-reduce of a scalar per distinct mesh, whatever the number of
    parameters. Parameters that are not sharded (ignored ones) are taken in as they are on this rank.

    Args:
        model: a module with sharded modules in it, after the last microbatch's backward.
        max_norm: ``float("inf")`` only measures. Gradients whose norm is NaN or infinite are left as they are, for
            ``check_gradients`` to say which are concerned.
        norm_type: 2.0 or ``float("inf")``.
    Returns:
        The norm before clipping, a 0-d FP32 tensor, equal on all ranks.
    Raises:
        ConfigError: another ``norm_type``.
    """
    if norm_type not in (2.0, float("inf")):
        raise ConfigError(f"clip_grad_norm_: norm_type={norm_type}; supported are 2.0 and inf")
    settled = [
        (group, buffer)
        for unit in units_below(model)
        for group in unit.groups
        if group.gradients is not None and (buffer := group.gradients.settled()) is not None
    ]
    gradients = [buffer for _, buffer in settled]
    plain = [p.grad for p in model.parameters() if p.grad is not None and group_of_parameter(p) is None]
    device = next((group.spec.device for group, _ in settled), plain[0].device if plain else torch.device("cpu"))
    total = _combine([_partial_norm(tensor, norm_type) for tensor in plain], norm_type, device)
    for axes, same_axes in _by_axes(settled):
        subtotal = _combine([_partial_norm(buffer.local_buffer, norm_type) for buffer in same_axes], norm_type, device)
        for axis in axes:
            all_reduce(subtotal, axis, "sum" if norm_type == 2.0 else "max")
        total = _combine([total, subtotal], norm_type, device)
    norm: torch.Tensor = total.sqrt() if norm_type == 2.0 else total
    if max_norm != float("inf"):
        # The factor of torch.nn.utils.clip_grad_norm_: just below max_norm / norm, never above 1. But NaN times every
        # gradient would hide where it came from.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).where(norm.isfinite(), 1.0)
        for tensor in [*(buffer.local_buffer for buffer in gradients), *plain]:
            tensor.mul_(factor.to(device=tensor.device, dtype=tensor.dtype))
    return norm


def _partial_norm(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the sum of squares (or the maximum) of one tensor, as a 0-d FP32 tensor (FP64 for FP64 gradients)."""
    if not gradient.numel():
        return torch.zeros((), dtype=torch.float32, device=gradient.device)
    dtype = torch.float64 if gradient.dtype is torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return norm.square() if norm_type == 2.0 else norm


def _combine(parts: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=device)
    widest = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    stacked = torch.stack([part.to(device=device, dtype=widest) for part in parts])
    return stacked.sum() if norm_type == 2.0 else stacked.amax()


def _by_axes(settled: Iterable[tuple[ParameterGroup, DBuffer]]) -> Iterable[tuple[list[MeshAxis], list[DBuffer]]]:
    """Split gradients by the axes over whose ranks their elements are spread."""
    split: dict[tuple[int, ...], tuple[list[MeshAxis], list[DBuffer]]] = {}
    for group, buffer in settled:
        axes = group.spread_over(buffer.placements)
        split.setdefault(tuple(id(axis.gather_group) for axis in axes), (axes, []))[1].append(buffer)
    return split.values()
