"""MatrixGroup: the Muon and AdamW state of one parameter group that has matrices, on flat memory laid out like it.

One flat buffer holds the momentum of the matrices and the first moments of what AdamW steps beside them; second moments
exist for the latter alone. ``state`` shows them per parameter, as ``torch.optim.Muon`` and ``torch.optim.AdamW`` would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbuffer.dtensor.from_buffer import buffer_dtensor
from dbuffer_kernels import AdamWBuffers, MuonWeights, Segment, Segments, muon_apply, muon_momentum
from megatron_fsdp.optim.adamw_state import ABSENT, KEYS, FlatGradient, GroupState
from megatron_fsdp.optim.adamw_update import Rows, Update
from megatron_fsdp.optim.matrix_views import MatrixBlock
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup

__all__ = ["MOMENTUM", "MatrixGroup", "MatrixMember", "StepRows", "matrix_segments"]

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


def matrix_segments(
    member: MatrixMember, base: int, held: range, row_of: Callable[[int, float], int]
) -> Iterator[Segment]:
    """Yield where the matrices of a parameter lie in flat memory, with their rows of ``StepRows.apply``.

    Args:
        base: where the elements ``held`` of the flattened parameter begin.
    """
    if len({factor for _, factor in member.blocks}) == 1:
        yield Segment(base, base + len(held), row_of(member.group, member.blocks[0][1]))
        return
    for block, factor in member.blocks:
        row = row_of(member.group, factor)
        for piece in block.rectangles(held):
            starts = (base + piece.start + line * piece.stride for line in range(piece.rows))
            yield from (Segment(start, start + piece.columns, row) for start in starts)


class MatrixGroup(GroupState):
    """State of one parameter group of which Muon steps some parameters, AdamW others.

    Args:
        group, members: as in ``GroupState``.
        matrices: what Muon steps, by position in the group.
        row_of: gives the row of ``StepRows.apply`` for (number of the param group, factor).
        dtype: of momentum and moments; None: that of the main weights, FP32 where these are split.
    """

    title = "Muon"

    def __init__(
        self,
        group: ParameterGroup,
        members: Sequence[int],
        matrices: Mapping[int, MatrixMember],
        row_of: Callable[[int, float], int],
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(group, members)
        self.matrices = dict(matrices)
        self._counted = tuple(ABSENT if index in matrices else member for index, member in enumerate(members))
        self.first = self._buffer(group, dtype, "momentum")
        self._runs = self._find_runs()
        numel = sum(run.stop - run.start for run in self._runs)
        self._second = self.first.local_buffer.new_zeros(numel)
        self._blocks = {
            index: list(matrix_segments(member, self.base(index), self.held_elements(index), row_of))
            for index, member in self.matrices.items()
        }
        self._matrix_segments: dict[tuple[bool, tuple[bool, ...]], Segments] = {}
        # What the step under way writes to.
        self._written: MuonWeights | None = None

    def _find_runs(self) -> list[_Run]:
        runs: list[_Run] = []
        previous, numel = ABSENT, 0
        for index in sorted(range(len(self._pieces)), key=lambda index: self._pieces[index][0]):
            start, stop = self._pieces[index]
            if start == stop:
                continue
            if self._counted[index] != ABSENT:
                before = runs.pop() if runs and self._counted[previous] != ABSENT else _Run(start, stop, numel, ())
                runs.append(_Run(before.start, stop, before.second, (*before.indices, index)))
                numel = before.second + stop - before.start
            previous = index
        return runs

    def base(self, index: int) -> int:
        """Return where in this rank's part its piece of a parameter begins."""
        return self._pieces[index][0]

    def held_elements(self, index: int) -> range:
        """Return which elements of a flattened parameter this rank holds."""
        return self.first.layout.held(index)

    # ------------------------------------------------------------------ state

    def keys(self, index: int) -> tuple[str, ...]:
        """See ``GroupState``."""
        return (MOMENTUM,) if index in self.matrices else KEYS

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See ``GroupState``."""
        return self.first.local_buffer, self._second, self.steps

    def _make_views(self, index: int) -> tuple[Any, ...]:
        first, group = self._view(self.first, index), self.group
        if index in self.matrices:
            return (first,)
        assert group is not None
        begin, (start, stop) = 0, self._pieces[index]
        for run in self._runs:
            begin = run.second + start - run.start if index in run.indices else begin
        main = self.first
        rows = self._second[begin : begin + stop - start].view(main.get_local_tensor(index).shape)
        second = buffer_dtensor(rows, main.layout, index, main.mesh, main.name)
        return self.steps[index], first, group.fsdp_params.wrap(index, second)

    # ------------------------------------------------------------------ step

    def prepare(self, gradient: FlatGradient, out: torch.Tensor, rows: StepRows, clip: torch.Tensor | None) -> None:
        """Update the momentum of the matrices and write to ``out`` what Newton-Schulz is to see, in its dtype.

        Pieces of matrices without a gradient are zero there, and their momentum stays.
        """
        for index in self.matrices:
            if not gradient.present[index]:
                out[slice(*self._pieces[index])].zero_()
        segments = self._of_matrices(gradient.present, is_apply=False)
        muon_momentum(gradient.flat, self.first.local_buffer, out, segments, rows.momentum(out.device), clip=clip)

    def apply(self, update: torch.Tensor, present: tuple[bool, ...], rows: StepRows) -> None:
        """Decay the matrices that have a gradient and add their updates, which lie where the matrices do."""
        segments = self._of_matrices(present, is_apply=True)
        muon_apply(update, self._weights_of_step(), segments, rows.apply(update.device))

    def _of_matrices(self, present: tuple[bool, ...], *, is_apply: bool) -> Segments:
        key = (is_apply, present)
        if key not in self._matrix_segments:
            found: list[Segment] = []
            for index, member in self.matrices.items():
                whole = [Segment(*self._pieces[index], member.group)]
                found += (self._blocks[index] if is_apply else whole) if present[index] else []
            self._matrix_segments[key] = Segments(found, self.first.local_buffer.numel())
        return self._matrix_segments[key]

    def adamw_updates(self, gradient: FlatGradient, row_of: Callable[[int, int], int]) -> list[Update]:
        """Count a step of what AdamW steps, and return its launches: one for each run of neighbours."""
        updates = []
        for run, segments in zip(self._runs, self.count_step(row_of, gradient.present), strict=True):
            if segments is None:
                continue
            place, weights = slice(run.start, run.stop), self._weights_of_step()
            moments = self.first.local_buffer[place], self._second[run.second : run.second + run.stop - run.start]
            copies = (None if each is None else each[place] for each in (weights.model_weight, weights.remainder))
            buffers = AdamWBuffers(gradient.flat[place], weights.weight[place], *moments, *copies)
            updates.append(Update(buffers, segments))
        return updates

    def _segments(self, rows: Sequence[int]) -> list[Segments | None]:
        """Return the segments of each run, None where none of it is stepped."""
        found: list[Segments | None] = []
        for run in self._runs:
            places = [(rows[i], self._pieces[i]) for i in run.indices if rows[i] != ABSENT]
            joined = [Segment(start - run.start, stop - run.start, row) for row, (start, stop) in places]
            found.append(Segments(joined, run.stop - run.start) if joined else None)
        return found

    def _weights_of_step(self) -> MuonWeights:
        # Once in a step: its own writes would look like somebody else's to a remainder.
        if self._written is None:
            self._written = self.weights()
        return self._written

    def settle(self) -> None:
        """See ``GroupState``."""
        self._written = None
        super().settle()
