"""GroupState: the optimizer state of one parameter group on flat memory, shown per parameter as torch.optim's state.

The optimizer's ``state`` holds DTensors over flat buffers, and step counters over one tensor, so that state dicts and
checkpoints see what ``torch.optim`` would show, while a step works on the buffers alone.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from dbuffer.mesh import MeshAxis
from dbuffer_kernels import AdamWBuffers, CodedSegments, Int8AdamWBuffers, MuonWeights, Segment, Segments, cast_copy
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.nonfinite import Reading
from megatron_fsdp.runtime.step.grad_binding import GradState
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup

__all__ = [
    "FlatGradient",
    "GroupMoments",
    "GroupState",
    "adopt_together",
    "local_of",
    "local_range",
    "state_values",
]

State = MutableMapping[Any, Any]
KEYS = ("step", "exp_avg", "exp_avg_sq")
ABSENT = -1
# Past the property of sharded parameters, which is a call of Python for each of them.
_gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
# Patterns of missing gradients that a group remembers; models whose experts come and go make ever new ones.
_MAX_PATTERNS = 32


def state_values(
    values: Mapping[str, Any], parameter: str, keys: Sequence[str] = KEYS, what: str = "AdamW"
) -> tuple[Any, ...]:
    """Return what one parameter's state has under the keys.

    Raises:
        ConfigError: the state is that of another optimizer.
    """
    if not all(key in values for key in keys):
        raise ConfigError(
            f"{what}: the state of {parameter} has {sorted(map(str, values))}; wanted {list(keys)}. Load a state "
            f"dict in which {what} (or that of torch.optim, without amsgrad) steps the same parameters"
        )
    return tuple(values[key] for key in keys)


def adopt_together(wanted: Iterable[tuple[GroupState, Sequence[bool]]], state: State) -> None:
    """Make ``state`` show these buffers for the wanted parameters of each group, with the values that it held or zeros.

    What it shows of a parameter in the memory of another one is copied before any is overwritten: whoever exchanges
    records or moments of parameters means their values.
    """
    new = [(group, index) for group, flags in wanted for index in group.unshown(state, flags)]
    memory = {_address(buffer) for group in {id(each): each for each, _ in new}.values() for buffer in group.flat()}
    for group, index in new:
        group.set_apart(state, index, memory)
    for group, index in new:
        group.take_over(state, index)


@dataclass(frozen=True, slots=True)
class FlatGradient:
    """The gradients of a group as one flat tensor, laid out like its main weights.

    Attributes:
        flat: every element of a parameter without gradient, and all padding, is zero.
        present: for each parameter of the group, whether it has a gradient.
    """

    flat: torch.Tensor
    present: tuple[bool, ...]


class GroupState:
    """The gradients of one parameter group, and its state on flat memory: what all kinds of state share.

    A kind says under which ``keys`` it shows each parameter, and makes the tensors.

    Args:
        group: held weakly.
        members: for each parameter of the group in plan order, the number of its param group in the optimizer, or
            ``ABSENT``.
        is_capturable: whether step counters live beside the weights, to be read by device work alone.
    """

    title = "AdamW"

    def __init__(self, group: ParameterGroup, members: Sequence[int], *, is_capturable: bool = False) -> None:
        main = group.main_weight
        self.members = tuple(members)
        self.device = group.spec.compute_device
        self.is_invariant = group.spec.dtypes.reduction is not None
        self._group = weakref.ref(group)
        self._names = tuple(f"unit {group.name!r}: parameter {name!r}" for name in group.parameters)
        self._params = tuple(group.parameters.values())
        self._pieces = tuple(local_range(main, index) for index in range(len(members)))
        # By identity: the group keeps them, and sees by references whether anybody else does.
        self._own_gradients: list[int] = []
        self._all_present = (True,) * len(members)
        self.axes: tuple[MeshAxis, ...] = tuple(group.spread_over(main.placements))
        self.is_capturable = is_capturable
        self.steps = torch.zeros(len(members), device=main.device if is_capturable else "cpu")
        # The dictionary of ``state`` that shows each parameter, an empty one where none does yet.
        self._shown: list[dict[str, Any]] = [{} for _ in members]
        self._views: list[tuple[Any, ...]] = [()] * len(members)
        self._in_order: list[Callable[[Mapping[str, Any]], tuple[Any, ...]]] = []
        # Members whose steps are counted, and what was worked out for each pattern of their rows.
        self._counted = self.members
        self._patterns: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}

    @property
    def group(self) -> ParameterGroup | None:
        """The group, None when its model is gone."""
        return self._group()

    # ------------------------------------------------------------------ gradients

    def gradient(self) -> FlatGradient | None:
        """Return the gradients of the parameters that are in the optimizer, None where there are none."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = list(map(_gradient_of, self._params))
        group = self.group
        gradients = None if group is None else group.gradients
        is_final = gradients is not None and gradients.binding.state is GradState.FINAL
        # The objects that lay in the group's buffer once still do: nothing has to be looked at again.
        if is_final and self._own_gradients and list(map(id, grads)) == self._own_gradients:
            assert gradients is not None
            return FlatGradient(gradients.binding.final.local_buffer, self._all_present)
        grads = [None if member == ABSENT else grad for grad, member in zip(grads, self.members, strict=True)]
        if group is None or all(grad is None for grad in grads):
            return None
        present = tuple(grad is not None for grad in grads)
        if gradients is None or not is_final:
            return FlatGradient(self._packed(group, grads), present)
        final = gradients.binding.settled()
        assert final is not None
        lies_inside = all(
            isinstance(grad, DTensor) and _lies_at(grad.to_local(), final.local_buffer[start:stop])
            for grad, (start, stop) in zip(grads, self._pieces, strict=True)
        )
        self._own_gradients = list(map(id, grads)) if lies_inside else []
        is_foreign = any(
            member == ABSENT and param.grad is not None
            for param, member in zip(self._params, self.members, strict=True)
        )
        # What is not this optimizer's must not count in the norm.
        return FlatGradient(self._packed(group, grads) if is_foreign else final.local_buffer, present)

    def readings(self) -> list[Reading]:
        """Return the gradient of every parameter that is in the optimizer, under its unit's and its own name."""
        found = []
        for param, name, member in zip(self._params, self._names, self.members, strict=True):
            if member != ABSENT:
                found.append(Reading(name, local_of(param.grad), self.axes, self.device))
        return found

    def _packed(self, group: ParameterGroup, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Copy gradients that are not in the group's buffer into a flat tensor of their own."""
        main = group.main_weight
        flat = torch.zeros(main.local_buffer.numel(), dtype=group.spec.dtypes.stepped, device=main.device)
        for grad, name, (start, stop) in zip(grads, self._names, self._pieces, strict=True):
            if grad is None:
                continue
            local = local_of(grad)
            if local.numel() != stop - start:
                raise StateError(
                    f"{name}: .grad has {local.numel()} elements on this rank, the parameter {stop - start}; assign a "
                    "DTensor laid out like the parameter, such as torch.zeros_like(parameter)"
                )
            cast_copy(local, flat[start:stop])
        return flat

    # ------------------------------------------------------------------ state

    def keys(self, index: int) -> tuple[str, ...]:
        """Return the keys of a parameter's state."""
        return KEYS

    def flat(self) -> tuple[torch.Tensor, ...]:
        """Return the flat tensors of which ``state`` shows parts."""
        raise NotImplementedError

    def _make_views(self, index: int) -> tuple[Any, ...]:
        """Return what ``state`` shows of a parameter, in the order of its keys."""
        raise NotImplementedError

    @staticmethod
    def _buffer(group: ParameterGroup, dtype: torch.dtype | None, what: str) -> DBuffer:
        """Return zeros that are laid out like the main weights, FP32 or of their dtype where none is given."""
        main, dtype = group.main_weight, dtype or group.spec.dtypes.stepped
        name = f"unit {group.name!r}: {what}"
        return DBuffer.from_plan(main.plan, main.mesh, main.placements, dtype, main.device, name=name).zero_()

    def _view(self, buffer: DBuffer, index: int) -> DTensor:
        group = self.group
        assert group is not None
        return group.fsdp_params.wrap(index, buffer.get_dtensor(index))

    def unshown(self, state: State, wanted: Sequence[bool]) -> list[int]:
        """Return the wanted parameters for which ``state`` does not show these buffers."""
        found = zip(self._params, wanted, strict=True)
        return [i for i, (param, is_wanted) in enumerate(found) if is_wanted and not self._shows(state.get(param), i)]

    def held(self, state: State) -> list[bool]:
        """Return for which parameters ``state`` holds something."""
        return [bool(state.get(param)) for param in self._params]

    def set_apart(self, state: State, index: int, memory: Collection[int]) -> None:
        """Copy what ``state`` shows of a parameter in one of these memories, unless it is the parameter's own."""
        values = state.get(self._params[index]) or {}
        for key, value in list(values.items()):
            is_own = any(value is view for view in self._views[index])
            if isinstance(value, torch.Tensor) and not is_own and _address(value) in memory:
                values[key] = value.clone()

    def is_shown(self) -> bool:
        """Whether the dictionaries that were adopted show these buffers for every parameter, still and all of them.

        Quicker than ``unshown``, for a caller that knows that the dictionaries are those.
        """
        if not self._in_order:
            self._in_order = [operator.itemgetter(*self.keys(index)) for index in range(len(self.members))]
        found = itertools.chain.from_iterable(map(operator.call, self._in_order, self._shown))
        try:
            return all(map(operator.is_, found, itertools.chain.from_iterable(self._views)))
        except KeyError:
            return False

    def _shows(self, values: Mapping[str, Any] | None, index: int) -> bool:
        if not values or values is not self._shown[index]:
            return False
        return all(values.get(key) is view for key, view in zip(self.keys(index), self._views[index], strict=True))

    def take_over(self, state: State, index: int) -> None:
        """Make ``state`` show these buffers for one parameter, with the values that it held or zeros."""
        param, keys = self._params[index], self.keys(index)
        views = self._views[index] or self._make_views(index)
        values = state.get(param)
        found = self._found(values, views, index) if values else (None,) * len(keys)
        for view, value in zip(views, found, strict=True):
            local = view._local_tensor if isinstance(view, DTensor) else view
            if value is None:
                local.zero_()
            elif value is not view:
                # Counters not by way of the host: that of a captured step lies on the device.
                local.copy_(self._rows(value, local, index))
        values = {} if values is None else values
        values.update(zip(keys, views, strict=True))
        state[param] = self._shown[index] = values
        self._views[index] = views

    def _found(self, values: Mapping[str, Any], views: Sequence[Any], index: int) -> tuple[Any, ...]:
        """Return what a parameter's state holds, in the order of its keys."""
        return state_values(values, self._names[index], self.keys(index), self.title)

    def _rows(self, value: Any, target: torch.Tensor, index: int) -> torch.Tensor:
        local: torch.Tensor = local_of(torch.as_tensor(value))
        if local.numel() != target.numel():
            raise StateError(
                f"{self._names[index]}: its {self.title} state has {local.numel()} elements on this rank, the "
                f"parameter {target.numel()}; load it with optimizer.load_state_dict, which brings it "
                "into the parameter's rows"
            )
        return local.reshape(target.shape)

    def count_step(self, row_of: Callable[[int, int], int], present: Sequence[bool]) -> Any:
        """Count one more step for the parameters that are present, and return the segments to update, with their rows.

        Args:
            row_of: gives the row of hyperparameters for (number of the param group, number of the step); not asked
                where counters must not be looked at, and each parameter's row is its position in the group.
        """
        pattern = self._pattern(row_of, present)
        found = self._patterns.get(pattern)
        if found is None:
            if len(self._patterns) >= _MAX_PATTERNS:
                self._patterns.clear()
            increments = torch.tensor([float(row != ABSENT) for row in pattern], device=self.steps.device)
            found = self._patterns[pattern] = (self._segments(pattern), increments)
        segments, increments = found
        self.steps.add_(increments)
        return segments

    def _pattern(self, row_of: Callable[[int, int], int], present: Sequence[bool]) -> tuple[int, ...]:
        members = self._counted
        if present is not self._all_present:
            pairs = zip(members, present, strict=True)
            members = tuple(member if is_present else ABSENT for member, is_present in pairs)
        if self.is_capturable:
            return tuple(ABSENT if member == ABSENT else index for index, member in enumerate(members))
        keys = list(zip(members, self.steps.tolist(), strict=True))
        rows = {key: ABSENT if key[0] == ABSENT else row_of(key[0], int(key[1]) + 1) for key in dict.fromkeys(keys)}
        return tuple(map(rows.__getitem__, keys))

    def _segments(self, rows: Sequence[int]) -> Any:
        """Return the segments of a step, given each parameter's row or ``ABSENT``."""
        raise NotImplementedError

    def weights(self) -> MuonWeights:
        """Return the flat weights that a step writes, with the compute weights where they are a copy on this rank."""
        group = self.group
        if group is None:
            raise StateError(f"{self.title}: the model of these parameters is gone; build the optimizer of one in use")
        main, model, remainder = group.main_weight, group.model_weight, group.weights.remainder
        weight, copy = main.local_buffer, None
        if model is not main:
            shard = model if model.placements == main.placements else model.slice_view(main.placements)
            copy = shard.local_buffer if shard.local_buffer.data_ptr() != weight.data_ptr() else None
        return MuonWeights(weight, copy, None if remainder is None else remainder.current())

    def settle(self) -> None:
        """Say that all launches of a step were made: what they wrote belongs together."""
        group = self.group
        if group is not None and group.weights.remainder is not None:
            group.weights.remainder.accept()


class GroupMoments(GroupState):
    """Both moments and the step counters of one parameter group.

    Args:
        group, members, is_capturable: as in ``GroupState``.
        dtype: of the moments; None: that of the main weights, FP32 where these are split.
    """

    def __init__(
        self, group: ParameterGroup, members: Sequence[int], dtype: torch.dtype | None, *, is_capturable: bool
    ) -> None:
        super().__init__(group, members, is_capturable=is_capturable)
        self.exp_avg = self._buffer(group, dtype, "exp_avg")
        self.exp_avg_sq = self._buffer(group, dtype, "exp_avg_sq")
        self._buffers: AdamWBuffers | Int8AdamWBuffers | None = None

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See ``GroupState``."""
        return self.exp_avg.local_buffer, self.exp_avg_sq.local_buffer, self.steps

    def _make_views(self, index: int) -> tuple[Any, ...]:
        return self.steps[index], self._view(self.exp_avg, index), self._view(self.exp_avg_sq, index)

    # ------------------------------------------------------------------ step

    def _segments(self, rows: Sequence[int]) -> Segments | CodedSegments:
        """Join neighbours of one row; padding between them is zero in all buffers, and AdamW keeps it zero."""
        joined: list[Segment] = []
        previous = ABSENT
        for index in sorted(range(len(rows)), key=lambda position: self._pieces[position][0]):
            (start, stop), row = self._pieces[index], rows[index]
            if start == stop:
                continue
            if row != ABSENT and row == previous:
                joined[-1] = Segment(joined[-1].start, stop, row)
            elif row != ABSENT:
                joined.append(Segment(start, stop, row))
            previous = row
        numel = self.exp_avg.local_buffer.numel()
        if len(joined) == 1 and ABSENT not in rows:
            # Padding at both ends too: whole buffers need no slices.
            joined = [Segment(0, numel, joined[0].row)]
        return Segments(joined, numel)

    def buffers(self, gradient: torch.Tensor) -> AdamWBuffers | Int8AdamWBuffers:
        """Return the flat tensors of a step."""
        weights, known = self.weights(), self._buffers
        if known is None or known.gradient is not gradient or known.weight is not weights.weight:
            known = self._buffers = self._with_moments(gradient, weights)
        return known

    def _with_moments(self, gradient: torch.Tensor, weights: MuonWeights) -> AdamWBuffers | Int8AdamWBuffers:
        moments = self.exp_avg.local_buffer, self.exp_avg_sq.local_buffer
        return AdamWBuffers(gradient, weights.weight, *moments, weights.model_weight, weights.remainder)


def local_of(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, and anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _address(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def local_range(buffer: DBuffer, index: int) -> tuple[int, int]:
    """Return where in this rank's part of the buffer its part of one tensor begins and ends."""
    held = buffer.layout.held(index)
    if not held:
        return 0, 0
    start = buffer.plan.offsets[index] + held.start - buffer.layout.start
    return start, start + len(held)


def _lies_at(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    return tensor.numel() == place.numel() and (not place.numel() or tensor.data_ptr() == place.data_ptr())
