"""MatrixState: the optimizer state of parameters that Muon or AdamW steps, in flat memory with their layout.

One flat tensor holds the momentum of the matrices and the first moments of AdamW's parameters. Second moments exist for
AdamW's parameters only. ``state`` shows them per parameter, as ``torch.optim.Muon`` and ``torch.optim.AdamW`` would.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbuffer_kernels import AdamWBuffers, MuonWeights, Segment, Segments, muon_apply, muon_momentum
from megatron_fsdp.optim.adamw.flat_state import KEYS, FlatState
from megatron_fsdp.optim.adamw.param_memory import ABSENT, FlatGradient, ParamMemory
from megatron_fsdp.optim.adamw.update import Rows, Update
from megatron_fsdp.optim.muon.matrix_views import MatrixBlock

__all__ = ["MOMENTUM", "MatrixMember", "MatrixState", "StepRows"]

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, slots=True)
class MatrixMember:
    """A parameter that Muon steps.

    Attributes:
        group: number of its param group. blocks: its matrices, each with the factor of its learning rate.
    """

    group: int
    blocks: tuple[tuple[MatrixBlock, float], ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours that AdamW steps: where in this rank's part they begin and end, and where their second moments."""

    start: int
    stop: int
    second: int
    indices: tuple[int, ...]


class StepRows(Rows):
    """The hyperparameters of one step of Muon too: a row for each param group, and for each with a matrix's factor.

    Args:
        param_groups: of the optimizer. factors: (number of the param group, factor) of each row of ``apply``.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], factors: Sequence[tuple[int, float]]) -> None:
        super().__init__(param_groups)
        self._factors = factors

    def momentum(self, device: torch.device) -> torch.Tensor:
        """Return the rows of ``muon_momentum``; those of param groups of AdamW are not asked for."""
        rows = [(group.get("momentum", 0), group.get("nesterov", 0)) for group in self._param_groups]
        return self._table("momentum", device, lambda: [list(map(float, row)) for row in rows])

    def apply(self, device: torch.device) -> torch.Tensor:
        """Return the rows of ``muon_apply``."""
        groups = [(self._param_groups[number], factor) for number, factor in self._factors]
        rows = ((float(group["lr"]), group["weight_decay"], factor) for group, factor in groups)
        return self._table("apply", device, lambda: [[1 - lr * decay, -(lr * factor)] for lr, decay, factor in rows])


class MatrixState(FlatState):
    """The state of parameters, some stepped by Muon and the others by AdamW.

    Args:
        memory, members, dtype: as in ``FlatState``.
        matrices: what Muon steps, by position in the memory.
        row_of: gives the row of ``StepRows.apply`` for (number of the param group, factor).
    """

    title = "Muon"

    def __init__(
        self,
        memory: ParamMemory,
        members: Sequence[int],
        matrices: Mapping[int, MatrixMember],
        row_of: Callable[[int, float], int],
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(memory, members, dtype)
        self.matrices = dict(matrices)
        self._counted = tuple(ABSENT if index in matrices else member for index, member in enumerate(members))
        self._runs = self._find_runs()
        self._blocks = {index: list(self._cut(index, member, row_of)) for index, member in self.matrices.items()}
        self._matrix_segments: dict[tuple[bool, tuple[bool, ...]], Segments] = {}
        # The weights that the current step writes. Checked for outside changes once per step, because later checks
        # would see the step's own writes.
        self._written = MuonWeights(torch.empty(0))

    def _find_runs(self) -> list[_Run]:
        runs, numel, pieces = [], 0, self.memory.pieces
        held = sorted((start, index) for index, (start, stop) in enumerate(pieces) if start < stop)
        for is_counted, run in itertools.groupby(held, lambda pair: self._counted[pair[1]] != ABSENT):
            indices = tuple(index for _, index in run)
            if is_counted:
                start, stop = pieces[indices[0]][0], pieces[indices[-1]][1]
                runs.append(_Run(start, stop, numel, indices))
                numel += stop - start
        return runs

    def _cut(self, index: int, member: MatrixMember, row_of: Callable[[int, float], int]) -> Iterator[Segment]:
        """Yield where the matrices of a parameter lie in flat memory, with their rows of ``StepRows.apply``."""
        (base, stop), held = self.memory.pieces[index], self.memory.held[index]
        if len({factor for _, factor in member.blocks}) == 1:
            yield Segment(base, stop, row_of(member.group, member.blocks[0][1]))
            return
        for block, factor in member.blocks:
            row = row_of(member.group, factor)
            for piece in block.pieces(held):
                yield Segment(base + piece.start, base + piece.start + piece.numel, row)

    # ------------------------------------------------------------------ state

    @functools.cached_property
    def _first(self) -> torch.Tensor:
        return self.memory.zeros(self.dtype, "momentum")

    @functools.cached_property
    def _second(self) -> torch.Tensor:
        return self.memory.zeros(self.dtype, "second moments", sum(run.stop - run.start for run in self._runs))

    def keys(self, index: int) -> tuple[str, ...]:
        """See ``FlatState``."""
        return (MOMENTUM,) if index in self.matrices else KEYS

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See ``FlatState``."""
        return self._first, self._second, self.steps

    def _make_views(self, index: int) -> tuple[Any, ...]:
        first = self._view(index, self._first)
        if index in self.matrices:
            return (first,)
        begin, (start, stop) = 0, self.memory.pieces[index]
        for run in self._runs:
            begin = run.second + start - run.start if index in run.indices else begin
        return self.steps[index], first, self.memory.view(index, self._second[begin : begin + stop - start])

    # ------------------------------------------------------------------ step

    def prepare(self, gradient: FlatGradient, out: torch.Tensor, rows: StepRows, factor: torch.Tensor | None) -> None:
        """Update the momentum of the matrices and write to ``out`` what Newton-Schulz is to see, in its dtype.

        Matrices without a gradient do not change, and neither does their momentum.
        """
        self._written = self.memory.weights()
        segments, clip = self._of_matrices(gradient.present, is_apply=False), rows.clip_on(factor, out.device)
        muon_momentum(gradient.flat, self._first, out, segments, rows.momentum(out.device), clip=clip)

    def apply(self, update: torch.Tensor, present: tuple[bool, ...], rows: StepRows) -> None:
        """Decay the matrices that have a gradient and add their updates, which lie where the matrices do."""
        muon_apply(update, self._written, self._of_matrices(present, is_apply=True), rows.apply(update.device))

    def _of_matrices(self, present: tuple[bool, ...], *, is_apply: bool) -> Segments:
        key = (is_apply, present)
        if key not in self._matrix_segments:
            found: list[Segment] = []
            for index, member in self.matrices.items():
                whole = [Segment(*self.memory.pieces[index], member.group)]
                found += (self._blocks[index] if is_apply else whole) if present[index] else []
            self._matrix_segments[key] = Segments(found, self.memory.numel)
        return self._matrix_segments[key]

    def updates(self, gradient: FlatGradient, rows: Rows) -> list[Update]:
        """See ``FlatState``; one launch for each run of neighbours, after ``prepare``."""
        updates, weights = [], self._written
        for run, segments in zip(self._runs, self._count_step(rows, gradient.present), strict=True):
            if segments is None:
                continue
            place = slice(run.start, run.stop)
            moments = self._first[place], self._second[run.second : run.second + run.stop - run.start]
            copies = (None if each is None else each[place] for each in (weights.model_weight, weights.remainder))
            updates.append(
                Update(AdamWBuffers(gradient.flat[place], weights.weight[place], *moments, *copies), segments)
            )
        return updates

    def _segments(self, rows: Sequence[int]) -> list[Segments | None]:
        """Return the segments of each run, None where none of it is stepped."""
        found: list[Segments | None] = []
        for run in self._runs:
            places = [(rows[i], self.memory.pieces[i]) for i in run.indices if rows[i] != ABSENT]
            joined = [Segment(start - run.start, stop - run.start, row) for row, (start, stop) in places]
            found.append(Segments(joined, run.stop - run.start) if joined else None)
        return found
