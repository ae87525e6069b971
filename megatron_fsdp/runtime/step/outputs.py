"""The tensors by which backward may reach a call of a unit, and the hooks on them that gather its weights in time.

What a module returns is one way. Others are what it keeps (an auxiliary loss as an attribute) and what hooks of the
user take from modules inside of it (``inner_outputs.py``). So what a call returns is watched, and modules with weights
of their own are looked through for tensors that the call made (docs/design/order.md).
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from megatron_fsdp.runtime.step.pytree import iterate_tensors, members_of, parts_of_dual
from megatron_fsdp.runtime.step.unit import Call

__all__ = ["Attributes", "watch_given", "watch_inputs", "watch_made", "watch_output"]

_WATCHERS = "_fsdp_watchers"
"""Under this and its output's number a node's metadata has the calls that a tensor is an output of."""

# Types whose values hold no tensors.
_PLAIN_VALUES = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
# Attributes of every module, and ours.
_INERT = frozenset((*vars(nn.Module()), "_fsdp_unit"))
# A log of a million entries, or a large configuration, is not read through at every call.
_MAX_MEMBERS = 64
_MAX_DEPTH = 3


def watch_output(call: Call, output: Any) -> None:
    """Enter ``call`` when backward reaches any tensor of what its module returned."""
    for tensor in (output,) if isinstance(output, torch.Tensor) else iterate_tensors(output):
        for part in parts_of_dual(tensor) if forward_ad._current_level >= 0 else (tensor,):
            if part.requires_grad:
                _watch(call, part)


def watch_made(call: Call, value: Any) -> None:
    """Enter ``call`` when backward reaches any tensor in a structure that was made since it began."""
    for tensor in (value,) if isinstance(value, torch.Tensor) else iterate_tensors(value):
        node = tensor.grad_fn
        # Tensors of earlier calls are none of this one's; nodes are numbered as they are made.
        if node is not None and node._sequence_nr() >= call.first_node:
            _watch(call, tensor)


def watch_given(call: Call, args: Iterable[Any]) -> None:
    """Enter ``call`` when backward reaches any tensor made since it began that its module wrote into an argument."""
    for value in args:
        if not isinstance(value, torch.Tensor) and type(value) not in _PLAIN_VALUES:
            for tensor in _kept(value, 0):
                watch_made(call, tensor)


def watch_inputs(call: Call, given: Any) -> None:
    """Tell backward that it has gone through ``call`` when it reaches any tensor that was computed for it."""
    leave: Any = functools.partial(_leave, weakref.ref(call))
    leave.__torch_unserializable__ = True  # as in ``_watch``
    for tensor in tree_leaves(given):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(leave)


def _leave(reference: weakref.ref[Call], gradient: torch.Tensor) -> None:
    call = reference()
    if call is not None:
        call.unit.backward.after_call(call)


def _watch(call: Call, tensor: torch.Tensor) -> None:
    """Add a call to those that a tensor is an output of, which a hook on it enters.

    There are several where a unit returns its very input, or its last child's output: backward has to enter the later
    call first, while hooks of their own would run in the order of registration. A tensor that was changed in place
    since has another node, which backward reaches before the old one and its hook.
    """
    node = tensor.grad_fn
    if node is None:
        # Of a leaf no operator of the call's is on the way.
        return
    # With the node, so that the tensor can be pickled as any other: hooks on saved tensors do so.
    known: Any = node.metadata
    key = (_WATCHERS, tensor.output_nr)
    calls = known.get(key)
    if calls is None:
        calls = known[key] = []
        hook: Any = functools.partial(_enter_backward, calls)
        hook.__torch_unserializable__ = True
        if tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
            tensor.register_hook(hook)
        else:
            # What ``register_hook`` does first, without a handle.
            tensor._backward_hooks = collections.OrderedDict(fsdp=hook)
            node._register_hook_dict(tensor)
    if call not in calls:
        calls.append(call)
    if not call.is_expected:
        call.unit.expect(call)


def _enter_backward(calls: list[Call], gradient: torch.Tensor) -> None:
    for call in calls[::-1]:
        unit = call._unit()
        if unit is None or unit.entered is not call or unit.entered_task != torch._C._current_graph_task_id():
            (unit or call.unit).backward.before_backward(call)


class Attributes:
    """The attributes of modules that may hold tensors.

    Their names are looked for again when there are more or fewer attributes than before.

    Args:
        modules: referred to weakly.
    """

    __slots__ = ("_modules", "_names", "_size")

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._size = -1
        self._names: list[list[str]] = []

    def watch(self, call: Call) -> None:
        """Enter ``call`` when backward reaches any tensor made since it began that the modules keep."""
        modules = [module.__dict__ for reference in self._modules if (module := reference()) is not None]
        size = sum(map(len, modules))
        if size != self._size:
            self._size, self._names = size, [[name for name in each if name not in _INERT] for each in modules]
        for attributes, names in zip(modules, self._names, strict=True):
            for name in names:
                value = attributes.get(name)
                if type(value) not in _PLAIN_VALUES:
                    for tensor in _kept(value, 0):
                        watch_made(call, tensor)


def _kept(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if issubclass(type(value), torch.Tensor):
        yield value
        return
    for member in members_of(value)[-_MAX_MEMBERS:] if depth < _MAX_DEPTH else ():
        if type(member) not in _PLAIN_VALUES:
            yield from _kept(member, depth + 1)
