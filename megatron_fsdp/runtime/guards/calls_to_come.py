"""Forward calls inside of a backward, and those that the graph under way may still lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from megatron_fsdp.runtime.step.backward import Backward
from megatron_fsdp.runtime.step.schedule import Schedule
from megatron_fsdp.runtime.step.unit import Call, Unit

__all__ = ["before_recomputation", "brings_gradients", "is_run", "is_to_come"]


def is_to_come(
    calls: Sequence[Call], unit: Unit, end: float, entered: Mapping[int, Call], units: Iterable[Unit]
) -> bool:
    """Whether the graph that autograd is going through leads to calls of a unit that it has not entered yet.

    That a call is alive does not say so: what keeps it (a log, a cycle, a traceback) is a rank's own affair. A
    gradient still to come does, the unit's or, as this rank may have used none of its parameters there, that of
    a unit which backward has passed already, if of all calls of that one the latest still to be entered ran in the same
    pass (docs/design/order.md).

    Args:
        calls: at least one. end: when the latest of them began. entered: by units, the oldest call that backward has
            come to. units: of the same root.
    """
    if _awaits_gradients(unit):
        return True
    passes = {id(call.trail) for call in calls}
    return any(
        _awaits_gradients(other)
        for other in units
        if id(other) in entered
        and entered[id(other)].first_begin > end
        and any(id(call.trail) in passes for call in other.calls_not_entered(other.backward.number)[-1:])
    )


def brings_gradients(units: Iterable[Unit]) -> bool:
    """Whether the graph that autograd is going through brings, or may bring, a gradient that has not come yet."""
    return any(map(_awaits_gradients, units)) or _leads_to_checkpoint()


def _leads_to_checkpoint() -> bool:
    """Whether a reentrant checkpoint is still to come, PyTorch's or Megatron's; nobody knows what it brings."""
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


def _awaits_gradients(unit: Unit) -> bool:
    """Whether the graph that autograd is going through brings gradients that have not come yet."""
    return any(
        not came and param.requires_grad and is_run(param) is True
        for group in unit.groups
        if group.gradients is not None
        for param, came in zip(group.fsdp_params.unsharded_params, group.fsdp_params.came, strict=True)
    )


def is_run(leaf: torch.Tensor) -> bool | None:
    """Whether the graph that autograd is going through accumulates a gradient of a leaf.

    None where it returns it: ``torch.autograd.grad`` was asked for it.
    """
    # The node is found by a view that is never read, so whether the leaf has memory now does not matter.
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def before_recomputation(unit: Unit, module: nn.Module) -> None:
    """Gather a unit for a forward inside of backward."""
    backward: Backward = unit.backward
    schedule: Schedule = unit.schedule
    # Reentrant checkpointing runs the first forward without a graph, so no output is watched, and this is where
    # backward is seen to move on. Units whose outputs are watched are left by the watch.
    backward.begin()
    for other in backward.latest_first():
        if other is not unit and not _is_watched(backward, other) and unit.reference not in other.inner:
            backward.leave_unit(other)
    if unit.open_call is not None or not _is_watched(backward, unit):
        schedule.open_call(unit, module)
        if unit.open_call is not None:
            backward.repeated[id(unit)] = unit.open_call
            # Not reentrant, the call in the graph is the first one.
            unit.open_call.is_due = not unit.calls_not_entered(backward.number)
        schedule.refuse_replaced_params(unit)
    backward.active[id(unit)] = unit.reference
    schedule.unshard(unit, check=False)


def _is_watched(backward: Backward, unit: Unit) -> bool:
    """Whether a hook on outputs says, or will say, that backward is in a call of the unit."""
    return _is_inside(backward, unit) or backward.awaits_call(unit)


def _is_inside(backward: Backward, unit: Unit) -> bool:
    """Whether backward is in a call that it has come to in the graph under way, or comes to one computed again."""
    repeated = backward.repeated.get(id(unit))
    if repeated is not None and not repeated.entered:
        return True
    first = backward.entered.get(id(unit))
    return first is not None and id(unit) in backward.active and first.task <= torch._C._current_graph_task_id()
