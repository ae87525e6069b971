"""Backwards that are refused by name: recorded ones, and those through weights that are not those of forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.step.pytree import iterate_tensors
from megatron_fsdp.runtime.step.unit import Call, Unit

__all__ = ["note_reads", "refuse_reads", "refuse_recorded", "refuse_stepped"]


def refuse_recorded(unit: Unit) -> NoReturn:
    """Refuse a backward that is itself recorded.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"unit {unit.name!r}: backward with create_graph=True is not supported: the recorded graph would "
        "use released weights. Keep the module whose second derivatives are wanted unsharded."
    )


def refuse_stepped(call: Call) -> None:
    """Refuse the backward of a call whose unit's weights changed after it; asked where an optimizer has stepped since.

    Raises:
        StateError: they did.
    """
    unit = call.unit
    for group in unit.groups:
        group.freshness.is_changed()
        if group.freshness.changed_at > call.moment:
            raise StateError(
                f"unit {unit.name!r}: an optimizer has stepped its weights ({next(iter(group.parameters))!r} or others "
                "of that group) between a forward and the backward through it: gradients would be of the old "
                "activations and the new weights. Call backward() before optimizer.step(), or run forward again after "
                "it."
            )


def note_reads(call: Call, output: Any) -> None:
    """Note which weight the backward of a call would read, as its graph has saved it.

    ``set_unshard_in_backward(False)`` promises that it reads none.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        saved = (name for tensor in _saved(call, output) for name in _names_over(call.unit, tensor))
        call.reads = next(saved, None)


def refuse_reads(call: Call) -> NoReturn:
    """Refuse the backward of a call that reads weights which were given back.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"unit {call.unit.name!r}: its backward reads parameter {call.reads!r}, which was not gathered again because "
        "of set_unshard_in_backward(False). That is for look-ups and for what needs no gradient of its input; or keep "
        "the weights: set_reshard_after_forward(False) on the unit."
    )


def _saved(call: Call, output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that operators saved since the call began."""
    nodes = [tensor.grad_fn for tensor in iterate_tensors(output)]
    seen = set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < call.first_node:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for value in (*getattr(node, "saved_tensors", ()), *(_value(node, name) for name in names)):
            if isinstance(value, torch.Tensor):
                yield value


def _value(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError:
        # Changed in place since, which is autograd's to say.
        return None


def _names_over(unit: Unit, tensor: torch.Tensor) -> Iterator[str]:
    """Yield the parameters in whose gathered memory a tensor begins."""
    for group in unit.groups:
        for name, weight in zip(group.parameters, group.fsdp_params.unsharded_params, strict=True):
            begin = tensor.data_ptr() - weight.data_ptr()
            if not group.rests_whole and 0 <= begin < weight.numel() * weight.itemsize:
                yield name
