"""UnshardedParam: the parameter that compute uses between ``unshard`` and ``reshard``.

Every rank has a copy, which ``reshard`` releases. An in-place change would be lost, or differ from rank to rank, so it
raises (docs/design/freshness.md).

The object lives as long as its group, and its class says its state. A ``GatheredWeight`` has memory; reading it costs
as much as reading an ``nn.Parameter``. A ``ReleasedWeight`` has none, and every read raises, because PyTorch would end
the process (docs/design/storage.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor

from dbuffer import StorageError
from dbuffer.dtensor.placed_tensor import REQUIRES_GRAD_WRITES
from megatron_fsdp.engine.params import WeightHandle, handle_of, laid_out
from megatron_fsdp.errors import StateError

__all__ = [
    "KINDS",
    "GatheredWeight",
    "ReleasedWeight",
    "UnshardedParam",
    "refuse_change",
]


def refuse_change(weights: Sequence[torch.Tensor]) -> NoReturn:
    """Raise the error for an in-place change of one of ``weights``, found by Python or by ``reshard``.

    Raises:
        StateError: always.
    """
    # All weights of a buffer share one version counter. Name only those whose .data was read, if any: the change was
    # made through one of them.
    taken = [weight for weight in weights if getattr(weight, "_fsdp_data_taken", False)]
    first, *others = [handle_of(weight) for weight in taken or weights]
    names = "".join(f" or {handle.parameter!r}" for handle in others)
    raise StateError(
        f"{first.words}{names} was changed in place while it was gathered. Each rank would change a copy of its own, "
        "which the unit drops when it reshards. Change the sharded parameter instead, outside of forward and backward: "
        "after optimizer.step(), under torch.no_grad(); weights that a forward has to change belong into a buffer. "
        "fix: for a change that all ranks make alike, megatron_fsdp.unsharded(model, writeback=True)"
    )


def _counting(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of a parameter, which also counts a write of ``requires_grad``."""

    def count(self: Any, *args: Any, **options: Any) -> Any:
        REQUIRES_GRAD_WRITES.number += 1
        return getattr(super(UnshardedParam, self), name)(*args, **options)

    count.__name__ = name
    return count


_OF_SHARDS = ("main_grad", "main_param", "decoupled_grad")
"""Attributes of sharded parameters that have the shard's shape."""


class UnshardedParam(nn.Parameter):
    """A plain parameter over gathered weights; attributes that users set on it are set on the sharded parameter."""

    _fsdp_handle: WeightHandle
    _fsdp_data_taken = False

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # of torch
        return f"Parameter containing:\n{self.detach()!r}"

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "requires_grad":
            REQUIRES_GRAD_WRITES.number += 1
        is_own = name.startswith("_fsdp_") or name in _OF_SHARDS or hasattr(UnshardedParam, name)
        sharded = None if is_own else self._sharded()
        if sharded is None:
            super().__setattr__(name, value)
        else:
            # A plain model has one parameter object: users read after the step an attribute that a forward hook set.
            setattr(sharded, name, value)

    def __getattr__(self, name: str) -> Any:
        # Megatron marks parameters that it does not offload by an attribute.
        sharded = None if name.startswith("_fsdp_") or name in _OF_SHARDS else self._sharded()
        noted = {} if sharded is None or hasattr(type(sharded), name) else vars(sharded)
        if name not in noted:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return noted[name]

    def __delattr__(self, name: str) -> None:
        sharded = None if name in vars(self) else self._sharded()
        if sharded is None:
            super().__delattr__(name)
        else:
            delattr(sharded, name)

    @property
    def data(self) -> torch.Tensor:
        """The values, detached from autograd's graph."""
        self._fsdp_data_taken = True
        # Unlike PyTorch's .data, a detached tensor shares the version counter, so changes are noticed.
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Routers of Megatron assign a parameter's own values, moved to the device that they are on.
        if value.dtype is self.dtype and value.is_set_to(self):
            return
        if not self._is_writable() or value.shape != self.shape:
            refuse_change((self,))
        self.detach().copy_(value)

    def _is_writable(self) -> bool:
        handle: WeightHandle | None = vars(self).get("_fsdp_handle")
        group = None if handle is None else handle.group()
        return group is not None and group.is_writable

    def _sharded(self) -> nn.Parameter | None:
        handle: WeightHandle | None = vars(self).get("_fsdp_handle")
        group = None if handle is None else handle.group()
        return None if handle is None or group is None else group.parameters.get(handle.parameter)

    @property
    def grad(self) -> torch.Tensor | None:
        """``.grad`` of the sharded parameter, averaged over ranks.

        None while torch.compile traces, which would expect a gradient of this weight's shape.
        """
        if TracingContext.try_get() is not None:
            return None
        sharded = self._sharded()
        return None if sharded is None else sharded.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        group, sharded = self._fsdp_handle.group(), self._sharded()
        if group is not None and sharded is not None:
            if value is not None and not isinstance(value, DTensor) and value.shape == sharded.shape:
                value = laid_out(group.fsdp_params, sharded, value)
            if value is not None and sharded.grad_dtype is not None and value.dtype is self.dtype:
                # A gradient in this weight's dtype is right for a plain model's parameter.
                value = value.to(sharded.grad_dtype)
            sharded.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Register a hook on the sharded parameter, whose ``.grad`` is the mean over ranks."""
        sharded = self._sharded()
        assert sharded is not None
        return sharded.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy that is an ordinary parameter."""
        copied = memo.get(id(self))
        if copied is None:
            copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy, without the rest of the unit's memory."""
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


_SHAPE = frozenset(
    """size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex storage_offset
    requires_grad_ register_hook register_post_accumulate_grad_hook untyped_storage data_ptr __hash__ get_device
    __len__ is_shared""".split()
)
_VALUES = frozenset({"data", "real", "imag", "T", "mT", "H", "mH"})


class GatheredWeight(UnshardedParam):
    """An unsharded parameter from ``unshard`` to ``reshard``, with memory."""


class ReleasedWeight(UnshardedParam):
    """An unsharded parameter from ``reshard`` to the next ``unshard``: a shape and a name without values."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run functions that read no values; raise ``StorageError`` for any other."""
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            is_harmless = name not in _VALUES
        else:
            is_harmless = name in _SHAPE
        if not is_harmless:
            raise _released(args, kwargs or {}, name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # of torch
        return f"GatheredWeight({self._fsdp_handle.words}, released, size={tuple(self.shape)}, dtype={self.dtype})"


def _in_place(name: str) -> Callable[..., Any]:
    """Return the in-place operator ``name``, which raises unless the group's gathered weights may be changed."""
    change = getattr(torch.Tensor, name)

    def change_in_place(self: UnshardedParam, *args: Any, **options: Any) -> Any:
        if not self._is_writable():
            refuse_change((self,))
        return change(self, *args, **options)

    change_in_place.__name__ = name
    return change_in_place


_OPERATORS = "iadd isub imul itruediv ifloordiv imod idiv ipow iand ior ixor ilshift irshift setitem"
_IN_PLACE = {name for name in dir(torch.Tensor) if name.endswith("_") and name[0] != "_"} - {"rename_"}
for _name in (*_IN_PLACE, *(f"__{name}__" for name in _OPERATORS.split())):
    setattr(UnshardedParam, _name, _in_place(_name))
for _name in ("requires_grad_", "detach_"):
    setattr(UnshardedParam, _name, _counting(_name))

KINDS: tuple[type[UnshardedParam], ...] = (GatheredWeight, ReleasedWeight)
"""The exact types of unsharded parameters: with memory, without."""


def _released(args: Iterable[Any], kwargs: dict[str, Any], name: str) -> StorageError:
    """Return the error for a call of ``name`` with a released weight among its arguments."""
    operands = [*args, *kwargs.values()]
    nested = [item for operand in operands if isinstance(operand, (list, tuple)) for item in operand]
    weight = next(item for item in (*operands, *nested) if isinstance(item, ReleasedWeight))
    return StorageError(
        f"{weight._fsdp_handle.words}: {name} of its gathered weight, which was released when the unit resharded. fix: "
        "read the parameter that the module shows now (a DTensor; full_tensor() gathers it), use weights only inside "
        "their unit's forward, or call model.unshard() first"
    )
