"""Functions that autograd records: plain tensors in between, so that backward meets no sharded operand.

A recorded function runs on plain parts (element-wise functions of tensors with the same rows, sums) or on whole ones.
Tensors enter through ``_Enter`` and leave through ``_Leave``; what happens between is PyTorch's own on plain tensors.
Gradients on their way from one to the other are ``RowsGradient``, because the autograd engine adds them up itself.

Backward starts from, and is asked for, sharded tensors too. Forward may not use a sharded parameter itself but a leaf
in its place, its gathered values. Who asks for the parameter's gradient wants that leaf's too, reduced over the ranks
(``LeafSource``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer.collectives import all_reduce
from dbuffer.dtensor.distribution import Distribution, contiguous_stride
from dbuffer.dtensor.elementwise_ops import accurate, find_reference, has_rows_of
from dbuffer.dtensor.gathered_ops import Arguments, Options, map_tensors, tensors_in
from dbuffer.dtensor.op_table import Kind, Operator
from dbuffer.dtensor.placed_tensor import PlacedTensor, aligned_local, is_laid_out_like, whole_of
from dbuffer.dtensor.reduction_ops import parse_reduction
from dbuffer.errors import PlacementError

__all__ = [
    "LeafSource",
    "convert_gradients_of",
    "enter_local",
    "enter_whole",
    "is_recorded",
    "leave",
    "run_backward",
    "run_gradients",
    "run_recorded",
    "set_leaf_source",
]

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
        if isinstance(reference, PlacedTensor) and _go_along(operator, args, options, reference):
            return _run_on_parts(operator, args, options, reference)
    if operator.kind is Kind.REDUCE and operator.name in ("sum", "mean"):
        reduction = parse_reduction(operator, args, options)
        source = args[0]
        if reduction is not None and isinstance(source, PlacedTensor) and len(reduction.dims) == len(source.shape):
            return _sum(operator.name, source, options.get("dtype"), reduction.keepdim)
    return _run_on_wholes(operator, args, options)


def _go_along(operator: Operator, args: Arguments, options: Options, reference: PlacedTensor) -> bool:
    """Whether the local parts of all operands go with each other; of a cast the first one alone counts."""
    if operator.kind is Kind.CAST:
        return reference is args[0]
    return all(
        isinstance(tensor, PlacedTensor)
        and tensor.window is None
        and (tensor is reference or (is_laid_out_like(tensor, reference) and has_rows_of(tensor, reference.shape)))
        for tensor in tensors_in(args, options)
    )


def _run_on_parts(operator: Operator, args: Arguments, options: Options, reference: PlacedTensor) -> Any:
    parts: dict[int, torch.Tensor] = {}

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if operator.kind is Kind.CAST and tensor is not reference:
            return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if id(tensor) not in parts:
            assert isinstance(tensor, PlacedTensor)
            parts[id(tensor)] = enter_local(tensor)
        return parts[id(tensor)]

    result = operator.function(*map_tensors(args, part), **{name: map_tensors(v, part) for name, v in options.items()})
    return map_tensors(result, lambda tensor: _leave_rows(tensor, reference))


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
    part = enter_local(source).sum(dtype=accurate(dtype))
    total = _AddUp.apply(part, source.distribution)  # type: ignore[no-untyped-call]  # torch's stub
    total = total.view((1,) * len(source.shape)) if keepdim else total
    total = total / source.shape.numel() if name == "mean" else total
    total = total.to(dtype)
    return leave(total, source.with_whole(total.detach()))


# ---------------------------------------------------------------- in and out of plain tensors


def _plain_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is none of ours, whole; PyTorch records what DTensor does."""
    if isinstance(tensor, PlacedTensor):
        return tensor.whole()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return whole_of(tensor)


def enter_local(tensor: PlacedTensor) -> torch.Tensor:
    """Return the local part; its gradient becomes one of ``tensor``."""
    return _enter(tensor, is_local=True)


def enter_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor; the mean over ranks of its gradient becomes one of ``tensor``."""
    if isinstance(tensor, PlacedTensor) and tensor.window is None:
        return _enter(tensor, is_local=False)
    return _plain_whole(tensor)


def leave(plain: torch.Tensor, result: PlacedTensor) -> PlacedTensor:
    """Return ``result``, which stands for ``plain`` (its local part), with the history of ``plain``."""
    if not plain.requires_grad:
        return result
    left: PlacedTensor = _Leave.apply(plain, type(result), result._spec)  # type: ignore[no-untyped-call]  # torch's stub
    return left


def _enter(tensor: PlacedTensor, *, is_local: bool) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = tensor.requires_grad
    if requires_grad:
        convert_gradients_of(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        entered: torch.Tensor = _Enter.apply(tensor, is_local)  # type: ignore[no-untyped-call]  # torch's stub
    return entered


class _Enter(torch.autograd.Function):
    """From a sharded tensor to its local part, or to the plain whole of it."""

    @staticmethod
    def forward(ctx: Any, tensor: PlacedTensor, is_local: bool) -> torch.Tensor:
        ctx.is_local, ctx.origin, ctx.shape = is_local, tensor.distribution, tensor.shape
        local = tensor._local_tensor
        plain = local if is_local else ctx.origin.gather(local, tensor.shape)
        return plain.view_as(plain)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not ctx.is_local:
            # A mean as in ``_AddUp``.
            gradient = ctx.origin.cut(ctx.origin.all_reduce(gradient.clone(), "avg"))
        return RowsGradient(gradient.contiguous(), ctx.origin, ctx.shape), None


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


# ---------------------------------------------------------------- where backward starts from, and for whom


class LeafSource(Protocol):
    """Who knows which leaf forward uses in the place of a sharded parameter."""

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return that leaf; None for a tensor that forward uses itself."""

    def serving(self, leaves: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Let autograd be asked for the gradients of leaves inside, on behalf of whom they stand for."""

    def reduce(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the mean over ranks of the leaves' gradients, in the parameters' rows; None where no rank has one."""


_source: list[LeafSource] = []


def set_leaf_source(source: LeafSource) -> None:
    """Ask ``source`` for the leaves of sharded parameters from now on."""
    _source[:] = [source]


def _leaves_of(inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the leaf of each input that has one, by the input's position."""
    found = ((index, _source[0].leaf_of(tensor)) for index, tensor in enumerate(inputs) if _source)
    return {index: leaf for index, leaf in found if leaf is not None}


def run_backward(operator: Operator, args: Arguments, options: Options) -> None:
    """Run ``backward`` from tensors of which some are sharded, or for inputs of which some are."""
    if operator.function is torch.Tensor.backward:
        _backward_from_one(*args, **options)
    else:
        _backward_from(*args, **options)


def _backward_from_one(
    root: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    _backward_from([root], [gradient], retain_graph, create_graph, inputs=inputs)


def _backward_from(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Start from plain tensors, so that hooks run as they would without sharded ones."""
    roots, gradients = _plain_roots(tensors, grad_tensors if grad_tensors is not None else grad_variables)
    if inputs is None:
        torch.autograd.backward(roots, gradients, retain_graph, create_graph)
        return
    listed = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if _leaves_of(listed):
        found = _gradients(roots, listed, gradients, retain_graph, create_graph, allow_unused=True)
        _accumulate(listed, found)
        return
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.backward(roots, gradients, retain_graph, create_graph, inputs=listed)


@torch.no_grad()
def _accumulate(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Do what autograd does with gradients of leaves, by hand."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is None:
            continue
        if tensor.grad is None:
            tensor.grad = gradient.to(tensor.dtype)
        else:
            tensor.grad.add_(gradient)
        for hook in list((tensor._post_accumulate_grad_hooks or {}).values()):
            hook(tensor)


def _plain_roots(tensors: Any, given: Any) -> tuple[list[Any], list[Any]]:
    """Return what backward starts from, and with which gradients."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    gradients = [given] if isinstance(given, torch.Tensor) else list(given or [None] * len(roots))
    for index, (root, gradient) in enumerate(zip(roots, gradients, strict=True)):
        if not isinstance(root, PlacedTensor):
            continue
        if gradient is None:
            roots[index] = enter_whole(root)
        else:
            roots[index], gradients[index] = enter_local(root), aligned_local(gradient, root)
    return roots, gradients


def run_gradients(operator: Operator, args: Arguments, options: Options) -> tuple[Any, ...]:
    """Run ``torch.autograd.grad``, where a sharded parameter stands for the leaf that forward uses in its place too."""
    return _gradients(*args, **options)


def _gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    listed = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    leaves = _leaves_of(listed)
    if leaves and (create_graph or options.get("is_grads_batched")):
        raise PlacementError(
            "torch.autograd.grad for sharded parameters with create_graph=True or is_grads_batched=True: forward used "
            "gathered weights that are given back, so nothing can be recorded. Keep the module unsharded whose second "
            "derivatives are wanted."
        )
    roots, given = _plain_roots(outputs, grad_outputs)
    with torch._C.DisableTorchFunctionSubclass():
        if not leaves:
            return torch.autograd.grad(roots, listed, given, retain_graph, create_graph, **options)
        asked = [*listed, *leaves.values()]
        with _source[0].serving(leaves.values()):
            found: list[torch.Tensor | None] = list(
                torch.autograd.grad(roots, asked, given, retain_graph, allow_unused=True)
            )
    direct = found[: len(listed)]
    reduced = _source[0].reduce([listed[index] for index in leaves], found[len(listed) :])
    for index, gradient in zip(leaves, reduced, strict=True):
        direct[index] = _added(direct[index], gradient)
    return tuple(_present(gradient, tensor, options) for gradient, tensor in zip(direct, listed, strict=True))


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other


def _present(gradient: torch.Tensor | None, tensor: torch.Tensor, options: Options) -> torch.Tensor | None:
    if gradient is not None:
        return gradient
    if options.get("materialize_grads"):
        return torch.zeros_like(tensor).detach()
    if not options.get("allow_unused"):
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} whose gradient is asked for was not used on any rank; pass "
            "allow_unused=True to get None for it"
        )
    return None
