"""MatrixGroup: the Muon and AdamW state of one parameter group that has matrices, on flat memory laid out like it.

One flat buffer holds the momentum of the matrices and the first moments of what AdamW steps beside them; second moments
exist for the latter alone. ``state`` shows them per parameter, as ``torch.optim.Muon`` and ``torch.optim.AdamW`` would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer, FlatDTensor
from dbuffer_kernels import AdamWBuffers, MuonWeights, Segment, Segments, muon_apply, muon_momentum
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.adamw_state import ABSENT, KEYS, FlatGradient, GroupGradients
from megatron_fsdp.optim.adamw_update import Update
from megatron_fsdp.optim.matrix_views import MatrixBlock
from megatron_fsdp.runtime.parameter_group import ParameterGroup

__all__ = ["MOMENTUM", "MatrixGroup", "MatrixMember", "StepRows"]

MOMENTUM = "momentum_buffer"
State = MutableMapping[Any, Any]


@dataclass(frozen=True, slots=True)
class MatrixMember:
    """A parameter that Muon steps.

    Attributes:
        group: number of its param group. blocks: its matrices, each with the factor of its learning rate.
    """

    group: int
    blocks: tuple[tuple[MatrixBlock, float], ...]


class StepRows:
    """The hyperparameters of one step of Muon: a row for each param group, and for each with a matrix's factor.

    Args:
        param_groups: of the optimizer; those of AdamW are not asked for.
        factors: (number of the param group, factor) of each row of ``apply``.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]], factors: Sequence[tuple[int, float]]) -> None:
        self._momentum = [
            [float(group["momentum"]), float(group["nesterov"])] if group["use_muon"] else [0.0, 0.0]
            for group in param_groups
        ]
        self._apply = []
        for number, factor in factors:
            group = param_groups[number]
            lr = float(group["lr"])
            self._apply.append([1 - lr * group["weight_decay"], -(lr * factor)])
        self._tables: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def momentum(self, device: torch.device) -> torch.Tensor:
        """Return the rows of ``muon_momentum``."""
        return self._on(device, self._momentum, is_apply=False)

    def apply(self, device: torch.device) -> torch.Tensor:
        """Return the rows of ``muon_apply``."""
        return self._on(device, self._apply, is_apply=True)

    def _on(self, device: torch.device, rows: list[list[float]], *, is_apply: bool) -> torch.Tensor:
        key = (device, is_apply)
        if key not in self._tables:
            table = torch.tensor(rows, dtype=torch.float64, pin_memory=device.type == "cuda").view(-1, 2)
            self._tables[key] = table.to(device, non_blocking=True)
        return self._tables[key]


class MatrixGroup(GroupGradients):
    """State of one parameter group of which Muon steps some parameters, AdamW others.

    Args:
        group: held weakly.
        members: for each parameter in plan order, the number of its param group, or ``ABSENT``.
        matrices: what Muon steps, by position in the group.
        row_of: gives the row of ``StepRows.apply`` for (number of the param group, factor).
        dtype: of momentum and moments; None: that of the main weights, FP32 where these are split.
    """

    def __init__(
        self,
        group: ParameterGroup,
        members: Sequence[int],
        matrices: Mapping[int, MatrixMember],
        row_of: Callable[[int, float], int],
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(group, members)
        main = group.main_weight
        dtype = dtype or group.spec.dtypes.stepped
        self.matrices = dict(matrices)
        self._others = tuple(
            index for index, member in enumerate(members) if member != ABSENT and index not in self.matrices
        )
        name = f"unit {group.name!r}: momentum"
        self.first = DBuffer.from_plan(main.plan, main.mesh, main.placements, dtype, main.device, name=name).zero_()
        self._runs = self._find_runs()
        self._second = torch.zeros(sum(stop - start for start, stop, _ in self._runs), dtype=dtype, device=main.device)
        self.steps = torch.zeros(len(members))
        self._apply_segments = self._segments_of_blocks(row_of)
        self._patterns: dict[Any, Segments] = {}
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._shown: dict[int, dict[str, Any]] = {}
        # What the step under way writes to.
        self._written: MuonWeights | None = None

    def _find_runs(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return where neighbours that AdamW steps begin and end in this rank's part, and which they are."""
        runs: list[tuple[int, int, tuple[int, ...]]] = []
        held = [index for index in range(len(self._pieces)) if self._pieces[index][0] < self._pieces[index][1]]
        previous = ABSENT
        for index in sorted(held, key=lambda index: self._pieces[index][0]):
            start, stop = self._pieces[index]
            if index in self._others:
                if runs and previous in self._others:
                    runs[-1] = (runs[-1][0], stop, (*runs[-1][2], index))
                else:
                    runs.append((start, stop, (index,)))
            previous = index
        return runs

    def _segments_of_blocks(self, row_of: Callable[[int, float], int]) -> dict[int, list[Segment]]:
        found: dict[int, list[Segment]] = {}
        for index, member in self.matrices.items():
            base, stop = self._pieces[index]
            if len({factor for _, factor in member.blocks}) == 1:
                found[index] = [Segment(base, stop, row_of(member.group, member.blocks[0][1]))]
                continue
            found[index] = []
            for block, factor in member.blocks:
                row = row_of(member.group, factor)
                for piece in block.rectangles(self.held(index)):
                    starts = (base + piece.start + line * piece.stride for line in range(piece.rows))
                    found[index] += [Segment(start, start + piece.columns, row) for start in starts]
        return found

    def base(self, index: int) -> int:
        """Return where in this rank's part its piece of a parameter begins."""
        return self._pieces[index][0]

    def held(self, index: int) -> range:
        """Return which elements of a flattened parameter this rank holds."""
        return self.first.layout.held(index)

    # ------------------------------------------------------------------ state

    def adopt(self, state: State, present: Sequence[bool]) -> None:
        """Make ``state`` show these buffers for the wanted parameters, with the values that it held or zeros.

        Raises:
            ConfigError: the state is that of another optimizer. StateError: it does not have the parameter's rows.
        """
        for index, is_wanted in enumerate(present):
            if is_wanted and self.members[index] != ABSENT:
                self._adopt_one(state, index)

    def adopt_all(self, state: State) -> None:
        """Make ``state`` show these buffers wherever it holds something."""
        self.adopt(state, [bool(state.get(param)) for param in self._params])

    def _adopt_one(self, state: State, index: int) -> None:
        param = self._params[index]
        views = self._views.get(index) or self._make_views(index)
        values = state.get(param)
        shown = self._shown.get(index)
        if (
            values
            and shown is not None
            and values is shown
            and all(shown.get(key) is view for key, view in views.items())
        ):
            return
        if values and not all(key in values for key in views):
            raise ConfigError(
                f"Muon: the state of {self._names[index]} has {sorted(map(str, values))}; wanted {sorted(views)}. Load "
                "a state dict in which the same parameters are stepped by Muon"
            )
        for key, view in views.items():
            value = None if not values else values[key]
            target = self.steps[index] if key == "step" else _local(view)
            if value is None:
                target.zero_()
            elif value is not view:
                target.copy_(self._rows(value, target, index))
        values = {} if values is None else values
        values.update(views)
        state[param] = self._shown[index] = values

    def _rows(self, value: Any, target: torch.Tensor, index: int) -> torch.Tensor:
        local = _local(torch.as_tensor(value))
        if local.numel() != target.numel():
            raise StateError(
                f"{self._names[index]}: its state has {local.numel()} elements on this rank, the parameter "
                f"{target.numel()}; load it with optimizer.load_state_dict, which brings it into the parameter's rows"
            )
        return local.reshape(target.shape)

    def _make_views(self, index: int) -> dict[str, torch.Tensor]:
        group = self.group
        assert group is not None
        first = group.fsdp_params.wrap(index, self.first.get_dtensor(index))
        if index in self.matrices:
            self._views[index] = {MOMENTUM: first}
        else:
            step, exp_avg, exp_avg_sq = KEYS
            second = self._second_view(index)
            self._views[index] = {step: self.steps[index], exp_avg: first, exp_avg_sq: second}
        return self._views[index]

    def _second_view(self, index: int) -> torch.Tensor:
        template = self._params[index]
        assert isinstance(template, FlatDTensor)
        start, stop = self._second_range(index)
        rows = self._second[start:stop].view(template.to_local().shape)
        if rows.dtype is template.dtype:
            return FlatDTensor(rows, template._spec, requires_grad=False)
        return FlatDTensor.from_local(
            rows,
            template.device_mesh,
            template.placements,
            run_check=False,
            shape=template.shape,
            stride=template.stride(),
        )

    def _second_range(self, index: int) -> tuple[int, int]:
        before = 0
        for start, stop, indices in self._runs:
            if index in indices:
                piece = self._pieces[index]
                return before + piece[0] - start, before + piece[1] - start
            before += stop - start
        return 0, 0

    # ------------------------------------------------------------------ step

    def prepare(self, gradient: FlatGradient, out: torch.Tensor, rows: StepRows, clip: torch.Tensor | None) -> None:
        """Update the momentum of the matrices and write to ``out`` what Newton-Schulz is to see, in its dtype.

        Pieces of matrices without a gradient are zero there, and their momentum stays.
        """
        segments = self._segments("momentum", gradient.present, self._momentum_segments)
        for index in self.matrices:
            if not gradient.present[index]:
                out[slice(*self._pieces[index])].zero_()
        clip = None if clip is None else clip.to(out.device)
        muon_momentum(gradient.flat, self.first.local_buffer, out, segments, rows.momentum(out.device), clip=clip)

    def _momentum_segments(self, index: int) -> list[Segment]:
        return [Segment(*self._pieces[index], self.matrices[index].group)]

    def _segments(self, use: str, present: tuple[bool, ...], segments_of: Callable[[int], list[Segment]]) -> Segments:
        key = (use, present)
        if key not in self._patterns:
            found = [segment for index in self.matrices if present[index] for segment in segments_of(index)]
            self._patterns[key] = Segments(found, self.first.local_buffer.numel())
        return self._patterns[key]

    def adamw_updates(self, gradient: FlatGradient, row_of: Callable[[int, int], int]) -> list[Update]:
        """Count a step of what AdamW steps, and return its launches: one for each run of neighbours.

        Args:
            row_of: gives the row of hyperparameters for (number of the param group, number of the step).
        """
        for index in self._others:
            if gradient.present[index]:
                self.steps[index] += 1
        updates, before = [], 0
        for start, stop, indices in self._runs:
            place, second = slice(start, stop), self._second[before : before + stop - start]
            before += stop - start
            found = []
            for index in indices:
                if gradient.present[index]:
                    first, last = self._pieces[index]
                    row = row_of(self.members[index], int(self.steps[index]))
                    found.append(Segment(first - start, last - start, row))
            if found:
                buffers = self._adamw_buffers(gradient.flat[place], place, second)
                updates.append(Update(buffers, self._adamw_segments(start, tuple(found), stop - start)))
        return updates

    def _adamw_segments(self, run: int, found: tuple[Segment, ...], numel: int) -> Segments:
        key = (run, found)
        if key not in self._patterns:
            self._patterns[key] = Segments(found, numel)
        return self._patterns[key]

    def _adamw_buffers(self, gradient: torch.Tensor, place: slice, second: torch.Tensor) -> AdamWBuffers:
        weights = self._weights_of_step()
        model = None if weights.model_weight is None else weights.model_weight[place]
        remainder = None if weights.remainder is None else weights.remainder[place]
        return AdamWBuffers(gradient, weights.weight[place], self.first.local_buffer[place], second, model, remainder)

    def _weights_of_step(self) -> MuonWeights:
        # Once in a step: its own writes would look like somebody else's to a remainder.
        if self._written is None:
            self._written = self._weights()
        return self._written

    def _weights(self) -> MuonWeights:
        group = self.group
        if group is None:
            raise StateError("Muon: the model of these parameters is gone; build the optimizer of a model in use")
        main, model, remainder = group.main_weight, group.model_weight, group.weights.remainder
        weight, copy = main.local_buffer, None
        if model is not main:
            shard = model if model.placements == main.placements else model.slice_view(main.placements)
            copy = shard.local_buffer if shard.local_buffer.data_ptr() != weight.data_ptr() else None
        return MuonWeights(weight, copy, None if remainder is None else remainder.current())

    def apply(self, update: torch.Tensor, present: tuple[bool, ...], rows: StepRows) -> None:
        """Decay the matrices that have a gradient and add their updates, which lie where the matrices do."""
        segments = self._segments("apply", present, self._apply_segments.__getitem__)
        muon_apply(update, self._weights_of_step(), segments, rows.apply(update.device))

    def settle(self) -> None:
        """Say that all launches of a step were made: what they wrote belongs together."""
        group = self.group
        self._written = None
        if group is not None and group.weights.remainder is not None:
            group.weights.remainder.accept()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
