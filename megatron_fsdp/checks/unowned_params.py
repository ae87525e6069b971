"""Detect trained parameters in no unit, whose gradients are not reduced (``fully_shard`` not called on the root)."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp.build.ownership import is_ignored
from megatron_fsdp.engine.param_group import group_of_parameter
from megatron_fsdp.errors import StateError

__all__ = ["refuse_unowned", "refuse_unowned_steps"]

_CLEARED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters that were checked and are allowed, with True."""


def refuse_unowned_steps(optimizer: Optimizer) -> None:
    """Refuse a step of sharded parameters together with trained ones that no unit owns.

    Raises:
        StateError: as ``refuse_unowned``.
    """
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(_is_spread(parameter) for parameter in params):
        names = {
            id(parameter): name
            for group in optimizer.param_groups
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
        }
        refuse_unowned(params, f"{type(optimizer).__name__}.step()", names)


def refuse_unowned(params: Iterable[torch.Tensor], what: str, names: dict[int, str] | None = None) -> None:
    """Raise for plain parameters whose gradients are not averaged over ranks: the ranks' weights would diverge.

    Allowed are ``ignored_params``, parameters with a gradient hook, which may reduce it, and parameters of
    ``DistributedDataParallel`` or FSDP1.

    Args:
        params: that are trained together with sharded ones. what: the call, for the message. names: of some, by id.

    Raises:
        StateError: it names the parameters and the fix.
    """
    found = [one for one in params if _may_be_forgotten(one) and one not in _CLEARED]
    if not found:
        return
    # The search through all objects is made once for each parameter.
    objects = gc.get_objects()
    reduced = {
        id(parameter)
        for each in objects
        if issubclass(type(each), DistributedDataParallel)
        for parameter in vars(each).get("_module_parameters", ())
    }
    left = [one for one in found if id(one) not in reduced]
    for one in found:
        if id(one) in reduced:
            _CLEARED[one] = True
    if left:
        named = _names([each for each in objects if issubclass(type(each), nn.Module)], left, names or {})
        raise StateError(
            f"{what}: parameters {', '.join(map(repr, named))} are trained beside sharded ones and belong to no unit, "
            "so their gradients are those of this rank's data alone and the ranks' weights would drift apart. fix: "
            "call fully_shard(model) on the module around all units too, before the optimizer is made; there "
            "fsdp_no_shard(module) keeps parameters whole and averages their gradients, and ignored_params=[...] "
            "leaves alone those that you reduce yourself or that each rank trains for itself."
        )


def _is_spread(parameter: torch.Tensor) -> bool:
    group = group_of_parameter(parameter)
    return group is not None and math.prod(group.spec.mesh.shape) > 1


def _may_be_forgotten(parameter: torch.Tensor) -> bool:
    is_plain = isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor)
    if not is_plain or not parameter.requires_grad or parameter.grad is None or is_ignored(parameter):
        return False
    # Megatron's mark of parameters that are not replicated over data-parallel ranks; the marks of FSDP1 and DeepSpeed.
    marks = vars(parameter)
    if not marks.get("allreduce", True) or "_fsdp_flattened" in marks or "ds_id" in marks or "_fsdp_handle" in marks:
        return False
    return not (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _names(modules: Iterable[nn.Module], params: Iterable[torch.Tensor], names: dict[int, str]) -> list[str]:
    """Return the longest name that each parameter has in any module, the one from the outermost module."""
    wanted = {id(parameter): names.get(id(parameter), "") for parameter in params}
    shapes = {id(parameter): f"of shape {tuple(parameter.shape)}" for parameter in params}
    for module in modules:
        if "_parameters" not in vars(module):
            continue
        for name, parameter in module.named_parameters():
            if id(parameter) in wanted and id(parameter) not in names and len(name) > len(wanted[id(parameter)]):
                wanted[id(parameter)] = name
    return [name or shapes[key] for key, name in wanted.items()]
