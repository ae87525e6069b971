"""FlatState: optimizer state on flat memory, shown per parameter as torch.optim's state.

The optimizer's ``state`` holds parts of flat tensors, DTensors of sharded parameters, and step counters over one
tensor, so that state dicts and checkpoints see what ``torch.optim`` would show; a step works on flat memory alone.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from dbuffer_kernels import AdamWBuffers, CodedSegments, Int8AdamWBuffers, MuonWeights, Segment, Segments
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.adamw.param_memory import ABSENT, FlatGradient, ParamMemory
from megatron_fsdp.optim.adamw.update import Rows, Update
from megatron_fsdp.optim.local_parts import local_of

__all__ = ["KEYS", "FlatState", "Moments", "State", "adopt_together", "state_values"]

State = MutableMapping[Any, Any]
KEYS = ("step", "exp_avg", "exp_avg_sq")
# Patterns of missing gradients that are remembered; models whose experts come and go make ever new ones.
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
            f"{what}: the state of {parameter} has {sorted(map(str, values))}; wanted {list(keys)}. fix: load a "
            f"state dict in which {what} (or that of torch.optim, without amsgrad) steps the same parameters"
        )
    return tuple(values[key] for key in keys)


def adopt_together(wanted: Iterable[tuple[FlatState, Sequence[bool]]], state: State) -> None:
    """Make ``state`` show flat memory for the wanted parameters, with the values that it held or zeros.

    Values that lie in another parameter's memory are copied before that memory is overwritten. So users can exchange
    the records or moments of two parameters.
    """
    new = [(each, index) for each, flags in wanted for index in each.unshown(state, flags)]
    memory = {_address(flat) for each in {id(each): each for each, _ in new}.values() for flat in each.flat()}
    for each, index in new:
        each.set_apart(state, index, memory)
    for each, index in new:
        each.take_over(state, index)


class FlatState:
    """The common base of optimizer states. A subclass names the ``keys`` of a parameter's state and makes the tensors.

    Args:
        memory: where the parameters lie.
        members: for each of them the number of its param group in the optimizer, or ``ABSENT``.
        dtype: of moments; None: that of the weights, FP32 where these are split.
        is_capturable: whether step counters are on the device of the weights and only device work reads them.
    """

    title = "AdamW"

    def __init__(
        self, memory: ParamMemory, members: Sequence[int], dtype: torch.dtype | None, *, is_capturable: bool = False
    ) -> None:
        self.memory = memory
        self.members = tuple(members)
        self.dtype = dtype
        self.is_capturable = is_capturable
        self.steps = torch.zeros(len(members), device=memory.device if is_capturable else "cpu")
        self._all_present = (True,) * len(members)
        # The dictionary of ``state`` that shows each parameter, an empty one where none does yet.
        self._shown: list[dict[str, Any]] = [{} for _ in members]
        self._views: list[tuple[Any, ...]] = [()] * len(members)
        # Members whose steps are counted, and the cached result for each pattern of their rows.
        self._counted = self.members
        self._patterns: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {}

    def keys(self, index: int) -> tuple[str, ...]:
        """Return the keys of a parameter's state."""
        return KEYS

    def flat(self) -> tuple[torch.Tensor, ...]:
        """Return the flat tensors whose slices ``state`` contains."""
        raise NotImplementedError

    def _make_views(self, index: int) -> tuple[Any, ...]:
        """Return what ``state`` shows of a parameter, in the order of its keys."""
        raise NotImplementedError

    def _view(self, index: int, flat: torch.Tensor) -> Any:
        return self.memory.view(index, flat[slice(*self.memory.pieces[index])])

    # ------------------------------------------------------------------ what state shows

    def unshown(self, state: State, wanted: Sequence[bool]) -> list[int]:
        """Return the wanted parameters for which ``state`` does not show this memory."""
        pairs = zip(self.memory.params, wanted, strict=True)
        return [i for i, (param, is_wanted) in enumerate(pairs) if is_wanted and not self._shows(state.get(param), i)]

    def held(self, state: State) -> list[bool]:
        """Return for each parameter whether ``state`` has entries."""
        return [bool(state.get(param)) for param in self.memory.params]

    def set_apart(self, state: State, index: int, memory: Collection[int]) -> None:
        """Copy the parameter's state that lies in one of these memories, unless the memory is the parameter's own."""
        values = state.get(self.memory.params[index]) or {}
        for key, value in list(values.items()):
            is_own = any(value is view for view in self._views[index])
            if isinstance(value, torch.Tensor) and not is_own and _address(value) in memory:
                values[key] = value.clone()

    @functools.cached_property
    def _in_order(self) -> list[Callable[[Mapping[str, Any]], tuple[Any, ...]]]:
        return [operator.itemgetter(*self.keys(index)) for index in range(len(self.members))]

    def is_shown(self) -> bool:
        """Return whether the adopted dictionaries still show all of this memory, for every parameter.

        Quicker than ``unshown``, for a caller that knows that the dictionaries are those.
        """
        try:
            found = [values for get, shown in zip(self._in_order, self._shown, strict=True) for values in get(shown)]
        except KeyError:
            return False
        return all(map(operator.is_, found, itertools.chain.from_iterable(self._views)))

    def _shows(self, values: Mapping[str, Any] | None, index: int) -> bool:
        if not values or values is not self._shown[index]:
            return False
        return all(values.get(key) is view for key, view in zip(self.keys(index), self._views[index], strict=True))

    def take_over(self, state: State, index: int) -> None:
        """Make ``state`` show this memory for one parameter, with the values that it held or zeros."""
        param, keys = self.memory.params[index], self.keys(index)
        views = self._views[index] or self._make_views(index)
        values = state.get(param)
        found = self._found(values, views, index) if values else (None,) * len(keys)
        for view, value in zip(views, found, strict=True):
            local = local_of(view)
            if value is None:
                local.zero_()
            elif value is not view:
                # Counters are copied without the host, because a captured step has them on the device.
                local.copy_(self._rows(value, local, index))
        values = {} if values is None else values
        values.update(zip(keys, views, strict=True))
        state[param] = self._shown[index] = values
        self._views[index] = views

    def _found(self, values: Mapping[str, Any], views: Sequence[Any], index: int) -> tuple[Any, ...]:
        """Return the values of a parameter's state in the order of its keys."""
        return state_values(values, self.memory.names[index], self.keys(index), self.title)

    def _rows(self, value: Any, target: torch.Tensor, index: int) -> torch.Tensor:
        local: torch.Tensor = local_of(torch.as_tensor(value))
        if local.numel() != target.numel():
            raise StateError(
                f"{self.memory.names[index]}: its {self.title} state has {local.numel()} elements on this rank, the "
                f"parameter {target.numel()}. fix: load it with optimizer.load_state_dict, which brings it "
                "into the parameter's rows"
            )
        return local.reshape(target.shape)

    # ------------------------------------------------------------------ step

    def updates(self, gradient: FlatGradient, rows: Rows) -> list[Update]:
        """Count a step of what AdamW steps, and return its launches."""
        raise NotImplementedError

    def _count_step(self, rows: Rows, present: Sequence[bool]) -> Any:
        """Count one more step for the parameters that are present, and return what ``_segments`` made of their rows."""
        pattern = self._pattern(rows, present)
        found = self._patterns.get(pattern)
        if found is None:
            if len(self._patterns) >= _MAX_PATTERNS:
                self._patterns.clear()
            increments = torch.tensor([float(row != ABSENT) for row in pattern], device=self.steps.device)
            found = self._patterns[pattern] = (self._segments(pattern), increments)
        segments, increments = found
        self.steps.add_(increments)
        return segments

    def _pattern(self, rows: Rows, present: Sequence[bool]) -> tuple[int, ...]:
        members = self._counted
        if present != self._all_present:
            pairs = zip(members, present, strict=True)
            members = tuple(member if is_present else ABSENT for member, is_present in pairs)
        if self.is_capturable:
            # The host must not read counters here, so each parameter has its own row.
            return tuple(ABSENT if member == ABSENT else index for index, member in enumerate(members))
        keys = list(zip(members, self.steps.tolist(), strict=True))
        found = {
            key: ABSENT if key[0] == ABSENT else rows.number(key[0], int(key[1]) + 1) for key in dict.fromkeys(keys)
        }
        return tuple(map(found.__getitem__, keys))

    def _segments(self, rows: Sequence[int]) -> Any:
        """Return the segments of a step, given each parameter's row or ``ABSENT``."""
        raise NotImplementedError


class Moments(FlatState):
    """The two moments and the step counters of one memory, updated in one launch."""

    _buffers: AdamWBuffers | Int8AdamWBuffers | None = None

    @functools.cached_property
    def _moments(self) -> Any:
        return tuple(self.memory.zeros(self.dtype, name) for name in KEYS[1:])

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See ``FlatState``."""
        return *self._moments, self.steps

    def _make_views(self, index: int) -> tuple[Any, ...]:
        return self.steps[index], *(self._view(index, moment) for moment in self._moments)

    def updates(self, gradient: FlatGradient, rows: Rows) -> list[Update]:
        """See ``FlatState``."""
        segments = self._count_step(rows, gradient.present)
        weights, known = self.memory.weights(), self._buffers
        if known is None or known.gradient is not gradient.flat or known.weight is not weights.weight:
            known = self._buffers = self._with_moments(gradient.flat, weights)
        return [Update(known, segments, rows.of_steps(self.members, self.steps) if self.is_capturable else None)]

    def _with_moments(self, gradient: torch.Tensor, weights: MuonWeights) -> AdamWBuffers | Int8AdamWBuffers:
        exp_avg, exp_avg_sq = self._moments
        return AdamWBuffers(gradient, weights.weight, exp_avg, exp_avg_sq, weights.model_weight, weights.remainder)

    def _segments(self, rows: Sequence[int]) -> Segments | CodedSegments:
        """Join neighbours of one row; padding between them is zero in all buffers, and AdamW keeps it zero."""
        joined: list[Segment] = []
        previous = ABSENT
        for index in sorted(range(len(rows)), key=lambda position: self.memory.pieces[position][0]):
            (start, stop), row = self.memory.pieces[index], rows[index]
            if start == stop:
                continue
            if row != ABSENT and row == previous:
                joined[-1] = Segment(joined[-1].start, stop, row)
            elif row != ABSENT:
                joined.append(Segment(start, stop, row))
            previous = row
        numel = self.memory.numel
        if len(joined) == 1 and ABSENT not in rows:
            # Padding at both ends too: whole buffers need no slices.
            joined = [Segment(0, numel, joined[0].row)]
        return Segments(joined, numel)


def _address(tensor: torch.Tensor) -> int:
    local: torch.Tensor = local_of(tensor)
    return local.untyped_storage().data_ptr()
