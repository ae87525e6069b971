"""Attributes, hooks and memory of sharded tensors; uses that cannot be correct raise errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer.dtensor.autograd import convert_gradients_of
from dbuffer.dtensor.gathered_ops import Arguments, Operator, Options, map_tensors, tensors_in
from dbuffer.dtensor.placed_tensor import PlacedTensor
from dbuffer.errors import PlacementError


def run_native(operator: Operator, args: Arguments, options: Options) -> Any:
    """Run the function natively, as on any tensor: it reads or sets what PyTorch itself stores."""
    with torch._C.DisableTorchFunctionSubclass():
        return operator.function(*args, **options)


def run_data_ptr(operator: Operator, args: Arguments, options: Options) -> int:
    """Return 0: a DTensor has no memory of its own.

    Natively, PyTorch would return the local part's offset from a null pointer. Code that copies storages, such as
    ``torch.distributed.checkpoint.async_save``, would take that for an address.
    """
    return 0


def run_detach(operator: Operator, args: Arguments, options: Options) -> Any:
    """Return a tensor on the same memory, without autograd history."""
    source = args[0]
    if source.is_unshared:
        source.is_unshared = False
    detached = source.with_local(source._local_tensor.detach())
    if source.window is not None:
        detached.window = source.window
    return detached


_DATA_VIEWS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def run_get_data(operator: Operator, args: Arguments, options: Options) -> Any:
    """Return a tensor on the same memory, without history. Setting ``.data`` later does not change its values."""
    view = run_detach(operator, args, options)
    _DATA_VIEWS.setdefault(args[0], WeakIdKeyDictionary())[view] = True
    return view


def run_numbers(operator: Operator, args: Arguments, options: Options) -> Any:
    """Format a number, or convert to an array, where every rank holds the whole value.

    Raises:
        PlacementError: an array of a sharded tensor. The array would be a copy, and writes into it would be lost.
    """
    source, *rest = args
    if not isinstance(source, PlacedTensor) or (operator.name == "__format__" and (source.ndim or not source.is_whole)):
        return run_native(operator, args, options)
    if not source.is_whole:
        raise PlacementError(
            f"an array cannot share the memory of {words_of(source)}, which is sharded. fix: call "
            "p.detach().full_tensor().numpy() on every rank for a copy of all values, p.detach().to_local().numpy() "
            "for this rank's"
        )
    return operator.function(source.whole().detach(), *rest, **options)


def run_set_data(operator: Operator, args: Arguments, options: Options) -> None:
    """Copy the new values in place: the tensor's memory is a piece of a flat buffer and cannot be exchanged."""
    target, value = args
    if not isinstance(target, PlacedTensor):
        raise PlacementError(
            "the values of a plain tensor cannot be those of a sharded one. fix: tensor.data = p.full_tensor()"
        )
    if value.shape != target.shape or value.dtype != target.dtype or value.device != target.device:
        raise PlacementError(
            f".data of {words_of(target)} is {target.dtype} of shape {tuple(target.shape)} on {target.device}; found "
            f"{value.dtype} of shape {tuple(value.shape)} on {value.device}, for which its flat buffer has no place. "
            "fix: change shapes before fully_shard (model.resize_token_embeddings(n), pruning, new heads), and dtypes "
            "by model.to(dtype) of the whole model"
        )
    with torch.no_grad():
        # Tensors read from .data earlier keep their values, as in `p.data, kept = kept, p.data`.
        for view in list(_DATA_VIEWS.pop(target, {})):
            if view.window is None and view._local_tensor.data_ptr() == target._local_tensor.data_ptr():
                rebind(view, view.with_local(view._local_tensor.clone()))
        target.copy_(value.detach())


_REASONS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def refuse_uses(
    tensor: torch.Tensor, *, name: Callable[[], str], hook: Callable[[], str], convert: Callable[[], str]
) -> None:
    """Make two uses of a tensor raise ``PlacementError`` with a reason, and set the tensor's name in errors.

    Args:
        name: returns the names of the parameter and its unit.
        hook: returns why ``register_hook`` fails: autograd gives the tensor no gradient.
        convert: returns why ``nn.Module.to`` and similar methods of the module that holds the tensor fail.
    """
    _REASONS[tensor] = {"name": name, "register_hook": hook, "_has_compatible_shallow_copy_type": convert}


def words_of(tensor: PlacedTensor) -> str:
    """Return the name of a sharded tensor in errors: its parameter, or the parameter of its memory or gradient."""
    owner = tensor.gradient_of() if tensor.gradient_of is not None else None
    if owner is not None:
        return f"the gradient of {words_of(owner)}"  # type: ignore[arg-type]  # of a sharded one
    if tensor in _REASONS:
        return _REASONS[tensor]["name"]()  # type: ignore[no-any-return]
    for known, reasons in _REASONS.items():
        # The same memory means it was read from .data. If this rank has no rows, compare the layouts instead.
        if isinstance(known, PlacedTensor) and known.shape == tensor.shape:
            here, there = known._local_tensor, tensor._local_tensor
            is_same = here.data_ptr() == there.data_ptr() if here.numel() else known._spec is tensor._spec
            if is_same or known.grad is tensor:
                words: str = reasons["name"]()
                return words if is_same else f"the gradient of {words}"
    return f"a sharded tensor of shape {tuple(tensor.shape)}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, PlacedTensor) else tensor


def refuse_collective(operator: Operator, args: Arguments, options: Options) -> Any:
    """Raise, because ranks hold different rows, and a collective would combine them element by element.

    Raises:
        NotImplementedError: a rank does not hold all of each tensor. FSDP2's parameters raise the same class.
    """
    tensors: list[torch.Tensor] = []
    map_tensors([args, options], tensors.append)
    placed = [each for each in tensors if isinstance(each, PlacedTensor)]
    tensor = next((each for each in placed if not each.is_whole or each.window is not None), None)
    if placed and tensor is None:
        return operator.function(*map_tensors(args, _local), **{k: map_tensors(v, _local) for k, v in options.items()})
    if tensor is None:
        return run_native(operator, args, options)
    raise NotImplementedError(
        f"rank {torch.distributed.get_rank()}: {operator.name} of {words_of(tensor)}: the ranks hold different rows of "
        "it, which a collective would mix. fix: p.full_tensor() for the whole values, or p.to_local() for the rows of "
        "this rank"
    )


def _refuse_use(operator: Operator, tensor: torch.Tensor) -> None:
    reason = _REASONS.get(tensor, {}).get(operator.name)
    if reason is not None:
        raise PlacementError(reason())


def run_convert(operator: Operator, args: Arguments, options: Options) -> Any:
    """Answer ``Module._apply``, which checks each parameter before it replaces the parameter objects."""
    _refuse_use(operator, args[0])
    return run_native(operator, args, options)


def run_hook(operator: Operator, args: Arguments, options: Options) -> Any:
    """Register a backward hook, which runs with ``__torch_function__`` on, whichever code started backward."""
    tensor, *rest = args
    _refuse_use(operator, tensor)
    convert_gradients_of(tensor)
    if operator.name == "retain_grad" and not tensor.is_leaf:
        raise PlacementError(
            "retain_grad would keep a gradient that forgets the rows of each rank. fix: tensor.register_hook(...), and "
            "keep the gradient that it gets"
        )
    awake = [_awake(item) if callable(item) else item for item in rest]
    named = {name: _awake(item) if callable(item) else item for name, item in options.items()}
    with torch._C.DisableTorchFunctionSubclass():
        return operator.function(tensor, *awake, **named)


def _awake(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return hook(*args)

    return call


def run_iterate(operator: Operator, args: Arguments, options: Options) -> Any:
    """Return an iterator over the slices of the first dimension."""
    return iter(args[0].unbind(0))


def run_reshape(operator: Operator, args: Arguments, options: Options) -> Any:
    """Change the shape in place, if no other tensor uses the memory."""
    target = args[0]
    is_replaceable = isinstance(target, PlacedTensor) and (target.is_whole or target.is_unshared)
    if not is_replaceable or target.window is not None:
        return refuse(operator, args, options)
    rebind(target, target.with_whole(operator.function(target.whole(), *args[1:], **options)))
    return target


def rebind(target: PlacedTensor, source: PlacedTensor) -> None:
    """Give one tensor the shape, dtype, rows and memory of another; it stays the same Python object."""
    target._spec, target._local_tensor = source._spec, source._local_tensor
    with torch._C.DisableTorchFunctionSubclass():
        # Updates the shape that PyTorch itself stores.
        target.data = source


def refuse(operator: Operator, args: Arguments, options: Options) -> Any:
    """Raise ``PlacementError``: the function cannot work on a piece of a flat buffer."""
    target = next((each for each in tensors_in(args, options) if isinstance(each, PlacedTensor)), None)
    whose = "a sharded tensor" if target is None else words_of(target)
    raise PlacementError(
        f"{operator.name} cannot be right on {whose}, whose memory is a piece of a flat buffer. fix: work on "
        "p.to_local(), this rank's rows, or on p.full_tensor(), a whole copy"
    )
