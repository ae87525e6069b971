"""Rows and updates: the hyperparameters of one step of AdamW as tables on the devices, and its launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbuffer_kernels import (
    AdamWBuffers,
    CodedSegments,
    Int8AdamWBuffers,
    Segments,
    adamw,
    adamw_row,
    adamw_rows,
    int8_adamw,
)
from megatron_fsdp.optim.adamw.param_memory import ABSENT

__all__ = ["Rows", "Update"]


class Rows:
    """The hyperparameters of one step: a row per combination in use, in order of first use.

    Args:
        param_groups: of the optimizer.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self._param_groups = param_groups
        self._numbers: dict[tuple[int, int], int] = {}
        self._tables: dict[tuple[str, torch.device], torch.Tensor] = {}

    def number(self, group: int, step: int) -> int:
        """Return the row of one param group's parameters in their step of that number, which counts from 1."""
        return self._numbers.setdefault((group, step), len(self._numbers))

    def on(self, device: torch.device) -> torch.Tensor:
        """Return all rows, (rows, 8) in fp64; asked for after the last number was given."""
        return self._table(
            "adamw", device, lambda: [adamw_row(step, **self._options(group)) for group, step in self._numbers]
        )

    def clip_on(self, factor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """Return the step's one factor of all gradients on a device; it is copied there once."""
        if factor is not None and ("clip", device) not in self._tables:
            self._tables["clip", device] = factor.to(device)
        return self._tables.get(("clip", device))

    def _table(self, what: str, device: torch.device, rows: Callable[[], Any]) -> torch.Tensor:
        """Return the step's one table of a kind on a device."""
        if (what, device) not in self._tables:
            # Pinned, because a copy from pageable memory would make the host wait for the stream. Only CPU memory can
            # be pinned, and the user may have called torch.set_default_device("cuda").
            table = torch.tensor(rows(), dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")
            self._tables[what, device] = table.to(device, non_blocking=True)
        return self._tables[what, device]

    def of_steps(self, members: Sequence[int], steps: torch.Tensor) -> torch.Tensor:
        """Return a row for each parameter from its step counter, without looking at the counters on the host.

        Args:
            members: the number of each one's param group, or ``ABSENT``. steps: (parameters,).
        """
        parts, start = [], 0
        for group, run in itertools.groupby(members):
            counters = steps[start : (start := start + len(list(run)))]
            if group == ABSENT:
                parts.append(torch.zeros(len(counters), 8, dtype=torch.float64, device=steps.device))
            else:
                parts.append(adamw_rows(counters, **self._options(group, is_capturable=True)))
        return torch.cat(parts)

    def _options(self, group: int, *, is_capturable: bool = False) -> dict[str, Any]:
        options = {key: self._param_groups[group][key] for key in ("lr", "betas", "eps", "weight_decay", "maximize")}
        options["betas"] = tuple(map(float, options["betas"]))
        if not is_capturable:
            options["lr"] = float(options["lr"])
        return options


@dataclass(frozen=True, slots=True)
class Update:
    """One launch.

    Attributes:
        buffers, segments: its arguments.
        rows: its hyperparameters; None: those of the whole step.
    """

    buffers: AdamWBuffers | Int8AdamWBuffers
    segments: Segments | CodedSegments
    rows: torch.Tensor | None = None

    def run(self, rows: Rows, factor: torch.Tensor | None) -> None:
        """Launch, with every gradient multiplied by ``factor``."""
        device = self.buffers.weight.device
        table = rows.on(device) if self.rows is None else self.rows
        clip = rows.clip_on(factor, device)
        if isinstance(self.buffers, Int8AdamWBuffers):
            assert isinstance(self.segments, CodedSegments)
            int8_adamw(self.buffers, self.segments, table, clip=clip)
        else:
            assert isinstance(self.segments, Segments)
            adamw(self.buffers, self.segments, table, clip=clip)
