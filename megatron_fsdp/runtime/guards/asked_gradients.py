"""Gradients of parameters that somebody asks for by name, ``torch.autograd.grad`` and ``backward(inputs=...)``.

Forward has used gathered weights: of the sharded ones autograd knows nothing, and of those it has this rank's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.guards.calls_to_come import is_run
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter

__all__ = ["refuse_gathered", "refuse_sharded"]


def refuse_sharded(roots: Sequence[torch.Tensor], asked: Iterable[torch.Tensor]) -> None:
    """Refuse to be asked for gradients of sharded parameters whose gathered weights the graph leads to.

    Raises:
        StateError: they are.
    """
    found: dict[int, tuple[ParameterGroup, int]] = {}
    for tensor in asked:
        group = group_of_parameter(tensor)
        for index, param in enumerate(group.fsdp_params.sharded_params if group is not None else ()):
            if group is not None and param is tensor:
                found[id(group.fsdp_params.unsharded_params[index])] = group, index
    nodes: list[Any] = [root.grad_fn for root in roots] if found else []
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            leaf = id(getattr(node, "variable", None))
            if leaf in found:
                _refuse(*found[leaf])


def refuse_gathered(groups: Iterable[ParameterGroup]) -> None:
    """Refuse, at the end of a backward, that it was asked for gradients of gathered weights by name.

    Raises:
        StateError: it was: these are this rank's alone.
    """
    for group in groups:
        if math.prod(axis.size for axis in group.main_weight.axes) > 1:
            params = group.fsdp_params
            for index, (param, leaf) in enumerate(zip(params.sharded_params, params.unsharded_params, strict=True)):
                if param.requires_grad and leaf.requires_grad and is_run(leaf) is None:
                    _refuse(group, index)


def _refuse(group: ParameterGroup, index: int) -> NoReturn:
    raise StateError(
        f"unit {group.name!r}: torch.autograd.grad or backward(inputs=...) was asked for the gradient of parameter "
        f"{list(group.parameters)[index]!r}, of which forward used gathered values: autograd has this rank's alone. "
        "Call backward() and read .grad, or keep the module unsharded."
    )
