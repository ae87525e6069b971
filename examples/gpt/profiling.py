"""``--profile``: some steps as a Chrome trace, for ui.perfetto.dev, with what compute waited for as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gpt.launch import Ranks
from gpt.train_log import TrainLog
from megatron_fsdp import FSDPModule, Timeline


class StepProfiler:
    """Records the steps from ``--profile-step-start`` to before ``--profile-step-end`` on the ranks asked for.

    Writes ``trace_rank0_steps10-11.json``, and for a sharded model ``timeline_rank0_steps10-11.png``, with the share of
    communication that compute waited for.
    """

    def __init__(
        self, args: argparse.Namespace, ranks: Ranks, folder: Path, log: TrainLog, model: nn.Module | None = None
    ) -> None:
        self._log = log
        is_asked = args.profile and ranks.rank in args.profile_ranks
        self._steps = range(args.profile_step_start, args.profile_step_end) if is_asked else range(0)
        self._folder = folder
        self._name = f"rank{ranks.rank}_steps{args.profile_step_start}-{args.profile_step_end - 1}"
        self._is_sharded = isinstance(model, FSDPModule)
        self._profile: profile | None = None

    def before_step(self, iteration: int) -> None:
        """Start recording, if step ``iteration`` (the first is 1) is to be recorded."""
        if iteration in self._steps and self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()

    def after_step(self, iteration: int) -> None:
        """Write the files and say where, if step ``iteration`` is the last to be recorded."""
        if self._profile is not None and iteration + 1 not in self._steps:
            self._write()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A run that ends early still leaves the steps that it recorded.
        if self._profile is not None:
            self._write()

    def _write(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        trace = self._folder / f"trace_{self._name}.json"
        self._profile.export_chrome_trace(str(trace))
        self._profile = None
        self._log.message(f" wrote the trace {trace}")
        if self._is_sharded:
            timeline, picture = Timeline.read(trace), self._folder / f"timeline_{self._name}.png"
            timeline.draw(picture)
            headline = str(timeline).partition("\n")[0]
            self._log.message(f" drew {picture}: {headline}")
