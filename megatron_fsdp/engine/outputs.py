"""Hooks on the outputs of a unit: through them backward reaches a call and gathers its weights in time.

Only tensors that a module returns have such hooks (docs/design/order.md, "How backward enters a unit").
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megatron_fsdp.engine.unit import Call

__all__ = ["iterate_tensors", "map_tensors", "parts_in_transforms", "watch_inputs", "watch_output", "without_weights"]


Enter = Callable[[Call], None]

is_batchedtensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_batchedtensor

_WATCHERS = "_fsdp_watchers"
"""A node's metadata holds, under this name and a tensor's ``output_nr``, the calls that returned the tensor."""


def watch_output(call: Call, output: Any, enter: Enter) -> bool:
    """Call ``enter(call)`` when backward reaches any tensor in the output of the call's module.

    Args:
        enter: ``backward.pre_backward``.
    Returns:
        True if operators made all of these tensors, none of them a view. Another tensor may lie in gathered weights.
    """
    is_new = True
    opaque: list[Any] = []
    for tensor in (output,) if isinstance(output, torch.Tensor) else iterate_tensors(output, 0, opaque):
        # A tensor of ``vmap`` never requires a gradient itself, so the usual output costs no call here.
        is_wrapped = forward_ad._current_level >= 0 or (not tensor.requires_grad and is_batchedtensor(tensor))
        for part in parts_in_transforms(tensor) if is_wrapped else (tensor,):
            if part.requires_grad:
                _watch(call, part, enter)
                base = part._base
                if base is not None:
                    _watch_base(call, base, enter)
                is_new = is_new and base is None and part.grad_fn is not None
            else:
                is_new = False
    if opaque:
        for hook in call.unit.root.hooks:
            hook.on_opaque_output(call, opaque)
    return is_new


def _watch_base(call: Call, base: torch.Tensor, enter: Enter) -> None:
    """Call ``enter(call)`` when backward reaches the base of an output that is a view.

    After an in-place change of the view, backward goes from the change to the node that made ``base``, and skips the
    node of the view with its hook.
    """
    node: Any = base.grad_fn
    # Only a base that the call made counts. Another rank may not return a view of an older one.
    if node is not None and node._sequence_nr() >= call.first_node:
        earlier = node.metadata.get((_WATCHERS, base.output_nr), ())
        # A tensor that another unit returned before is an input of this unit: backward reaches it after it has left
        # this call.
        if all(other.end >= call.begin or other is call for other in earlier):
            _watch(call, base, enter)


def watch_inputs(call: Call, given: Any, leave: Callable[[Call], None]) -> None:
    """Call ``leave(call)`` when backward reaches any input of the call that an operator made.

    Args:
        given: the arguments of the module.
        leave: ``backward.leave_call``.
    """
    hook: Any = functools.partial(_leave_call, weakref.ref(call), leave)
    hook.__torch_unserializable__ = True  # as in ``_watch``
    for tensor in tree_leaves(given):
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(hook)


def without_weights(call: Call, output: Any, enter: Enter) -> Any:
    """Return the output of a call, with clones of the tensors that lie in gathered weights.

    A unit may return its weight, or a view of it. The caller may use the output after the gathered weights are
    released. Gradients reach the weight through the clone.
    """
    buffers = [group.gathered for group in call.unit.groups if not group.weights.rests_whole]
    if not buffers or output is None:
        return output
    storages = {buffer.storage.tensor.untyped_storage()._cdata for buffer in buffers}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if _storage_of(tensor) in storages else tensor

    found = map_tensors(copied, output)
    if found is not output and torch.is_grad_enabled():
        watch_output(call, found, enter)
    return found


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; 0 for a wrapper without storage."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()._cdata if torch._C._has_storage(local) else 0


def _leave_call(reference: weakref.ref[Call], leave: Callable[[Call], None], gradient: torch.Tensor) -> None:
    call = reference()
    if call is not None:
        leave(call)


def _watch(call: Call, tensor: torch.Tensor, enter: Enter) -> None:
    """Add a call to the calls that the hook on this tensor enters.

    Several calls return the same tensor if a unit returns its input, or the output of its last child. Backward must
    enter the latest call first, but autograd runs hooks in the order of registration. So one hook enters them all.
    """
    node = tensor.grad_fn
    if node is None:
        # A leaf: backward reaches it through no operator of the call.
        return
    # The list is kept with the node and not with the tensor, which hooks on saved tensors may pickle.
    known: Any = node.metadata
    key = (_WATCHERS, tensor.output_nr)
    calls = known.get(key)
    if calls is None:
        calls = known[key] = []
        hook: Any = functools.partial(_enter_calls, calls, enter)
        hook.__torch_unserializable__ = True
        if tensor._backward_hooks is not None or type(tensor) is not torch.Tensor:
            tensor.register_hook(hook)
        else:
            # The first half of ``register_hook``, without the cost of a handle.
            tensor._backward_hooks = collections.OrderedDict(fsdp=hook)
            node._register_hook_dict(tensor)
    if call not in calls:
        calls.append(call)
    if not call.is_pending:
        call.unit.add_pending(call)


def _enter_calls(calls: list[Call], enter: Enter, gradient: torch.Tensor) -> None:
    for call in calls[::-1]:
        enter(call)


# ---------------------------------------------------------------- tensors in nested structures
#
# The containers of PyTorch's pytree, other mappings, and dataclasses.


_MAX_DEPTH = 8


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def iterate_tensors(value: Any, depth: int = 0, opaque: list[Any] | None = None) -> Iterator[torch.Tensor]:
    """Yield every tensor in a nested structure, in a fixed order.

    Args:
        opaque: a list that gets the objects that are no known container and may hold tensors.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth < _MAX_DEPTH:
            # ``type`` and not ``isinstance``: objects such as frameworks' configs run Python to give ``__class__``.
            names = getattr(type(leaf), "__dataclass_fields__", ())
            others = leaf.values() if issubclass(type(leaf), Mapping) else ()
            for member in (*others, *(getattr(leaf, name, None) for name in names)):
                yield from iterate_tensors(member, depth + 1, opaque)
            if opaque is not None and not names and type(leaf) not in _ATOMS:
                opaque.append(leaf)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the structure with ``function`` applied to every tensor; the same object if no tensor changed.

    The lengths in a ``PackedSequence`` are left out: PyTorch wants them in CPU memory.
    """
    leaves, structure = tree_flatten(value, is_leaf=_is_packed)
    mapped = [_map_leaf(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return tree_unflatten(mapped, structure)


def _is_packed(value: Any) -> bool:
    return type(value) is PackedSequence


def _map_leaf(function: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if _is_packed(leaf):
        data = function(leaf.data)
        indices = [None if each is None else function(each) for each in leaf[2:]]
        return leaf if data is leaf.data else PackedSequence(data, leaf.batch_sizes, *indices)
    # ``type`` as in ``iterate_tensors``. A copy of another mapping could share its members with the original.
    if issubclass(type(leaf), (dict, collections.UserDict)):
        return _map_dict(function, leaf)
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
    mapped = {name: map_tensors(function, old) for name, old in fields.items()}
    changes = {name: new for name, new in mapped.items() if new is not fields[name]}
    return dataclasses.replace(leaf, **changes) if changes else leaf


def _map_dict(function: Callable[[torch.Tensor], torch.Tensor], old: Any) -> Any:
    """Return a copy of a dictionary that PyTorch's pytree does not know, such as Hugging Face's ``BatchEncoding``."""
    mapped = {key: map_tensors(function, value) for key, value in old.items()}
    changes = {key: value for key, value in mapped.items() if value is not old[key]}
    if not changes:
        return old
    new = copy.copy(old)
    for key, value in changes.items():
        new[key] = value
    return new


def parts_in_transforms(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that autograd tracks for a tensor of forward mode or ``vmap``: its value and its tangent."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_gradtrackingtensor(tensor):
            if forward_ad._current_level < 0:
                # ``torch.func.grad`` records this one for its own backward, which ``pre_backward`` refuses.
                yield tensor
                return
            tangent = forward_ad.unpack_dual(tensor).tangent
            if tangent is not None:
                yield from parts_in_transforms(tangent)
        yield from parts_in_transforms(torch._C._functorch.get_unwrapped(tensor))
        return
    dual = forward_ad.unpack_dual(tensor)
    yield tensor
    if dual.tangent is not None:
        yield dual.tangent
