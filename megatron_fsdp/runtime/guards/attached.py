"""AttachedGuards: what the steps of one root hand on to other rooms (``Guards``)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

from torch import nn

from megatron_fsdp.runtime.grads.last_reduction import LastReductions
from megatron_fsdp.runtime.guards import (
    added_params,
    asked_gradients,
    calls_to_come,
    missing_gradients,
    refusals,
    replaced_params,
)
from megatron_fsdp.runtime.guards.agreement import FirstUse
from megatron_fsdp.runtime.lifecycle import make_unit, profiler_ranges
from megatron_fsdp.runtime.step.backward import Backward
from megatron_fsdp.runtime.step.schedule import Guards, Schedule
from megatron_fsdp.runtime.step.unit import Unit, alive
from megatron_fsdp.runtime.weights import gathered_weight
from megatron_fsdp.runtime.weights.memory_slots import BufferPools

__all__ = ["AttachedGuards", "attach_root"]


class AttachedGuards(Guards):
    """The guards of one root, asleep until a step calls one.

    Args:
        schedule: of the root, referred to weakly.
    """

    admit = staticmethod(replaced_params.admit)
    settle = staticmethod(functools.partial(replaced_params.admit, is_call=False))
    follow_requires_grad = staticmethod(make_unit.follow_requires_grad)
    walk = staticmethod(added_params.walk)
    refuse_changed = staticmethod(gathered_weight.refuse_uncounted)
    note_reads = staticmethod(refusals.note_reads)
    emit_ranges = staticmethod(profiler_ranges.emit_ranges)
    refuse_recorded = staticmethod(refusals.refuse_recorded)
    refuse_stepped = staticmethod(refusals.refuse_stepped)
    refuse_reads = staticmethod(refusals.refuse_reads)
    refuse_gathered = staticmethod(asked_gradients.refuse_gathered)
    is_to_come = staticmethod(calls_to_come.is_to_come)
    brings_gradients = staticmethod(calls_to_come.brings_gradients)

    def __init__(self, schedule: Schedule) -> None:
        # Weak: a circle would keep slots until the garbage collector comes.
        self._schedule = weakref.ref(schedule)
        self.first_use = FirstUse(self._schedule)
        self.last = LastReductions()
        self.armed: list[weakref.ref[Unit]] = []
        self.missing = missing_gradients.MissingGradients(self.first_use.tokens)

    def _served(self) -> Schedule:
        schedule = self._schedule()
        assert schedule is not None
        return schedule

    def before_recomputation(self, unit: Unit, module: nn.Module) -> None:
        """Gather a unit for a forward inside of backward."""
        calls_to_come.before_recomputation(unit.backward, self._served(), unit, module)

    def arm(self) -> None:
        """Watch what modules inside of the units return, until that is seen to be of no use."""
        self.armed = [unit.reference for unit in self._served().units() if unit.inner_outputs.arm()]

    def disarm(self) -> None:
        """Watch it no more, where that was seen."""
        left = [unit.reference for unit in alive(self.armed) if not unit.inner_outputs.disarm()]
        root = self._served().root_ref()
        for tree in root.trees.values() if root is not None and len(left) < len(self.armed) else ():
            tree.num_hooks = sum(map(len, tree.hooks))
        self.armed = left


def attach_root(root: Unit, units: Iterable[Unit]) -> None:
    """Put units under a schedule of their own, of which ``root`` is the outermost."""
    schedule = Schedule()
    schedule.guards, schedule.pools = AttachedGuards(schedule), BufferPools()
    schedule.adopt(root, units)
    schedule.guards.arm()
    Backward(schedule)
