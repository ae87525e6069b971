"""Ranges in torch.profiler's traces around gathers, reductions and the waits for them, under FSDP2's names.

The first forward of a root under a profiler starts the listener; without a profiler this module is never imported.
``torch.autograd.profiler.emit_nvtx()`` makes the same ranges NVTX ranges.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.autograd import profiler
from torch.profiler import record_function

from dbuffer.events import listeners
from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.unit import Call, Unit

__all__ = ["ProfilerRanges"]

ISSUES = {"gather": "FSDP::all_gather", "reduce": "FSDP::post_backward_reduce"}
WAITS = {"gather": "FSDP::all_gather_wait", "reduce": "FSDP::post_backward_rs_wait"}
# The last reduction counts as a reduction.
_BEGINS = {action: {**of, "last": of["reduce"]} for action, of in (("issue", ISSUES), ("wait", WAITS))}
_ENDS = {"issued", "waited"}
# On a CPU the host waits for a gather of weights that rest whole, and for the last reduction that no lane does.
_BLOCKS = {"refresh": WAITS["gather"], "final": WAITS["reduce"]}
_BLOCK_ENDS = {"refreshed", "completed"}


class _Ranges:
    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.open: list[record_function] = []
        self.blocking, self.is_blocked = "", False

    def hear(self, action: str, subject: Any) -> None:
        """Begin or end a range; whatever begins ends before the engine returns, so ranges nest."""
        if not (self.open or profiler._is_profiler_enabled):
            listeners.remove(self.hear)
        elif action in _BEGINS:
            self.blocking = ""
            self._begin(f"{_BEGINS[action][subject.lane]} ({self.names.get(subject.owner, '')})")
        elif action in _BLOCKS:
            self.blocking = f"{_BLOCKS[action]} ({self.names.get(id(subject), '')})"
        elif action == "collective" and self.blocking:
            self._begin(self.blocking)
            self.blocking, self.is_blocked = "", True
        elif action in _ENDS or (action in _BLOCK_ENDS and self.is_blocked):
            self.is_blocked = self.is_blocked and action in _ENDS
            if self.open:
                self.open.pop().__exit__(None, None, None)

    def _begin(self, name: str) -> None:
        self.open.append(record_function(name))
        self.open[-1].__enter__()


_ranges = _Ranges()


class ProfilerRanges(StepHooks[Unit, Call]):
    """Begins to emit ranges when a forward of the root runs under a profiler."""

    def on_root_forward(self, unit: Unit, module: nn.Module) -> None:
        """Emit ranges for all units of the root, where a profiler records."""
        if profiler._is_profiler_enabled:
            _emit_ranges(unit.root.units())


def _emit_ranges(units: Iterable[Unit]) -> None:
    """Emit ranges for the gathers and reductions of these units until the profiler stops."""
    _ranges.names |= {id(each): unit.name for unit in units for each in (unit, *unit.groups)}
    # Ranges that an exception interrupted have no end event.
    _ranges.open.clear()
    _ranges.blocking, _ranges.is_blocked = "", False
    if _ranges.hear not in listeners:
        listeners.append(_ranges.hear)
