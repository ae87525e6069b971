"""The tensors by which backward reaches a call of a unit, and the hooks on them that gather its weights in time.

What a module returns is the way (docs/design/order.md, "Whatever leads backward into a unit").
"""

from __future__ import annotations

import collections
import functools
import weakref
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from megatron_fsdp.runtime.step.pytree import iterate_tensors, parts_of_dual
from megatron_fsdp.runtime.step.unit import Call

__all__ = ["watch_inputs", "watch_output"]

_WATCHERS = "_fsdp_watchers"
"""Under this and its output's number a node's metadata has the calls that a tensor is an output of."""


def watch_output(call: Call, output: Any) -> bool:
    """Enter ``call`` when backward reaches any tensor of what its module returned.

    Returns:
        Whether operators made all of these tensors, in memory of their own. Others may be views of gathered weights.
    """
    is_new = True
    opaque: list[Any] = []
    for tensor in (output,) if isinstance(output, torch.Tensor) else iterate_tensors(output, 0, opaque):
        for part in parts_of_dual(tensor) if forward_ad._current_level >= 0 else (tensor,):
            if part.requires_grad:
                _watch(call, part)
                base = part._base
                if base is not None:
                    _watch_base(call, base)
                is_new = is_new and base is None and part.grad_fn is not None
            else:
                is_new = False
    if opaque:
        call.unit.schedule.guards.watch_hidden(call, opaque)
    return is_new


def _watch_base(call: Call, base: torch.Tensor) -> None:
    """Enter ``call`` when backward reaches what an output is a view of.

    After an in-place change of the view, backward goes from the change straight to the node that made ``base``: the
    node of the view, with its hook, is no longer on the way.
    """
    node: Any = base.grad_fn
    # A base that was made before the call is not the unit's: another rank may not return a view of it.
    if node is not None and node._sequence_nr() >= call.first_node:
        earlier = node.metadata.get((_WATCHERS, base.output_nr), ())
        # What another unit returned before is this unit's input. Backward comes there after it has left this call.
        if all(other.end >= call.begin or other is call for other in earlier):
            _watch(call, base)


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
        unit = call.unit
        unit.backward.before_backward(unit, call)
