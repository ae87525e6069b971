"""Questions about the graph that autograd is running: does backward reach a unit again, and do gradients still come?

Every rank must answer alike, although ranks use different parameters and keep different outputs alive
(docs/design/order.md, "Which calls belong to a backward").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from megatron_fsdp.engine.unit import Call, Root, Unit, task_id

__all__ = ["awaits_call", "brings_gradients", "is_run", "is_watched"]


def awaits_call(unit: Unit, end: float = math.inf) -> bool:
    """Return whether this backward will reach another call of the unit that began at or before ``end``."""
    state = unit.root.backward
    repeated = state.repeated.get(unit.reference) if state.repeated else None
    if repeated is not None and repeated.is_expected and not repeated.entered_in and repeated.begin <= end:
        return True
    calls = unit.calls_to_come(end)
    return bool(calls) and (_awaits_gradients(unit) or _another_unit_proves(unit.root, calls, end))


def _another_unit_proves(root: Root, calls: Sequence[Call], end: float) -> bool:
    """Return whether a gradient of another unit proves that this backward will reach one of these calls.

    That a call is alive proves nothing: one rank alone may keep it in a log, a cycle or a traceback. A gradient of the
    call's unit that has not come yet proves it, but this rank may have used none of the unit's parameters. Then a
    gradient proves it that has not come yet of a unit that backward has passed, and whose next call to come ran in the
    same forward pass.

    Args:
        calls: pending calls of one unit that began at or before ``end``; at least one.
    """
    passes = {call.forward_pass for call in calls if call.forward_pass is not None}
    for other in root.units():
        reached = root.backward.oldest_calls.get(other.reference)
        has_passed = reached is not None and reached.first_begin() > end
        if has_passed:
            to_come = other.calls_to_come()
            if to_come and to_come[-1].forward_pass in passes and _awaits_gradients(other):
                return True
    return False


def is_watched(unit: Unit) -> bool:
    """Return whether a hook on an output tells, now or later, that backward is in a call of the unit."""
    return _is_inside(unit) or awaits_call(unit)


def _is_inside(unit: Unit) -> bool:
    """Return whether backward is inside a call of the unit, or about to enter a recomputed one."""
    state = unit.root.backward
    repeated = state.repeated.get(unit.reference)
    if repeated is not None and not repeated.entered_in:
        return True
    first = state.oldest_calls.get(unit.reference)
    # Backward has left a call that it entered in a graph inside of this one, which has a higher number.
    return first is not None and unit.reference in state.active and first.task <= task_id()


# ---------------------------------------------------------------- gradients


def brings_gradients(units: Iterable[Unit]) -> bool:
    """Return whether the graph brings, or may bring, a gradient of these units that has not come yet."""
    return any(map(_awaits_gradients, units)) or _leads_to_checkpoint()


def _awaits_gradients(unit: Unit) -> bool:
    """Return whether the graph accumulates a gradient of the unit that has not come yet."""
    return any(
        not came and param.requires_grad and is_run(param) is True
        for group in unit.groups
        if group.gradient_buffer is not None
        for param, came in zip(group.fsdp_params.unsharded_params, group.fsdp_params.came, strict=True)
    )


def is_run(leaf: torch.Tensor) -> bool | None:
    """Return whether the graph accumulates a gradient of a leaf.

    Returns:
        None if the graph returns the gradient instead, to a caller of ``torch.autograd.grad``.
    """
    # Autograd finds the node through a view that is never read, so the leaf may be without memory now.
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def _leads_to_checkpoint() -> bool:
    """Return whether the graph leads to a reentrant checkpoint, PyTorch's or Megatron's. Its gradients are unknown."""
    to_see: list[torch.autograd.graph.Node | None] = [torch._C._current_autograd_node()]
    seen: set[torch.autograd.graph.Node] = set()
    while to_see:
        node = to_see.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        to_see += [following for following, _ in node.next_functions]
    return False
