"""Collectives that reach c10d's operators without asking ``__torch_function__`` of a sharded tensor.

``dist.scatter(out, [p, p])`` asks ``out`` alone, and a method of a process group asks no tensor. The operators would
read the memory of the DTensor, which has none. They are refused in two places (docs/design/facade.md, "Collectives"):

- A sharded tensor among the tensors and lists of an operator leads to DTensor's table of handlers. Calls with plain
  tensors alone never enter it.
- A sharded tensor in a nested list (``scatter_``, ``gather_``, ``allgather_``, ``reduce_scatter_``) does not: PyTorch's
  dispatcher does not look into nested lists. These operators get a kernel that looks. The engine's steps issue none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dbuffer.dtensor.attribute_ops import refuse_collective
from dbuffer.dtensor.gathered_ops import Operator, map_tensors
from dbuffer.dtensor.made_by_hand import operator_handlers, run_without_handler
from dbuffer.dtensor.placed_tensor import PlacedTensor

# Kernels stay registered as long as this object lives. BackendSelect is the key that every call has, on any device and
# in inference mode, and nothing else of c10d uses it.
_LIBRARY = torch.library.Library("c10d", "IMPL")
_KEY = "BackendSelect"


def refuse_sharded_tensors() -> None:
    """Make c10d's operators raise ``NotImplementedError`` for sharded tensors, from now on."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace != "c10d" or "." in operator:
            continue
        overload = getattr(torch.ops.c10d, operator).default
        kinds = [str(argument.type) for argument in overload._schema.arguments]
        operator_handlers()[overload] = _handle
        if "List[List[Tensor]]" in kinds:
            _LIBRARY.impl(operator, _kernel(overload), _KEY, with_keyset=True)


def _handle(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Refuse sharded tensors; other DTensors get PyTorch's answer."""
    if _holds_placed([args, options]):
        return refuse_collective(_operator(operator), args, options)
    return run_without_handler(operator, args, options)


def _kernel(overload: Any) -> Callable[..., Any]:
    operator, key = _operator(overload), getattr(torch._C.DispatchKey, _KEY)

    def look_into_lists(keys: Any, *args: Any, **options: Any) -> Any:
        if _holds_placed([args, options]):
            return refuse_collective(operator, args, options)
        return overload.redispatch(keys.remove(key), *args, **options)

    return look_into_lists


def _operator(overload: Any) -> Operator:
    return Operator(overload, refuse_collective, overload._schema.name.partition("::")[2].strip("_"))


def _holds_placed(values: Any) -> bool:
    found: list[bool] = []
    map_tensors(values, lambda tensor: found.append(isinstance(tensor, PlacedTensor)))
    return any(found)
