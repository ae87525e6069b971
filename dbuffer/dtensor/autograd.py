"""Autograd through operators on sharded tensors: autograd records plain operators on plain tensors only.

A recorded function runs on local parts (element-wise functions of tensors with the same rows, sums) or on whole
tensors. Tensors enter through ``_Enter`` and leave through ``_Leave``; PyTorch's own operators run in between. A
gradient between the two is a ``RowsGradient``, because the autograd engine adds up gradients itself.

Backward may also start at sharded tensors, and compute gradients for them. The engine may run forward with another
tensor in place of a sharded parameter; it registers ``ASKED_CHECKS`` to see for which tensors gradients are requested.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer.dtensor.distribution import Distribution, contiguous_stride
from dbuffer.dtensor.elementwise_ops import (
    accurate,
    find_reference,
    has_rows_of,
    part_of,
    run_by_rows,
    run_cast,
    run_component,
    run_foreach,
)
from dbuffer.dtensor.gathered_ops import Arguments, Operator, Options, map_tensors, shares_memory, tensors_in
from dbuffer.dtensor.own_data import OwnData, own_data_of
from dbuffer.dtensor.placed_tensor import PlacedTensor, is_laid_out_like, whole_of, words_of
from dbuffer.dtensor.reads import read_reduce
from dbuffer.dtensor.reduction_ops import parse_reduction, run_foreach_norm, run_reduction
from dbuffer.errors import PlacementError

_GRAD: Any = torch._C.TensorBase.grad
_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad
_plainly: Any = torch._C._disabled_torch_function_impl
# The tensors whose gradients are converted before the user sees them.
_CONVERTED: WeakIdKeyDictionary = WeakIdKeyDictionary()

# The backward that last computed a gradient of each sharded tensor that an operator used.
_REACHED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_reached(tensor: torch.Tensor) -> bool:
    """Return whether this backward has computed a gradient of a sharded tensor that an operator used.

    Outside of a backward, where gradients are finalized by hand: whether any backward since the last call has.
    """
    task, reached = torch._C._current_graph_task_id(), _REACHED.pop(tensor, None)
    return reached is not None if task == -1 else reached == task


def is_recorded(args: Arguments, options: Options) -> bool:
    """Return whether autograd records a call with these arguments."""
    if not torch.is_grad_enabled():
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(tensor.requires_grad for tensor in tensors_in(args, options))


def run_recorded(operator: Operator, args: Arguments, options: Options) -> Any:
    """Run a function such that backward through it is correct.

    Raises:
        RuntimeError: the function writes to a tensor in a way that is only supported under ``torch.no_grad()``.
    """
    writes = operator.is_in_place or bool(options.get("inplace"))
    if options.get("out") is not None:
        raise RuntimeError(
            f"{operator.name}(out=...) cannot be recorded by autograd, which holds for plain tensors too: "
            f"{_names(args, options)}. fix: put it under torch.no_grad(), or use the variant that returns a new tensor"
        )
    if operator.run in (run_foreach, run_foreach_norm):
        raise RuntimeError(
            f"{operator.name} has no gradient for sharded tensors: {_names(args, options)}. fix: put it under "
            "torch.no_grad(), or make one call per tensor"
        )
    if writes and isinstance(args[0], PlacedTensor):
        return _write(operator, args, options)
    own = own_data_of(
        tensors_in(args, options), is_in_place=writes, is_element_wise=operator.is_element_wise, is_recorded=True
    )
    if own is not None:
        own.warn(operator.name)
        return _run_on_wholes(operator, args, options, own)
    if operator.run in (run_by_rows, run_cast, run_component):
        rows = args[0] if operator.run is run_cast else find_reference(operator, args, options)
        if isinstance(rows, PlacedTensor) and _go_along(operator, args, options, rows):
            return _run_on_parts(operator, args, options, rows)
    if operator.run is run_reduction and operator.name in ("sum", "mean"):
        reduction, source = parse_reduction(operator, args, options), args[0]
        if reduction is not None and isinstance(source, PlacedTensor) and len(reduction.dims) == len(source.shape):
            return _sum(operator.name, source, options.get("dtype"), reduction.keepdim)
    return _run_on_wholes(operator, args, options, None)


def _write(operator: Operator, args: Arguments, options: Options) -> Any:
    """Run a function that writes to its first argument, a sharded tensor; that tensor gets the new values' history.

    Raises:
        RuntimeError: the tensor is a parameter or a view of other rows, or the new values are this rank's own data.
    """
    target = args[0]
    inplace = {name: value for name, value in options.items() if name == "inplace"}
    options = {name: value for name, value in options.items() if name != "inplace"}

    def changed(first: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        # A copy, because autograd may need the old values, and must not record a view of them.
        copied = first.clone()
        operator.function(copied, *others, **named, **inplace)
        return copied

    is_parameter = isinstance(target, torch.nn.Parameter)
    value = None
    if not is_parameter and target.window is None:
        value = run_recorded(replace(operator, function=changed, is_in_place=False), args, options)
    if not isinstance(value, PlacedTensor) or value.shape != target.shape:
        what = "parameter" if is_parameter else "tensor"
        raise RuntimeError(
            f"{operator.name} writes into a sharded {what}, or from one that requires grad, while autograd records: "
            f"{_names(args, options)}. fix: put it under torch.no_grad(), detach() what it reads, write to "
            "parameter.data, or use the variant that returns a new tensor."
        )
    with torch._C.DisableTorchFunctionSubclass():
        return _Write.apply(target, value)  # type: ignore[no-untyped-call]  # torch's stub


def _names(args: Arguments, options: Options) -> str:
    return "; ".join(words_of(tensor) for tensor in tensors_in(args, options) if isinstance(tensor, PlacedTensor))


def _go_along(operator: Operator, args: Arguments, options: Options, rows: PlacedTensor) -> bool:
    """Return whether the local parts of all operands have the same rows. For a cast, only the first operand counts."""
    return operator.run is run_cast or all(
        isinstance(tensor, PlacedTensor)
        and tensor.window is None
        and (tensor is rows or (is_laid_out_like(tensor, rows) and has_rows_of(tensor, rows.shape)))
        for tensor in tensors_in(args, options)
    )


def _run_on_parts(operator: Operator, args: Arguments, options: Options, rows: PlacedTensor) -> Any:
    parts: dict[int, torch.Tensor] = {}

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in parts:
            is_example = operator.run is run_cast and tensor is not rows
            local = getattr(tensor, "_local_tensor", tensor) if is_example else enter_local(tensor)
            parts[id(tensor)] = local
        return parts[id(tensor)]

    def leave_rows(local: torch.Tensor) -> torch.Tensor:
        if rows.is_whole:
            return leave(local, rows.with_whole(local.detach()))
        local = local.contiguous()
        return leave(local, rows.with_rows(local.detach()))

    named = {name: map_tensors(value, part) for name, value in options.items()}
    return map_tensors(operator.function(*map_tensors(args, part), **named), leave_rows)


def _run_on_wholes(operator: Operator, args: Arguments, options: Options, own: OwnData | None) -> Any:
    """Call a function with every sharded tensor gathered. If an operand is this rank's own data, results are plain."""
    template = next(tensor for tensor in tensors_in(args, options) if isinstance(tensor, PlacedTensor))
    wholes: dict[int, tuple[torch.Tensor, int]] = {}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if own is not None and not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in wholes:
            plain = enter_whole(tensor, template)
            plain = plain if own is None else own.cast(tensor, plain)
            wholes[id(tensor)] = (plain, plain._version)
        return wholes[id(tensor)][0]

    def result_of(tensor: torch.Tensor) -> torch.Tensor:
        # A view of a gathered copy stays sharded, so that a write to it raises an error.
        if own is not None and not any(shares_memory(tensor, plain) for plain, _ in wholes.values()):
            return tensor
        return leave(tensor, template.with_whole(tensor.detach()))

    named = {name: map_tensors(value, whole) for name, value in options.items()}
    result = operator.function(*map_tensors(args, whole), **named)
    if any(plain._version != version for plain, version in wholes.values()):
        raise RuntimeError(
            f"{operator.name} writes into its arguments while autograd records: {_names(args, options)}. fix: put it "
            "under torch.no_grad()"
        )
    return map_tensors(result, result_of)


def _sum(name: str, source: PlacedTensor, dtype: torch.dtype | None, keepdim: bool) -> torch.Tensor:
    dtype = dtype or source.dtype
    part = enter_local(source).sum(dtype=accurate(dtype))
    total = _AddUp.apply(part, source.distribution)  # type: ignore[no-untyped-call]  # torch's stub
    total = total.view((1,) * len(source.shape)) if keepdim else total
    total = (total / source.shape.numel() if name == "mean" else total).to(dtype)
    return leave(total, source.with_whole(total.detach()))


# ---------------------------------------------------------------- conversions to and from plain tensors


def enter_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a sharded tensor, whose gradient becomes a gradient of ``tensor``."""
    return _enter(tensor, is_local=True)


def enter_whole(tensor: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
    """Return the whole of a tensor. The mean of its gradient over the ranks becomes a gradient of ``tensor``.

    Args:
        beside: as in ``whole_of``.
    """
    if isinstance(tensor, PlacedTensor):
        return tensor.whole() if tensor.window is not None else _enter(tensor, is_local=False)
    # PyTorch records what DTensor does.
    return tensor.full_tensor() if isinstance(tensor, DTensor) else whole_of(tensor, beside)


def leave(plain: torch.Tensor, result: PlacedTensor) -> PlacedTensor:
    """Return ``result``, whose local part is ``plain``, with the autograd history of ``plain``."""
    if not plain.requires_grad:
        return result
    left: PlacedTensor = _Leave.apply(plain, type(result), result._spec)  # type: ignore[no-untyped-call]  # torch's stub
    return left


def _enter(tensor: torch.Tensor, *, is_local: bool) -> torch.Tensor:
    convert_gradients_of(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        entered: torch.Tensor = _Enter.apply(tensor, is_local)  # type: ignore[no-untyped-call]  # torch's stub
    return entered


class _Enter(torch.autograd.Function):
    """Turn a sharded tensor into its local part, or into the whole plain tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: PlacedTensor, is_local: bool) -> torch.Tensor:
        ctx.is_local, ctx.origin, ctx.shape = is_local, tensor.distribution, tensor.shape
        ctx.tensor = weakref.ref(tensor if tensor.window is None else tensor.window.base)
        local = tensor._local_tensor
        plain = local if is_local else ctx.origin.gather(local, tensor.shape, tensor)
        return plain.view_as(plain)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        tensor = ctx.tensor()
        if tensor is not None:
            _REACHED[tensor] = torch._C._current_graph_task_id()
        if not ctx.is_local:
            # The mean, as in ``_AddUp``.
            gradient = ctx.origin.cut(ctx.origin.all_reduce(gradient.clone(), "avg"))
        return RowsGradient(gradient.contiguous(), ctx.origin, ctx.shape), None


class _Leave(torch.autograd.Function):
    """Turn a plain local part into its sharded tensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, kind: type[PlacedTensor], spec: DTensorSpec) -> PlacedTensor:
        ctx.spec, ctx.kind = spec, kind
        return kind(local.detach(), spec, requires_grad=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        wanted = Distribution(ctx.spec.mesh, ctx.spec.placements)
        if isinstance(gradient, RowsGradient):
            if gradient.distribution == wanted:
                return gradient.local, None, None
            return wanted.cut(gradient.distribution.gather(gradient.local, gradient.shape)), None, None
        if isinstance(gradient, DTensor) and is_laid_out_like(
            gradient, ctx.kind(gradient._local_tensor, ctx.spec, requires_grad=False)
        ):
            return gradient._local_tensor, None, None
        return wanted.cut(whole_of(gradient)), None, None


class _Write(torch.autograd.Function):
    """Write ``value`` to a sharded tensor, which then has the history of ``value``."""

    @staticmethod
    def forward(ctx: Any, target: PlacedTensor, value: PlacedTensor) -> PlacedTensor:
        target._local_tensor.copy_(part_of(value, target))
        ctx.mark_dirty(target)
        return target

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        # ``value`` left through ``_Leave``, whose backward gives the gradient the rows of ``value``.
        return None, gradient


class _AddUp(torch.autograd.Function):
    """Sum the ranks' parts; every rank gets the sum.

    Each rank then computes its own loss, and training minimizes the mean of the losses. Backward therefore averages.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, distribution: Distribution) -> torch.Tensor:
        ctx.distribution = distribution
        return distribution.all_reduce(part.clone(), "sum")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.distribution.all_reduce(gradient.clone(), "avg"), None


# ---------------------------------------------------------------- gradients inside autograd


class RowsGradient(torch.Tensor):
    """A gradient of a sharded tensor on its way from one function of this file to another.

    It is not a DTensor: the autograd engine adds gradients below the level at which a DTensor of ours keeps its rows.
    """

    local: torch.Tensor
    distribution: Distribution

    @staticmethod
    def __new__(cls, local: torch.Tensor, distribution: Distribution, shape: torch.Size) -> RowsGradient:
        """Wrap this rank's part of a gradient; ``shape`` is the global shape."""
        made: RowsGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=contiguous_stride(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.distribution = local, distribution
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's stub

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Arguments = (), options: Options | None = None) -> Any:  # type: ignore[override]  # torch's stub
        """Run the autograd engine's operators on the local parts.

        Raises:
            PlacementError: the operator is not one of ``_ON_GRADIENTS``, or its operands have different rows.
        """
        tensors = [item for item in tensors_in(args, {}) if item.ndim or isinstance(item, RowsGradient)]
        first = next(item for item in tensors if isinstance(item, RowsGradient))
        is_alike = all(
            isinstance(item, RowsGradient) and item.distribution == first.distribution and item.shape == first.shape
            for item in tensors
        )
        if function._schema.name not in _ON_GRADIENTS or not is_alike:
            raise PlacementError(
                f"{function} was called on a gradient of shape {tuple(first.shape)} on its way through backward. "
                "fix: register hooks with p.register_hook(...), which passes DTensors to the hook"
            )
        result = function(*map_tensors(args, lambda item: getattr(item, "local", item)), **(options or {}))
        return map_tensors(result, lambda local: cls(local, first.distribution, first.shape))


_ON_GRADIENTS = frozenset({"aten::add", "aten::detach", "aten::clone", "aten::alias", "aten::_to_copy", "aten::mul"})


def convert_gradients_of(tensor: Any) -> None:
    """Give hooks on a tensor, and ``.grad``, gradients of the tensor's own class. Call it before registering hooks."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor in _CONVERTED or not tensor.requires_grad:
            return
        _CONVERTED[tensor] = True
        tensor.register_hook(_converter(tensor))
        if tensor.is_leaf:
            tensor.register_post_accumulate_grad_hook(own_kind_of_grad)


def accept_plain_gradients(parameter: PlacedTensor) -> None:
    """Accept a plain gradient of a sharded parameter as this rank's gradient; ``.grad`` gets the mean over the ranks.

    PyTorch passes parameters directly to an ``autograd.Function``, which may return a plain gradient of the whole
    parameter. No code runs until such a gradient arrives. A parameter that is frozen when this is called is ignored.
    """
    if not _plainly(_REQUIRES_GRAD.__get__, (), (parameter,)):
        return
    # A weak reference, because a hook that held its own parameter would be a reference cycle.
    reference = weakref.ref(parameter)

    @unserializable_hook  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def convert(gradient: torch.Tensor) -> torch.Tensor:
        owner = reference()
        if owner is None or type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
            return gradient
        convert_gradients_of(owner)
        origin = owner.distribution
        rows = origin.cut(origin.all_reduce(gradient.clone(), "avg")).contiguous()
        return _converter(owner)(RowsGradient(rows, origin, owner.shape))

    with torch._C.DisableTorchFunctionSubclass():
        parameter.register_hook(convert)  # type: ignore[no-untyped-call]  # as above


def _converter(tensor: PlacedTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    kind, spec = type(tensor), tensor._spec
    # Ranks that replicate the parameter must keep equal values, so gradients are averaged over them.
    replicas = tensor.distribution.replicating_axes if tensor.is_leaf else []

    def convert(gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, RowsGradient):
            return gradient
        local = gradient.local.clone() if replicas else gradient.local
        for axis in replicas:
            read_reduce(local, axis, "avg")
        return kind(local, spec, requires_grad=False)

    return convert


def own_kind_of_grad(parameter: torch.Tensor) -> None:
    """Give ``.grad`` the class of its sharded tensor, as a hook that this library registers before the user's."""
    # The engine stores the gradient as a plain DTensor, or adds it to .grad. Both lose the class; the latter also loses
    # the rows.
    assert isinstance(parameter, PlacedTensor)
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _GRAD.__get__(parameter)
        if isinstance(gradient, DTensor) and not isinstance(gradient, PlacedTensor):
            _GRAD.__set__(parameter, parameter.with_local(gradient._local_tensor))


# ---------------------------------------------------------------- calls of backward

ASKED_CHECKS: list[Callable[[Sequence[Any], Sequence[Any]], None]] = []
"""Called with backward's start tensors and its ``inputs`` when gradients are requested for some tensors only."""


def run_backward(operator: Operator, args: Arguments, options: Options) -> Any:
    """Run ``backward`` or ``torch.autograd.grad`` where some start tensors or inputs are sharded.

    Backward starts from plain tensors, so that hooks run as without sharded ones.
    """
    bound = _signature(operator.function).bind(*args, **options)
    given, (first, *_) = bound.arguments, bound.signature.parameters
    second = {"self": "gradient", "tensors": "grad_tensors"}.get(first, "grad_outputs")
    roots, gradients = _plain_roots(given[first], given.get(second))
    given[first], given[second] = (roots[0], gradients[0]) if first == "self" else (roots, gradients)
    if given.get("inputs") is None:
        return operator.function(*bound.args, **bound.kwargs)
    given["inputs"] = _listed(given["inputs"])
    for check in ASKED_CHECKS:
        check(roots, given["inputs"])
    with torch._C.DisableTorchFunctionSubclass():
        return operator.function(*bound.args, **bound.kwargs)


_signature = functools.cache(inspect.signature)


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _plain_roots(tensors: Any, given: Any) -> tuple[list[Any], list[Any]]:
    """Return the tensors that backward starts from, and their initial gradients."""
    roots = _listed(tensors)
    gradients = _listed(given) if given is not None else [None] * len(roots)
    for index, (root, gradient) in enumerate(zip(roots, gradients, strict=True)):
        if isinstance(root, PlacedTensor) and gradient is None:
            roots[index] = enter_whole(root)
        elif isinstance(root, PlacedTensor):
            roots[index], gradients[index] = enter_local(root), part_of(gradient, root)
    return roots, gradients
