"""Functions that autograd records: plain tensors in between, so that backward meets no sharded operand.

A recorded function runs on plain parts (element-wise functions, sums) or on plain whole tensors (the rest). Tensors
enter through ``_Enter`` and leave through ``_Leave``; what happens between is PyTorch's own on plain tensors. Gradients
on their way from one to the other are ``RowsGradient``, because the autograd engine adds them up without asking
anybody.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer.collectives import all_reduce
from dbuffer.dtensor.distribution import Distribution, contiguous_stride
from dbuffer.dtensor.elementwise_ops import find_reference
from dbuffer.dtensor.gathered_ops import Arguments, Options, map_tensors, tensors_in
from dbuffer.dtensor.op_table import Kind, Operator
from dbuffer.dtensor.placed_tensor import PlacedTensor, is_laid_out_like, whole_of
from dbuffer.dtensor.reduction_ops import parse_reduction
from dbuffer.errors import PlacementError

__all__ = ["convert_gradients_of", "enter_local", "enter_whole", "is_recorded", "leave", "run_recorded"]

# The tensors whose gradients are converted before users see them.
_CONVERTED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_recorded(args: Arguments, options: Options) -> bool:
    """Whether autograd wants to know of a call with these arguments."""
    if not torch.is_grad_enabled():
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(tensor.requires_grad for tensor in tensors_in(args, options))


def run_recorded(operator: Operator, args: Arguments, options: Options) -> Any:
    """Run a function so that backward through it is right.

    Raises:
        RuntimeError: it writes into a tensor, which only functions outside of autograd may do here.
    """
    if operator.is_in_place or options.get("inplace") or options.get("out") is not None:
        raise RuntimeError(
            f"{operator.name} writes into a sharded tensor, or from one that requires grad, while autograd records. "
            "Use torch.no_grad() around it, detach() what it reads, or use the variant that returns a new tensor."
        )
    if operator.kind is Kind.FOREACH or operator.kind is Kind.FOREACH_NORM:
        raise RuntimeError(f"{operator.name} has no gradient here; use torch.no_grad(), or one call per tensor")
    if operator.kind in (Kind.ROWS, Kind.CAST):
        reference = find_reference(operator, args, options)
        is_for_parts = operator.kind is Kind.ROWS or reference is args[0]
        if reference is not None and is_for_parts and _have_parts(reference, args, options):
            return _run_on_parts(operator, args, options, reference)
    if operator.kind is Kind.REDUCE and operator.name in ("sum", "mean"):
        reduction = parse_reduction(operator, args, options)
        source = args[0]
        if reduction is not None and isinstance(source, PlacedTensor) and len(reduction.dims) == len(source.shape):
            return _sum(operator.name, source, options.get("dtype"), reduction.keepdim)
    return _run_on_wholes(operator, args, options)


def _have_parts(reference: DTensor, args: Arguments, options: Options) -> bool:
    """Whether every operand has a part beside the reference's local part: not where only some dimensions are cut."""
    distribution = Distribution.of(reference)
    if distribution.is_whole or distribution.ragged is not None:
        return True
    return all(not tensor.shape or tensor.shape == reference.shape for tensor in tensors_in(args, options))


def _run_on_parts(operator: Operator, args: Arguments, options: Options, reference: DTensor) -> Any:
    template = next(tensor for tensor in tensors_in(args, options) if isinstance(tensor, PlacedTensor))
    parts: dict[int, torch.Tensor] = {}

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if operator.kind is Kind.CAST and tensor is not reference:
            return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if id(tensor) not in parts:
            parts[id(tensor)] = _enter_part(tensor, reference)
        return parts[id(tensor)]

    result = operator.function(*map_tensors(args, part), **{name: map_tensors(v, part) for name, v in options.items()})
    rows = reference if isinstance(reference, PlacedTensor) else template
    return map_tensors(result, lambda tensor: _leave_rows(tensor, rows))


def _leave_rows(local: torch.Tensor, rows: PlacedTensor) -> torch.Tensor:
    if rows.is_whole:
        return leave(local, rows.with_whole(local.detach()))
    local = local.contiguous()
    return leave(local, rows.with_rows(local.detach()))


def _run_on_wholes(operator: Operator, args: Arguments, options: Options) -> Any:
    template = next(tensor for tensor in tensors_in(args, options) if isinstance(tensor, PlacedTensor))
    wholes: dict[int, tuple[torch.Tensor, int]] = {}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in wholes:
            plain = enter_whole(tensor)
            wholes[id(tensor)] = (plain, plain._version)
        return wholes[id(tensor)][0]

    named = {name: map_tensors(value, whole) for name, value in options.items()}
    result = operator.function(*map_tensors(args, whole), **named)
    if any(plain._version != version for plain, version in wholes.values()):
        raise RuntimeError(f"{operator.name} writes into its arguments while autograd records; use torch.no_grad()")
    return map_tensors(result, lambda tensor: leave(tensor, template.with_whole(tensor.detach())))


def _sum(name: str, source: PlacedTensor, dtype: torch.dtype | None, keepdim: bool) -> torch.Tensor:
    dtype = dtype or source.dtype
    accurate = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    part = enter_local(source).sum(dtype=accurate)
    total = _AddUp.apply(part, source.distribution)  # type: ignore[no-untyped-call]  # torch's stub
    total = total.view((1,) * len(source.shape)) if keepdim else total
    total = total / source.shape.numel() if name == "mean" else total
    total = total.to(dtype)
    return leave(total, source.with_whole(total.detach()))


# ---------------------------------------------------------------- in and out of plain tensors


class _Use(enum.Enum):
    """How a recorded function uses an operand."""

    LOCAL = "its own local part"
    PART = "the part that goes with the reference's local part"
    SHARED = "the whole on every rank, for that rank's part of the result"
    WHOLE = "the whole on every rank, for the whole result"


def _enter_part(tensor: torch.Tensor, reference: DTensor) -> torch.Tensor:
    """Return the plain part of an operand that goes with the reference's local part; see ``ragged_rows.operand``."""
    placed = isinstance(tensor, PlacedTensor) and tensor.window is None
    if placed and isinstance(tensor, PlacedTensor) and _goes_along(tensor, reference):
        return _enter(tensor, _Use.LOCAL, None)
    distribution = Distribution.of(reference)
    plain = tensor if placed else _plain_whole(tensor)
    if distribution.is_whole:
        return _enter(plain, _Use.WHOLE, None)
    if not isinstance(tensor, DTensor):
        distribution.check_alike(plain.detach())
    has_rows = len(tensor.shape) == len(reference.shape) and tensor.shape[0] == reference.shape[0]
    use = _Use.PART if has_rows and len(tensor.shape) else _Use.SHARED
    return _enter(plain, use, distribution)


def _goes_along(tensor: PlacedTensor, reference: DTensor) -> bool:
    if tensor is reference:
        return True
    if not is_laid_out_like(tensor, reference):
        return False
    return tensor.is_whole or (len(tensor.shape) == len(reference.shape) and tensor.shape[0] == reference.shape[0])


def _plain_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is none of ours, whole; PyTorch records what DTensor does."""
    if isinstance(tensor, PlacedTensor):
        return tensor.whole()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return whole_of(tensor)


def enter_local(tensor: PlacedTensor) -> torch.Tensor:
    """Return the local part; its gradient becomes one of ``tensor``."""
    return _enter(tensor, _Use.LOCAL, None)


def enter_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor; its gradient, which must be the same on all ranks, becomes one of ``tensor``."""
    if isinstance(tensor, PlacedTensor) and tensor.window is None:
        return _enter(tensor, _Use.WHOLE, None)
    return _plain_whole(tensor)


def leave(plain: torch.Tensor, result: PlacedTensor) -> PlacedTensor:
    """Return ``result``, which stands for ``plain`` (its local part), with the history of ``plain``."""
    if not plain.requires_grad:
        return result
    left: PlacedTensor = _Leave.apply(plain, type(result), result._spec)  # type: ignore[no-untyped-call]  # torch's stub
    return left


def _enter(tensor: torch.Tensor, use: _Use, reference: Distribution | None) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = tensor.requires_grad
    if requires_grad and isinstance(tensor, PlacedTensor):
        convert_gradients_of(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        entered: torch.Tensor = _Enter.apply(tensor, use, reference)  # type: ignore[no-untyped-call]  # torch's stub
    return entered


class _Enter(torch.autograd.Function):
    """From a sharded (or plain, whole) tensor to a plain part or the plain whole of it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, use: _Use, reference: Distribution | None) -> torch.Tensor:
        ctx.use, ctx.reference = use, reference
        ctx.origin, ctx.shape = None, tensor.shape
        if isinstance(tensor, PlacedTensor):
            ctx.origin = tensor.distribution
        local = tensor._local_tensor if isinstance(tensor, PlacedTensor) else tensor
        if use is _Use.LOCAL:
            return local.view_as(local)
        whole = local if ctx.origin is None else ctx.origin.gather(local, tensor.shape)
        if use is _Use.PART and reference is not None:
            whole = reference.cut(whole)
        return whole.view_as(whole)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        origin, reference = ctx.origin, ctx.reference
        if ctx.use is _Use.PART:
            gradient = reference.gather(gradient.contiguous(), ctx.shape)
        elif ctx.use is _Use.SHARED:
            # Each rank has seen only its own rows of the result.
            gradient = reference.all_reduce(gradient.clone(), "sum")
        if origin is None:
            return gradient, None, None
        if ctx.use is not _Use.LOCAL:
            # A mean as in ``_AddUp``; after PART and SHARED, which are alike on all ranks, there is nothing to average.
            whole = origin.all_reduce(gradient.clone(), "avg") if ctx.use is _Use.WHOLE else gradient
            gradient = origin.cut(whole)
        return RowsGradient(gradient.contiguous(), origin, ctx.shape), None, None


class _Leave(torch.autograd.Function):
    """From a plain part to the sharded tensor that it is the local part of."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, kind: type[PlacedTensor], spec: DTensorSpec) -> PlacedTensor:
        ctx.spec, ctx.kind = spec, kind
        return kind(local.detach(), spec, requires_grad=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        wanted = Distribution(ctx.spec.mesh, ctx.spec.placements)
        if isinstance(gradient, RowsGradient) and gradient.distribution == wanted:
            return gradient.local, None, None
        if isinstance(gradient, RowsGradient):
            whole = gradient.distribution.gather(gradient.local, gradient.shape)
        elif isinstance(gradient, DTensor) and is_laid_out_like(
            gradient, ctx.kind(gradient._local_tensor, ctx.spec, requires_grad=False)
        ):
            return gradient._local_tensor, None, None
        else:
            whole = whole_of(gradient)
        return wanted.cut(whole), None, None


class _AddUp(torch.autograd.Function):
    """The sum of what the ranks have, on all of them.

    Each rank goes its own way from there to its loss, and trained is the mean of the losses: backward takes the mean.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, distribution: Distribution) -> torch.Tensor:
        ctx.distribution = distribution
        return distribution.all_reduce(part.clone(), "sum")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.distribution.all_reduce(gradient.clone(), "avg"), None


# ---------------------------------------------------------------- gradients on their way


class RowsGradient(torch.Tensor):
    """A gradient of a sharded tensor between two functions of this file.

    It is no DTensor, because the autograd engine adds gradients below the level at which ours keep their rows.
    """

    local: torch.Tensor
    distribution: Distribution

    @staticmethod
    def __new__(cls, local: torch.Tensor, distribution: Distribution, shape: torch.Size) -> RowsGradient:
        """Wrap this rank's part of a gradient of a global shape."""
        made: RowsGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=contiguous_stride(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.distribution = local, distribution
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's stub

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Arguments = (), options: Options | None = None) -> Any:  # type: ignore[override]  # torch's stub
        """Compute on the local parts what the engine does with gradients.

        Raises:
            PlacementError: anything but an element-wise function of gradients with the same rows.
        """
        gradients = [item for item in tensors_in(args, {}) if isinstance(item, RowsGradient)]
        first = gradients[0]
        others = [item for item in tensors_in(args, {}) if not isinstance(item, RowsGradient) and item.ndim]
        is_alike = all(item.distribution == first.distribution and item.shape == first.shape for item in gradients)
        if function._schema.name not in _ON_GRADIENTS or others or not is_alike:
            raise PlacementError(
                f"{function} was called on a gradient of shape {tuple(first.shape)} on its way through backward; "
                "register hooks with p.register_hook, which hands out DTensors"
            )
        result = function(*map_tensors(args, lambda item: getattr(item, "local", item)), **(options or {}))
        return map_tensors(result, lambda local: cls(local, first.distribution, first.shape))


_ON_GRADIENTS = frozenset({"aten::add", "aten::detach", "aten::clone", "aten::alias", "aten::_to_copy", "aten::mul"})


def convert_gradients_of(tensor: PlacedTensor) -> None:
    """Make hooks on a tensor, and ``.grad``, get gradients of its own kind; called before hooks are registered."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor in _CONVERTED or not tensor.requires_grad:
            return
        _CONVERTED[tensor] = True
        tensor.register_hook(_converter(tensor))  # type: ignore[no-untyped-call]  # torch's stub
        if tensor.is_leaf:
            tensor.register_post_accumulate_grad_hook(_own_kind_of_grad)  # type: ignore[no-untyped-call]  # torch's stub


def _converter(tensor: PlacedTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    kind, spec = type(tensor), tensor._spec
    # What every rank of some axes holds must stay alike on them, whatever each one's loss made of it.
    replicas = tensor.distribution.replicating_axes if tensor.is_leaf else []

    def convert(gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, RowsGradient):
            return gradient
        local = gradient.local.clone() if replicas else gradient.local
        for axis in replicas:
            all_reduce(local, axis, "avg")
        return kind(local, spec, requires_grad=False)

    return convert


def _own_kind_of_grad(parameter: torch.Tensor) -> None:
    # The engine stores what it got as a DTensor, or adds it to .grad; both forget the kind, and the latter the rows.
    assert isinstance(parameter, PlacedTensor)
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and not isinstance(gradient, PlacedTensor):
            parameter.grad = parameter.with_local(gradient._local_tensor)
