"""FsdpModule: what a module becomes, and the hooks by which the runtime sees it run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from megatron_fsdp.errors import StateError
from megatron_fsdp.parameter_group import ParameterGroup, group_of_parameter, is_laid_out_like
from megatron_fsdp.precision import caster
from megatron_fsdp.unit import Unit

__all__ = ["FsdpModule", "UnshardHandle", "convert", "unit_of", "units_below"]

T = TypeVar("T")


class UnshardHandle:
    """Returned by ``FsdpModule.unshard(async_op=True)``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Make compute wait for the gather; the module's parameters are plain tensors afterwards."""
        unit, self._unit = self._unit, None
        if unit is not None:
            for group in unit.groups:
                group.finish_gather()


class FsdpModule:
    """Mixed into the class of every module given to ``fully_shard``: ``FSDP<Class>`` is a subclass of both."""

    _fsdp_unit: Unit

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The parameter groups of this unit; those of nested units are not among them."""
        return unit_of(self).groups

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's weights (not those of nested units).

        Args:
            async_op: return a handle at once; the weights may be used after its ``wait()``.
        """
        unit = unit_of(self)
        for group in unit.groups:
            group.start_gather()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release this unit's gathered weights; its parameters are sharded DTensors again."""
        for group in unit_of(self).groups:
            group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: the next backwards keep gradients on this rank, unreduced. The first one with True reduces the sum."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: the next backwards leave axes on which gradients rest partial (the outer one of HSDP) unreduced."""
        for unit in self._units(recurse):
            unit.schedule.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last microbatch of an optimizer step."""
        unit_of(self).schedule.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether weights are released after forward and gathered again for backward."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False keeps weights gathered after backward, so the next microbatch's forward needs no gather."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FsdpModule]) -> None:
        """Gather these units when this one's forward starts, instead of the one that followed last time."""
        unit_of(self).forward_prefetch = [unit_of(module).reference for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[FsdpModule]) -> None:
        """Gather these units when this one's backward starts, instead of the one that came before in forward."""
        unit_of(self).backward_prefetch = [unit_of(module).reference for module in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of by the number of data-parallel ranks."""
        for buffer in unit_of(self).gradients:
            buffer.divisor = float(factor)

    def _units(self, recurse: bool) -> Iterator[Unit]:
        return units_below(self) if recurse else iter((unit_of(self),))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # The module's own parameters stay in their buffers; everything else is handled as in any module.
        groups = unit_of(self).groups
        for group in groups:
            group.reshard()
            group.hide()
        try:
            result = super()._apply(fn, recurse)  # type: ignore[misc]
            for group in groups:
                group.apply(fn)
        finally:
            for group in groups:
                group.show()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise StateError(
            f"{type(self).__name__} cannot be deep-copied: its parameters are views of buffers shared by the unit. "
            "Build a second model, fully_shard it, and load_state_dict(model.state_dict()) into it."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            f"{type(self).__name__} cannot be pickled: it holds process groups. Save its state instead: "
            "save_checkpoint, torch.distributed.checkpoint or state_dict()."
        )


def unit_of(module: object) -> Unit:
    """Return the unit of an ``FsdpModule``.

    Raises:
        StateError: ``fully_shard`` was not called on it.
    """
    unit = getattr(module, "_fsdp_unit", None)
    if not isinstance(unit, Unit):
        raise StateError(f"{type(module).__name__} is not sharded; call fully_shard on it first")
    return unit


def units_below(module: object) -> Iterator[Unit]:
    """Yield the units of a module and of all modules in it, each once, in registration order."""
    assert isinstance(module, nn.Module)
    seen: set[int] = set()
    for child in module.modules():
        if isinstance(child, FsdpModule) and id(child._fsdp_unit) not in seen:
            seen.add(id(child._fsdp_unit))
            yield child._fsdp_unit


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FsdpModule, cls), {"__module__": cls.__module__})


def convert(modules: Iterable[nn.Module], unit: Unit) -> None:
    """Make the modules ``FsdpModule``s of ``unit`` and install the hooks."""
    for module in modules:
        module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]  # classes are hashable
        module._fsdp_unit = unit  # type: ignore[assignment]  # not a submodule or tensor: lands in the instance dictionary
        module.register_forward_pre_hook(functools.partial(_before_forward, unit), prepend=True, with_kwargs=True)
        # Also called, with None for the output, when forward raised: parameters must not stay gathered then.
        module.register_forward_hook(functools.partial(_after_forward, unit), always_call=True)
        module.register_state_dict_pre_hook(functools.partial(_before_state_dict, unit))
        module.register_load_state_dict_pre_hook(functools.partial(_before_load_state_dict, unit))
        module.register_load_state_dict_post_hook(functools.partial(_after_load_state_dict, unit))


def _before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    unit.schedule.before_forward(unit, module)
    policy = unit.policy
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        cast = caster(policy.param_dtype)
        return cast(args), cast(kwargs)
    return None


def _after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if unit.policy.output_dtype is not None:
        output = caster(unit.policy.output_dtype)(output)
    unit.schedule.after_forward(unit, module, output)
    return output


def _before_state_dict(unit: Unit, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for group in unit.groups:
        group.reshard()


def _before_load_state_dict(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for below in units_below(module):
        for group in below.groups:
            group.reshard()
    # Whole tensors, and DTensors that torch.distributed.tensor cut, are brought into the rows of each rank.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value, owner = state_dict.get(prefix + name), group_of_parameter(parameter)
        if owner is None or not isinstance(value, torch.Tensor) or is_laid_out_like(value, parameter):
            continue
        if value.shape == parameter.shape:
            state_dict[prefix + name] = owner.laid_out(parameter, value)


def _after_load_state_dict(unit: Unit, *_: Any) -> None:
    for group in unit.groups:
        group.readopt()
