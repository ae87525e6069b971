"""The tensors by which backward may reach a call of a unit, and the hooks on them that gather its weights in time.

What a module returns is one way. Others are what it keeps (an auxiliary loss as an attribute) and what hooks of the
user take from modules inside of it (``inner_outputs.py``). So what a call returns is watched, and modules with weights
of their own are looked through for tensors that the call made (docs/design/order.md).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from megatron_fsdp.runtime.guards.pytree import PLAIN_VALUES, iterate_tensors, members_of, parts_of_dual
from megatron_fsdp.runtime.step.unit import Call, watchers

__all__ = ["Attributes", "watch_given", "watch_inputs", "watch_made", "watch_output"]

# Attributes of every module, and ours.
_INERT = frozenset((*vars(nn.Module()), "_fsdp_unit"))
# A log of a million entries, or a large configuration, is not read through at every call.
_MAX_MEMBERS = 64
_MAX_DEPTH = 3


def watch_output(call: Call, output: Any) -> None:
    """Enter ``call`` when backward reaches any tensor of what its module returned."""
    for tensor in (output,) if isinstance(output, torch.Tensor) else iterate_tensors(output):
        if tensor.requires_grad:
            _watch(call, tensor)
        if forward_ad._current_level >= 0:
            for part in parts_of_dual(tensor):
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
        if not isinstance(value, torch.Tensor) and type(value) not in PLAIN_VALUES:
            for tensor in _kept(value, 0):
                watch_made(call, tensor)


def watch_inputs(call: Call, given: Any) -> None:
    """Tell backward that it has gone through ``call`` when it reaches any tensor that was computed for it."""
    leave: Any = functools.partial(_leave, weakref.ref(call))
    leave.__torch_unserializable__ = True  # as in ``watchers``
    for tensor in tree_leaves(given):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(leave)


def _leave(reference: weakref.ref[Call], gradient: torch.Tensor) -> None:
    call = reference()
    if call is not None:
        call.unit.backward.after_call(call)


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
                if type(value) not in PLAIN_VALUES:
                    for tensor in _kept(value, 0):
                        watch_made(call, tensor)


def _kept(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    members = list(members_of(value)) if depth < _MAX_DEPTH else []
    for member in members[-_MAX_MEMBERS:]:
        if type(member) not in PLAIN_VALUES:
            yield from _kept(member, depth + 1)


def _watch(call: Call, tensor: torch.Tensor) -> None:
    calls = watchers(tensor)
    if call not in calls:
        calls.append(call)
    if not call.is_expected:
        call.unit.expect(call)
