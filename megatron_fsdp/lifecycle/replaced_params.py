"""The original parameter after ``fully_shard``, which lists, closures and shadow copies may still reference.

The optimizer no longer trains this tensor: writes to it have no effect, and its values are outdated after the next
step. The object stays the same, and its class changes so that such uses raise.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.errors import StateError

__all__ = ["ReplacedParameter", "replace_original"]

# Attributes and functions that read no values, or that the engine and PyTorch's optimizers ask of any tensor.
_SILENT = frozenset(
    """size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex storage_offset
    untyped_storage data_ptr __hash__ get_device __len__ __repr__ __format__ __deepcopy__ __reduce_ex__ type zeros_like
    ones_like empty_like""".split()
)
_REFUSED = frozenset({"data", "grad", "requires_grad"})


class ReplacedParameter:
    """Mixed into the class of a trained parameter that a sharded one has replaced.

    Its values can be read until the sharded parameter changes. ``.data``, ``.grad`` and in-place changes raise at once,
    and so do ``clip_grad_norm_``, scaling and averaging over a list of such parameters.
    """

    _fsdp_words: str
    _fsdp_is_old: Callable[[], bool]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        accessor = name if name in ("__get__", "__set__", "__delete__") else ""
        if accessor:
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            is_refused = name in ("data", "grad") or (accessor != "__get__" and name in _REFUSED)
            is_read = name in ("T", "mT", "H", "mH", "real", "imag")
        else:
            written = _replaced(_written_by(name, args, kwargs or {}))
            is_refused = bool(written)
            is_read = name not in _SILENT
        is_refused = is_refused and not cls._is_harmless(accessor, name, args, kwargs or {})
        operands = _replaced((*args, *(kwargs or {}).values()))
        if is_refused or is_read:
            for each in operands:
                if is_refused or each._fsdp_is_old():
                    raise _error(each, name)
        with torch._C.DisableTorchFunctionSubclass():
            versions = [each._version for each in operands]
            result = func(*args, **(kwargs or {}))
            changed = [each for each, version in zip(operands, versions, strict=True) if each._version != version]
        if changed:
            # A Python function such as those of torch.nn.init changed it. The change has no effect on training.
            raise _error(changed[0], name)
        return result

    @classmethod
    def _is_harmless(cls, accessor: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a use that is refused of a trained parameter is right for one of this class."""
        return False


class ReplacedFrozenParameter(ReplacedParameter):
    """Mixed into the class of a frozen parameter that a sharded one has replaced.

    A module that is not sharded may go on using it, such as a teacher that shares its student's embedding. Only what
    would change the values, or train them, is refused.
    """

    @classmethod
    def _is_harmless(cls, accessor: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "grad":
            return accessor == "__get__" or args[-1] is None
        if name in ("requires_grad", "requires_grad_"):
            wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
            return not wanted
        if name == "data" and accessor == "__set__":
            # ``module.to(device)`` sets the values that were there, perhaps on another device.
            with torch._C.DisableTorchFunctionSubclass():
                old, new = args
                return bool(new.dtype is old.dtype and new.shape == old.shape and torch.equal(new.to(old.device), old))
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the class that the parameter had, which may be written and trained."""
        own: Any = self
        made: Any = torch.Tensor._make_subclass(type(self).__bases__[1], own.detach().clone(), False)
        memo[id(self)] = made
        return made


def replace_original(original: torch.Tensor, sharded: torch.Tensor, words: str) -> None:
    """Refuse uses of ``original`` that have no effect, and reads of it once ``sharded`` has been trained."""
    group = group_of_parameter(sharded)
    if group is None or type(original).__torch_function__ is not torch._C._disabled_torch_function_impl:
        return
    mixin = ReplacedParameter if original.requires_grad else ReplacedFrozenParameter
    original.__class__ = _class_of(mixin, type(original))
    is_old: Callable[[], bool] = functools.partial(_is_old, weakref.ref(group), _count_changes(group))
    if mixin is ReplacedFrozenParameter:
        is_old = functools.partial(_is_trained_and_old, weakref.ref(sharded), is_old)
    vars(original).update(_fsdp_words=words, _fsdp_is_old=is_old)


def _count_changes(group: ParameterGroup) -> int:
    group.freshness.notice_changes()
    return group.freshness.num_changes


def _is_old(reference: weakref.ref[ParameterGroup], before: int) -> bool:
    group = reference()
    return group is None or _count_changes(group) != before


def _is_trained_and_old(reference: weakref.ref[torch.Tensor], is_old: Callable[[], bool]) -> bool:
    # The number of changes is that of the whole group, whose other parameters may be trained.
    sharded = reference()
    return sharded is not None and sharded.requires_grad and is_old()


@functools.cache
def _class_of(mixin: type, kind: type) -> Any:
    return type(f"Replaced{kind.__name__}", (mixin, kind), {"__module__": __name__})


_DUNDERS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "setitem": "copy"}
_NO_WRITES = frozenset({"backward", "register_hook", "retain_grad"})
"""What changes no values of a tensor and has no effect on one that nobody trains."""


def _written_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a function writes to, by the schemas of PyTorch's operators of that name."""
    positions, names = _written_places(name)
    places = [args[position] for position in positions if position < len(args)]
    return [*places, *(kwargs[each] for each in names if each in kwargs), kwargs.get("out")]


@functools.cache
def _written_places(name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if name in _NO_WRITES:
        return (0,), ()
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2] if name == "__setitem__" else name[3:-2]
        name = f"{_DUNDERS.get(inner, inner)}_" if name[2] == "i" or inner == "setitem" else name
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    written = {
        (position, argument.name)
        for overload in overloads
        for position, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
    }
    return tuple(sorted({position for position, _ in written})), tuple(sorted({each for _, each in written}))


def _replaced(operands: Iterable[Any]) -> list[Any]:
    found = []
    for operand in operands:
        items = operand if isinstance(operand, (list, tuple)) else (operand,)
        found += [item for item in items if isinstance(item, ReplacedParameter)]
    return found


def _error(parameter: Any, name: str) -> StateError:
    return StateError(
        f"{parameter._fsdp_words}: {name} of the tensor that the parameter was before fully_shard, which a list, a "
        "closure or another module has kept (a list to clip or to average, a tied weight in a module "
        "that is not sharded, an optimizer). It "
        "gets no gradient, and a change of it has no effect. fix: read "
        "model.parameters() again after fully_shard, also for optimizers; call fully_shard on a module that holds "
        "all users of the parameter"
    )
