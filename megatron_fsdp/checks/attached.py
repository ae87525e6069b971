"""AttachedGuards: what the steps of one root hand on to other rooms."""

from __future__ import annotations

from collections.abc import Iterable

from dbuffer.dtensor.autograd import ASKED_CHECKS
from dbuffer.dtensor.reads import NAMERS
from megatron_fsdp.checks import added_params, hidden_outputs, lent_weights, missing_gradients, read_names, refusals
from megatron_fsdp.checks.agreement import FirstUse
from megatron_fsdp.engine import unsharded_param
from megatron_fsdp.engine.backward import Backward
from megatron_fsdp.engine.freshness import hear_of_steps
from megatron_fsdp.engine.root import Schedule
from megatron_fsdp.engine.unit import Unit
from megatron_fsdp.lifecycle import make_param_group, param_changes, profiler_ranges
from megatron_fsdp.variants.memory_slots import BufferPools

__all__ = ["AttachedGuards", "attach_root"]

ASKED_CHECKS.append(refusals.refuse_sharded)
NAMERS.append(read_names.name_of)


class AttachedGuards:
    """The guards of one root, asleep until a step calls one."""

    refuse_replaced = staticmethod(param_changes.refuse_replaced)
    follow_requires_grad = staticmethod(make_param_group.follow_requires_grad)
    follow_flags = staticmethod(make_param_group.follow_flags)
    walk = staticmethod(added_params.walk)
    refuse_held_change = staticmethod(refusals.refuse_held_change)
    refuse_changed = staticmethod(unsharded_param.refuse_change)
    emit_ranges = staticmethod(profiler_ranges.emit_ranges)
    refuse_backward = staticmethod(refusals.refuse_backward)
    refuse_gathered = staticmethod(refusals.refuse_gathered)
    watch_hidden = staticmethod(hidden_outputs.watch_hidden)
    without_weights = staticmethod(lent_weights.without_weights)

    def __init__(self) -> None:
        self.first_use = FirstUse()
        self.missing = missing_gradients.MissingGradients(self.first_use.tokens)


def attach_root(root: Unit, units: Iterable[Unit]) -> None:
    """Put units under a schedule of their own, of which ``root`` is the outermost."""
    hear_of_steps(refusals.refuse_stale)
    schedule = Schedule()
    schedule.guards, schedule.pools = AttachedGuards(), BufferPools()
    schedule.adopt(root, units)
    Backward(schedule)
