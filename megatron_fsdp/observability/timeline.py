"""Timeline: when each unit was gathered, computed and reduced, and how long compute waited for communication.

While it is open it listens to the engine's events and puts hooks on the units' modules; nothing of it is left
afterwards. On CPU it reads the host's clock. On CUDA it records timing events on the streams and reads
them when the block ends, so the host waits for nothing inside.
"""

from __future__ import annotations

import contextlib
from os import PathLike
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dbuffer.events import listen
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.observability.timeline_clock import clock_for
from megatron_fsdp.observability.timeline_files import write_record
from megatron_fsdp.observability.timeline_record import TimelineRecord, UnitTimes
from megatron_fsdp.observability.timeline_recorder import Recorder
from megatron_fsdp.runtime.module import units_below
from megatron_fsdp.runtime.unit import Unit, is_in_backward

__all__ = ["Timeline"]


class Timeline:
    """Records one rank's gathers, compute and reductions while a ``with`` block runs.

    Example:
        with Timeline(model) as timeline:
            loss(model(batch)).backward()
            optimizer.step()
        timeline.write("timeline.html")
        print(timeline.exposed_share)

    Ranks may open it alone: it communicates nothing. It is for a step or a few of them; every bar of every step is
    kept. Compute is that of modules of units and of optimizers; collectives are the engine's own, and of those that
    nobody asked for as ``wait`` the ends are seen to 0.3 ms on CPU. Open it after ``materialize`` and after parameters
    were frozen or unfrozen. Inside of torch.profiler its bars appear as ranges ("gather unit", "forward unit", ...).

    Args:
        model: has units below it, or is one.
    Raises:
        ConfigError: no module of the model is sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._units = list(units_below(model))
        groups = [group for unit in self._units for group in unit.groups]
        if not groups:
            raise ConfigError("Timeline: no module of the model has parameters that fully_shard took")
        self._device = groups[0].spec.device
        self._record: TimelineRecord | None = None

    def __enter__(self) -> Timeline:
        self._record = None
        self._recorder = Recorder(clock_for(self._device))
        self._open = contextlib.ExitStack()
        try:
            self._install()
        except BaseException:
            self._open.close()
            self._recorder.spans()
            raise
        self._recorder.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.end()
        self._open.close()
        seconds, spans = self._recorder.spans()
        rank = dist.get_rank() if dist.is_initialized() else 0
        num_steps = self._recorder.num_steps
        self._record = TimelineRecord(rank, tuple(unit.name for unit in self._units), seconds, num_steps, spans)

    # ------------------------------------------------------------------ results

    @property
    def record(self) -> TimelineRecord:
        """What was recorded.

        Raises:
            StateError: the block has not ended.
        """
        if self._record is None:
            raise StateError("Timeline: nothing is recorded until its with block ends; ask for results after it")
        return self._record

    @property
    def exposed_share(self) -> float:
        """The part of the block's time that compute waited for communication, from 0 to 1."""
        return self.record.exposed_share

    @property
    def units(self) -> tuple[UnitTimes, ...]:
        """The times of every unit, in the order in which modules are registered."""
        return self.record.unit_times()

    def write(self, path: str | PathLike[str]) -> None:
        """Write the recording as a page (.html), a picture (.png, by matplotlib) or a Chrome trace (.json).

        Raises:
            ConfigError: another suffix, the file cannot be written, or matplotlib is not installed.
        """
        write_record(self.record, path)

    # ------------------------------------------------------------------ hooks

    def _install(self) -> None:
        recorder = self._recorder
        for unit in self._units:
            self._install_forward(unit)
            recorder.follow(unit)
        self._open.enter_context(listen(recorder.hear))
        before = register_optimizer_step_pre_hook(lambda *_: recorder.push("optimizer", ""))
        self._open.callback(before.remove)
        after = register_optimizer_step_post_hook(lambda *_: recorder.pop())
        self._open.callback(after.remove)

    def _install_forward(self, unit: Unit) -> None:
        recorder, name = self._recorder, unit.name

        @_disable_dynamo
        def begin(*_: Any) -> None:
            recorder.push("recompute" if is_in_backward() else "forward", name)

        @_disable_dynamo
        def end(*_: Any) -> None:
            recorder.pop()

        for reference in unit.modules:
            module = reference()
            if module is not None:
                # The engine's own hook comes first, so its wait is the waiting of whoever ran before.
                self._open.callback(module.register_forward_pre_hook(begin).remove)
                self._open.callback(module.register_forward_hook(end, always_call=True).remove)
