"""Update: one AdamW launch over one group's flat buffers or over one plain parameter, and the norm of what it reads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer_kernels import (
    AdamWBuffers,
    CodedSegment,
    CodedSegments,
    Int8AdamWBuffers,
    Int8Moments,
    Segment,
    Segments,
    adamw,
    adamw_row,
    adamw_rows,
    int8_adamw,
)
from dbuffer_kernels.dynamic_map import rounding_keys
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.adamw_state import ABSENT, KEYS, FlatGradient, GroupMoments, local_of, state_values
from megatron_fsdp.optim.int8_moments import CODED_KEYS, coded_state, is_coded, random_position

__all__ = ["PlainParameter", "Rows", "Update", "group_update", "int8_plain_update", "plain_update", "stored"]

State = MutableMapping[Any, Any]


class Rows:
    """The hyperparameters of one step, a row for each combination in use, numbered as they are asked for.

    Args:
        param_groups: of the optimizer. rounding_seed: of stochastic rounding of moments; None rounds to nearest.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], rounding_seed: int | None = None) -> None:
        self._param_groups = param_groups
        self._rounding_seed = rounding_seed
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

    def keys_on(self, device: torch.device) -> torch.Tensor | None:
        """Return the keys of stochastic rounding, int64 (rows, 4), of the seed and each row's step; None for none."""
        if self._rounding_seed is None:
            return None
        seeds = [(self._rounding_seed << 34) + 2 * step for _, step in self._numbers]
        return self._table(
            "rounding", device, lambda: [[*rounding_keys(s), *rounding_keys(s + 1)] for s in seeds], torch.int64
        )

    def clip_on(self, factor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """Return the step's one factor of all gradients on a device; it is copied there once."""
        if factor is not None and ("clip", device) not in self._tables:
            self._tables["clip", device] = factor.to(device)
        return self._tables.get(("clip", device))

    def _table(
        self, what: str, device: torch.device, rows: Callable[[], Any], dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        """Return the step's one table of a kind on a device."""
        if (what, device) not in self._tables:
            # Pinned, because a copy from pageable memory would make the host wait for the stream.
            table = torch.tensor(rows(), dtype=dtype, pin_memory=device.type == "cuda")
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
        stored: tensors whose memory is not in flat order, each with the flat copy that the launch changes.
    """

    buffers: AdamWBuffers | Int8AdamWBuffers
    segments: Segments | CodedSegments
    rows: torch.Tensor | None = None
    stored: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def run(self, rows: Rows, factor: torch.Tensor | None) -> None:
        """Launch, with every gradient multiplied by ``factor``."""
        device = self.buffers.weight.device
        table = rows.on(device) if self.rows is None else self.rows
        clip = rows.clip_on(factor, device)
        if isinstance(self.buffers, Int8AdamWBuffers):
            assert isinstance(self.segments, CodedSegments)
            int8_adamw(self.buffers, self.segments, table, keys=rows.keys_on(device), clip=clip)
        else:
            assert isinstance(self.segments, Segments)
            adamw(self.buffers, self.segments, table, clip=clip)
        for tensor, flat in self.stored:
            tensor.copy_(flat.view(tensor.shape))


def group_update(moments: GroupMoments, gradient: FlatGradient, rows: Rows) -> Update:
    """Count a step of a sharded group, whose moments ``state`` shows, and return its launch."""
    segments = moments.count_step(rows.number, gradient.present)
    own = rows.of_steps(moments.members, moments.steps) if moments.is_capturable else None
    return Update(moments.buffers(gradient.flat), segments, own)


@dataclass(frozen=True, slots=True)
class PlainParameter:
    """A parameter that no sharded group owns: a plain tensor, or a DTensor of somebody else's.

    Attributes:
        group: the number of its param group.
    """

    parameter: torch.Tensor
    group: int
    is_capturable: bool

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's part of its gradient, 1-D; None for none."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient.layout is not torch.strided or self.parameter.is_complex():
            raise ConfigError(
                f"AdamW: {self}, has a gradient of layout {gradient.layout}; wanted real numbers and dense gradients. "
                "Use torch.optim.SparseAdam for sparse gradients, and torch.view_as_real for complex parameters."
            )
        flat: torch.Tensor = local_of(gradient).detach().reshape(-1)
        return flat

    @property
    def counter_device(self) -> torch.device:
        """Where its step counter lives if it is made now."""
        return self.parameter.device if self.is_capturable else torch.device("cpu")

    def count_step(self, counter: torch.Tensor, rows: Rows) -> tuple[torch.Tensor | None, int]:
        """Count a step; return rows of its own where counters must not be looked at, and the number of its row."""
        counter.add_(1)
        if self.is_capturable:
            return rows.of_steps([self.group], counter.view(1)), 0
        return None, rows.number(self.group, int(counter))

    def __str__(self) -> str:
        return f"a parameter of shape {tuple(self.parameter.shape)}, {self.parameter.dtype}"


def plain_update(
    plain: PlainParameter, gradient: torch.Tensor, state: State, rows: Rows, dtype: torch.dtype | None
) -> Update:
    """Count a step of one parameter and return its launch.

    Args:
        gradient: what ``plain.gradient()`` returned.
        dtype: of moments that are made now; None: the parameter's.
    """
    parameter, what = plain.parameter, str(plain)
    values = state.setdefault(parameter, {})
    if not values:
        moments = (torch.zeros_like(parameter, dtype=dtype).detach() for _ in range(2))
        values.update(zip(KEYS, (torch.zeros((), device=plain.counter_device), *moments), strict=True))
    step, *shown = state_values(values, what)
    own, row = plain.count_step(step, rows)
    local = [local_of(tensor).detach() for tensor in (parameter, *shown)]
    flat = [tensor.reshape(-1) for tensor in local]
    return Update(AdamWBuffers(gradient, *flat), _all_of(flat[0].numel(), row), own, stored(local, flat))


def int8_plain_update(plain: PlainParameter, gradient: torch.Tensor, state: State, rows: Rows, number: int) -> Update:
    """Count a step of one parameter whose moments are kept in 8 bits if it is large enough, and return its launch.

    Args:
        number: its position in the optimizer, for stochastic rounding.
    """
    parameter = plain.parameter
    if not is_coded(parameter.shape):
        return plain_update(plain, gradient, state, rows, torch.float32)
    if isinstance(parameter, DTensor) or parameter.dtype is torch.float64:
        raise ConfigError(
            f"AdamW(moments='int8'): {plain}, is a DTensor that fully_shard did not make, or FP64; shard it with "
            "fully_shard, or step it with moments=None"
        )
    values = state.setdefault(parameter, {})
    if CODED_KEYS[0] not in values:
        values.update(coded_state(parameter, values, plain.counter_device))
    own, row = plain.count_step(values["step"], rows)
    weight = parameter.detach().reshape(-1)
    codes, nothing = [values[key].view(-1) for key in CODED_KEYS], torch.zeros(0, device=parameter.device)
    moments = Int8Moments(codes[0], codes[2], codes[1], codes[3], nothing, nothing)
    segments = CodedSegments([CodedSegment(0, weight.numel(), row, random_position(number, 0))], weight.numel())
    return Update(Int8AdamWBuffers(gradient, weight, moments), segments, own, stored([parameter.detach()], [weight]))


def stored(
    tensors: Sequence[torch.Tensor], flat: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return those of the pairs whose flat tensor is a copy."""
    return tuple((a, b) for a, b in zip(tensors, flat, strict=True) if a.data_ptr() != b.data_ptr())


@functools.lru_cache(maxsize=4096)
def _all_of(numel: int, row: int) -> Segments:
    # Kept, as its table is copied to the device in the first step: a later one may be captured.
    return Segments([Segment(0, numel, row)], numel)
