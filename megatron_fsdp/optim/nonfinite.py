"""NaN and infinity in gradients: find them by the global norm, which is equal on all ranks, and name the parameter."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dbuffer.collectives.all_reduce import reduce_numbers
from dbuffer.mesh import MeshAxis
from megatron_fsdp.engine.param_group import group_of_parameter
from megatron_fsdp.errors import ConfigError, NonfiniteGradientError
from megatron_fsdp.optim.local_parts import axes_of, local_of

__all__ = ["POLICIES", "Reading", "check_gradients", "check_policy", "may_step", "readings_of"]

POLICIES = ("ignore", "skip", "raise")
_LOG = logging.getLogger(__name__)
_INFINITE, _NAN = 1, 2


@dataclass(frozen=True, slots=True)
class Reading:
    """One parameter's gradient on this rank.

    Attributes:
        name: of the parameter, for messages. gradient: this rank's part; None for none.
        axes, device: the mesh axes over whose ranks gradients differ, and the device of collectives over them.
    """

    name: str
    gradient: torch.Tensor | None
    axes: tuple[MeshAxis, ...]
    device: torch.device


def check_gradients(model: nn.Module, norm: torch.Tensor, nonfinite: str = "raise") -> bool:
    """Return whether the optimizer may step with gradients of this norm. All ranks get the same answer.

    The host reads the norm. Only if it is not finite, one pass over the gradients finds the first parameter with such a
    gradient, in the order of ``model.named_parameters()``. All ranks must call this together.

    Args:
        model: the model whose gradients were measured.
        norm: the result of ``clip_grad_norm_``, which is equal on all ranks.
        nonfinite: the reaction to a norm that is NaN or infinite: "raise", "skip" (log a warning and return False) or
            "ignore".
    Returns:
        Whether to step. After False call ``optimizer.zero_grad()``, as after a step.
    Raises:
        NonfiniteGradientError: on every rank, for "raise"; names the first parameter.
        ConfigError: another ``nonfinite``.

    Example:
        norm = clip_grad_norm_(model, 1.0)
        if check_gradients(model, norm, "skip"):
            optimizer.step()
    """
    check_policy("check_gradients", nonfinite)
    return nonfinite == "ignore" or may_step(norm, nonfinite, lambda: readings_of(model))


def check_policy(what: str, nonfinite: str) -> None:
    """Refuse what is no policy."""
    if nonfinite not in POLICIES:
        raise ConfigError(
            f"{what}(nonfinite={nonfinite!r}) is unknown. fix: give one of {', '.join(map(repr, POLICIES))}"
        )


def may_step(norm: torch.Tensor, nonfinite: str, readings: Callable[[], Sequence[Reading]]) -> bool:
    """Return whether the norm is finite; otherwise warn or raise, with the name of the first parameter concerned.

    Args:
        readings: gives the gradients, in the same order on every rank; called only when they are needed.
    """
    value = norm.item()
    if math.isfinite(value):
        return True
    text = f"gradient norm {value}: {_describe(list(readings()))}"
    if nonfinite == "raise":
        raise NonfiniteGradientError(
            f"{text}. No weight was changed by this step. fix: look at the data of this step, or leave such steps out "
            'with nonfinite="skip"'
        )
    _LOG.warning("step skipped on all ranks: %s", text)
    return False


def readings_of(model: nn.Module) -> list[Reading]:
    """Return the gradients of a model's parameters in the order of their names."""
    groups = [group for _, parameter in model.named_parameters() if (group := group_of_parameter(parameter))]
    found = []
    for name, parameter in model.named_parameters():
        group, local = group_of_parameter(parameter), local_of(parameter.grad)
        if group is None:
            device = groups[0].spec.device if groups else parameter.device
            found.append(Reading(f"parameter {name!r}", local, axes_of(groups), device))
        else:
            buffer = group.main_weight if group.gradient_buffer is None else group.gradient_buffer.binding.final
            axes = tuple(group.spread_over(buffer.placements))
            found.append(Reading(f"parameter {name!r}", local, axes, group.spec.device))
    return found


def _describe(readings: Sequence[Reading]) -> str:
    # For each name, the worst kind of value on any rank.
    mine = ((reading.axes, _kind(reading.gradient, reading.device)) for reading in readings)
    kinds = map(int, reduce_numbers(mine, "max"))
    bad = [(reading.name, kind) for reading, kind in zip(readings, kinds, strict=True) if kind]
    if not bad:
        return "every element is finite, but the sum of their squares is not"
    name, kind = bad[0]
    others = f", and of {len(bad) - 1} more of {len(readings)}" if len(bad) > 1 else ""
    return f"{'NaN' if kind == _NAN else 'infinity'} in the gradient of {name}{others}"


def _kind(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if gradient is None or not gradient.numel():
        return torch.zeros((), dtype=torch.int64, device=device)
    kind = torch.maximum(_INFINITE * gradient.isinf().any().long(), _NAN * gradient.isnan().any().long())
    return kind.to(device)
