"""Operators without computation: results of the right shape, and a record of the work.

Large tensors are real CPU tensors in reserved address space without pages, so storages, views and addresses behave as
usual. Small tensors, such as tables and counters, have real values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp.virtual import address_space
from megatron_fsdp.virtual.address_space import LARGE
from megatron_fsdp.virtual.recording import Recording, Work

__all__ = ["Operators", "tensors_in"]

_SMALL = 1 << 16
"""Elements up to which an operator is computed."""

_FREE = frozenset(
    """empty new_empty empty_strided new_empty_strided empty_like _pin_memory is_pinned resize_ set_ lift_fresh
    record_stream is_same_size _unsafe_view""".split()
)
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Collectives: their kind, and which argument is the full side.
_COLLECTIVES = {
    name: (kind, position)
    for kind, position, names in (
        ("all_gather", 0, "_allgather_base_ allgather_ allgather_into_tensor_coalesced_"),
        ("reduce_scatter", 1, "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_"),
        ("all_reduce", 0, "allreduce_ allreduce_coalesced_"),
        ("broadcast", 0, "broadcast_"),
        ("all_to_all", 1, "alltoall_ alltoall_base_"),
        ("scatter", 1, "scatter_"),
    )
    for name in names.split()
}
# Lookups read only the rows that they return.
_LOOK_UPS = {"embedding", "index", "gather", "index_select"}
# Operators that only write their first argument.
_OVERWRITE = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_"}
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operator as its schema describes it: whether it is free of work, and the arguments that it writes."""

    name: str
    is_free: bool
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    has_device: bool
    returns_one: bool

    @classmethod
    def of(cls, func: Any) -> _Operator:
        schema = func._schema
        name = schema.name.partition("::")[2]
        aliased = [argument for argument in schema.arguments if argument.alias_info is not None]
        changed = [argument for argument in aliased if argument.alias_info.is_write]
        names = [argument.name for argument in schema.arguments]
        return cls(
            name,
            name in _FREE or (bool(aliased) and not changed),
            tuple(names.index(each.name) for each in changed if not each.kwarg_only),
            tuple(each.name for each in changed if each.kwarg_only),
            "device" in names,
            len(schema.returns) == 1 and "[]" not in str(schema.returns[0].type),
        )


class Operators(TorchDispatchMode):
    """The dispatch mode that records the work of each operator, and computes only small ones.

    Args:
        parts: functions that replace composite operators; the operators they call are recorded instead.
    """

    def __init__(self, recording: Recording, parts: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._parts = parts or {}
        self._operators: dict[Any, _Operator] = {}
        self._specs: dict[Any, list[_Spec | None] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and declaring that to Dynamo takes as long as recording an operator.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, or only record it."""
        kwargs = kwargs or {}
        if any(each not in _PLAIN for each in types):
            # DTensor computes shapes with fake tensors; its operators on local tensors arrive here.
            is_fake = any(issubclass(each, FakeTensor) for each in types)
            return func(*args, **kwargs) if is_fake else NotImplemented
        if func.namespace == "c10d":
            return self._collective(func, args)
        if func in self._parts:
            with self:
                return self._parts[func](*args, **kwargs)
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator.of(func)
        if not operator.is_free:
            return self._pretend(func, operator, args, kwargs)
        if operator.name.startswith(("empty", "new_empty")) and _is_large(args) and not _is_meta(args, kwargs):
            specs = self._specs_of(func, operator, args, kwargs)
            return _allocate(specs[0]) if specs else func(*args, **kwargs)
        return func(*args, **kwargs)

    def _collective(self, func: Any, args: Any) -> Any:
        """Record a collective, which completes at once."""
        kind, position = _COLLECTIVES.get(func._schema.name.partition("::")[2], ("", 0))
        group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
        if group.size() > 1 and kind:
            recording, num_bytes = self._recording, sum(each.nbytes for each in tensors_in(args[position]))
            ranks = tuple(dist.get_process_group_ranks(group))
            work = Work(kind, kind, 0, num_bytes, ranks=ranks, axis=recording.axis, label=recording.label())
            recording.work(work, calls=recording.collective_calls)
        done = FakeWork().boxed()
        return done if len(func._schema.returns) == 1 else (args[0], done)

    def _pretend(self, func: Any, operator: _Operator, args: Any, kwargs: Any) -> Any:
        recording = self._recording
        if operator.name == "_local_scalar_dense":
            # The host reads a value, so it waits for the stream that computed it.
            recording.current().synchronize()
            return func(*args, **kwargs)
        inputs = tensors_in((args, [each for name, each in kwargs.items() if name not in operator.written_names]))
        if inputs and inputs[0].is_meta:
            return func(*args, **kwargs)
        outputs: Sequence[torch.Tensor | None]
        if operator.written or operator.written_names:
            written = [args[at] for at in operator.written if at < len(args)]
            outputs = tensors_in((written, [kwargs[name] for name in operator.written_names if name in kwargs]))
            sizes = [each.numel() for each in tensors_in((inputs, outputs))]
        else:
            specs = self._specs_of(func, operator, args, kwargs)
            if specs is None:
                return func(*args, **kwargs)
            sizes = [each.numel() for each in inputs] + [math.prod(spec[0]) for spec in specs if spec is not None]
            outputs = [] if max(sizes, default=0) <= _SMALL else [_allocate(spec) for spec in specs]
        if max(sizes, default=0) <= _SMALL:
            made = func(*args, **kwargs)
            recording.work(_work_of(operator.name, inputs, tensors_in(made), recording.label()))
            return made
        recording.work(_work_of(operator.name, inputs, tensors_in(outputs), recording.label()))
        if not func._schema.returns:
            return None
        return outputs[0] if operator.returns_one else tuple(outputs)

    def _specs_of(self, func: Any, operator: _Operator, args: Any, kwargs: Any) -> list[_Spec | None] | None:
        """Return shape, strides and dtype of each output; None where they depend on values."""
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key not in self._specs:
            named = {name: _to_meta(each) for name, each in kwargs.items() if name != "pin_memory"}
            if operator.has_device:
                named["device"] = _META
            try:
                found = func(*map(_to_meta, args), **named)
            except (NotImplementedError, RuntimeError):
                self._specs[key] = None
            else:
                listed = list(found) if isinstance(found, tuple | list) else [found]
                self._specs[key] = [
                    (tuple(each.shape), each.stride(), each.dtype) if isinstance(each, torch.Tensor) else None
                    for each in listed
                ]
        return self._specs[key]


_Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _allocate(spec: _Spec | None) -> torch.Tensor | None:
    if spec is None:
        return None
    shape, strides, dtype = spec
    if math.prod(shape) * dtype.itemsize >= LARGE:
        return address_space.empty(shape, strides, dtype)
    made = torch.empty_strided(shape, strides, dtype=dtype)
    # Small tensors may be used in real computations.
    return made.zero_() if made.numel() <= _SMALL else made


def _is_large(args: Any) -> bool:
    """Return whether the result of an operator may be large, from a given shape or a similar tensor."""
    shape = next((each for each in reversed(args) if isinstance(each, list | tuple | torch.Size)), None)
    return (math.prod(shape) if shape is not None else args[0].numel()) >= LARGE // 8


def _is_meta(args: Any, kwargs: Any) -> bool:
    """Return whether the result of an operator has no memory in any case: meta and fake tensors."""
    if active_fake_mode() is not None:
        return True
    device = kwargs.get("device")
    if device is None:
        return isinstance(args[0], torch.Tensor) and args[0].is_meta
    return torch.device(device).type == "meta"


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested sequences and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    return value if value.__hash__ is not None else id(value)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, tuple | list):
        return type(value)(map(_to_meta, value))
    return _META if isinstance(value, torch.device) else value


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a read of the tensor moves; expanded dims count once."""
    strides = tensor.stride()
    return math.prod(size for size, stride in zip(tensor.shape, strides, strict=True) if stride) * tensor.itemsize


def _work_of(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], label: str) -> Work:
    written = sum(map(_bytes, outputs))
    num_bytes = written + sum(map(_bytes, inputs))
    if name in _LOOK_UPS:
        num_bytes = 2 * written
    elif name in _OVERWRITE:
        num_bytes -= written
    if name in _ATTENTION:
        query, key = inputs[_ATTENTION[name] == 5], inputs[1 + (_ATTENTION[name] == 5)]
        batch, heads, length, width = query.shape
        # Causal: half of the pairs.
        flops = _ATTENTION[name] * batch * heads * length * key.shape[2] * width
        return Work(name, "attention", flops, num_bytes, query.dtype, width, label=label)
    sizes = _product(name, inputs)
    if sizes is not None:
        flops = 2 * math.prod(sizes)
        factor = next(each for each in inputs if each.ndim >= 2)
        return Work(name, "product", flops, num_bytes, factor.dtype, min(sizes[-3:]), label=label)
    return Work(name, "memory", 0, num_bytes, label=label)


_PRODUCTS: dict[str, Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]] = {
    "mm": lambda each: (each[0], each[1]),
    "bmm": lambda each: (each[0], each[1]),
    "addmm": lambda each: (each[1], each[2]),
    "addmm_": lambda each: (each[1], each[2]),
    "baddbmm": lambda each: (each[1], each[2]),
    "baddbmm_": lambda each: (each[1], each[2]),
}


def _product(name: str, inputs: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    if name not in _PRODUCTS:
        return None
    left, right = _PRODUCTS[name](inputs)
    return (*left.shape, right.shape[-1])
