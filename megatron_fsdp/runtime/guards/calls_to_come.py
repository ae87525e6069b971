"""Forward calls that the graph under way may lead to, where a backward has to know before it leaves a unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_fsdp.runtime.step.unit import Call, Unit

__all__ = ["encloses", "is_to_come"]


def is_to_come(
    calls: Sequence[Call], unit: Unit, end: float, entered: Mapping[int, Call], units: Iterable[Unit]
) -> bool:
    """Whether the graph that autograd is going through leads to calls of a unit that it has not entered yet.

    That a call is alive does not say so: what keeps it (a log, a cycle, a traceback) is a rank's own affair. A
    gradient still to come does, the unit's or, as this rank may have used none of its parameters there, that of
    a unit which backward has passed already and which ran in the same pass (docs/design/order.md).

    Args:
        calls: at least one. end: when the latest of them began. entered: by units, the oldest call that backward has
            come to. units: of the same root.
    """
    if awaits_gradients(unit):
        return True
    passes = {id(call.trail) for call in calls}
    return any(
        awaits_gradients(other)
        for other in units
        if id(other) in entered
        and entered[id(other)].first_begin > end
        and any(id(call.trail) in passes for call in other.calls_not_entered(other.backward.number))
    )


def awaits_gradients(unit: Unit) -> bool:
    """Whether the graph that autograd is going through brings gradients that have not come yet."""
    return any(
        not came and param.requires_grad and _is_in_graph(param)
        for group in unit.groups
        if group.gradients is not None
        for param, came in zip(group.fsdp_params.unsharded_params, group.fsdp_params.came, strict=True)
    )


def _is_in_graph(leaf: torch.Tensor) -> bool:
    # Nothing is computed, so whether the leaf has memory now does not matter.
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # ``torch.autograd.grad`` returns this leaf's gradient and accumulates none.
        return False


def encloses(outer: Unit, inner: Unit) -> bool:
    """Whether a module of ``inner`` lies below one of ``outer``."""
    wanted = {id(module()) for module in inner.modules}
    return any(
        id(child) in wanted
        for reference in outer.modules
        if (module := reference()) is not None
        for child in module.modules()
    )
