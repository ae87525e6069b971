"""Where backward starts from, and for whom: roots and inputs that are sharded tensors.

Forward may not use a sharded parameter itself but a leaf in its place, its gathered values. Who asks for the
parameter's gradient wants that leaf's too, reduced over the ranks (``LeafSource``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from dbuffer.dtensor.autograd import enter_local, enter_whole
from dbuffer.dtensor.gathered_ops import Arguments, Options
from dbuffer.dtensor.op_table import Operator
from dbuffer.dtensor.placed_tensor import PlacedTensor, aligned_local
from dbuffer.errors import PlacementError

__all__ = ["LeafSource", "run_backward", "run_gradients", "set_leaf_source"]


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
    from_leaves = found[len(listed) :]
    reduced = _source[0].reduce([listed[index] for index in leaves], from_leaves)
    for index, gradient in zip(leaves, reduced, strict=True):
        direct[index] = _sum(direct[index], gradient)
    return tuple(_present(gradient, tensor, options) for gradient, tensor in zip(direct, listed, strict=True))


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
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
