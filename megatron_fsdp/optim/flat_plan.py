"""Which flat tensors stand for an optimizer's parameters while it steps, and how their state comes to lie so.

Made when a step finds other parameters, gradients or state than the last one (``step_hook``).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import torch
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from dbuffer.dtensor.attribute_ops import rebind
from megatron_fsdp.optim.param_memory import local_range
from megatron_fsdp.runtime.step.lanes import is_capturing
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter
from megatron_fsdp.runtime.weights.param_layout import is_laid_out_like

__all__ = ["FlatPlan", "sizes_of"]

# Loops of the CPU take whole vectors and, at the end of a tensor, single elements. In narrow dtypes the two round at
# different places, so an element's value depends on where it lies. So it does in fused optimizers, of any dtype, which
# are stepped together where vectors end at the end of each parameter.
_WIDE = (torch.float32, torch.float64)
_VECTOR_BYTES = 64

_local_of = operator.attrgetter("_local_tensor")
_spec_of = operator.attrgetter("_spec")


class _State(dict[torch.Tensor, Any]):
    """State of flat tensors, and of the optimizer's own parameters where it is asked for that of these."""

    def __init__(self, owner: Mapping[torch.Tensor, Any]) -> None:
        super().__init__()
        self.owner = owner

    def __missing__(self, parameter: torch.Tensor) -> Any:
        return self.owner[parameter]


@dataclass(slots=True, eq=False)
class _Member:
    """A sharded parameter that can be stepped as a part of flat memory.

    Attributes:
        position: among the optimizer's parameters. group, place: which one in the order of a parameter group's buffer.
        start, stop: of its elements in this rank's part of the main weights.
        alignment: how many elements the boundaries between it and others must be multiples of.
        likeness: neighbours are stepped together where it is equal: their param group, and keys and numbers of state.
    """

    position: int
    parameter: FlatDTensor
    group: ParameterGroup
    place: int
    start: int
    stop: int
    alignment: int = 1
    likeness: tuple[Hashable, ...] = ()


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbours that are stepped as one tensor.

    Attributes:
        lead: the place of the first member with elements, else 0. weight: the elements of all, 1-D.
        state: of the step. shown: its values that the members' state shows.
    """

    members: list[_Member]
    lead: int = 0
    weight: torch.Tensor = field(init=False)
    state: dict[str, Any] = field(default_factory=dict)
    shown: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.lead = next((at for at, member in enumerate(self.members) if member.start < member.stop), 0)
        leader = self.members[self.lead]
        stop = max(leader.start, *(member.stop for member in self.members))
        self.weight = leader.group.main_weight.local_buffer[leader.start : stop]

    def distance(self, member: _Member) -> int:
        """Return how many elements behind the leader a member begins; nothing for one without elements."""
        return member.start - self.members[self.lead].start if member.start < member.stop else 0

    def part(self, flat: torch.Tensor, member: _Member) -> FlatDTensor:
        """Return a member's part of a tensor that lies as the weights do."""
        begin, shape = self.distance(member), member.parameter._local_tensor.shape
        return member.parameter.with_local(flat[begin : begin + member.stop - member.start].view(shape))

    def joined(self, values: Sequence[FlatDTensor]) -> torch.Tensor:
        """Return values of all members as one tensor that lies as the weights do; they are brought there if need be."""
        first = values[self.lead]._local_tensor
        pairs = list(zip(self.members, values, strict=True))
        if all(_is_ahead(first, value._local_tensor, self.distance(member)) for member, value in pairs):
            return first.as_strided(self.weight.shape, (1,))
        flat = torch.zeros_like(self.weight, dtype=first.dtype)
        for member, value in pairs:
            part = self.part(flat, member)
            part._local_tensor.copy_(value._local_tensor)
            rebind(value, part)
        return flat

    def publish(self, state: Mapping[torch.Tensor, Any]) -> bool:
        """Show each member's part of the state in its own; return whether anything of it was new."""
        if len(self.state) == len(self.shown) and _same(self.state.values(), self.shown):
            return False
        for member in self.members:
            for key, value in self.state.items():
                if isinstance(value, torch.Tensor):
                    value = self.part(value, member) if value.shape == self.weight.shape else value.clone()
                state[member.parameter][key] = value
        return True


class _Numbers:
    """State of one number, such as a count of steps: every parameter has its own, and those of a run are equal.

    They lie side by side, so that one operator gives all of them what the step made of each leader's.
    """

    def __init__(self, slots: Sequence[tuple[dict[str, Any], str]], leaders: Sequence[int]) -> None:
        self.all = torch.stack([values[key] for values, key in slots])
        # Pinned, because a copy from pageable memory would make the host wait for the stream.
        numbers = torch.tensor(leaders, pin_memory=self.all.device.type == "cuda")
        self.leaders = numbers.to(self.all.device, non_blocking=True)
        for (values, key), number in zip(slots, self.all.unbind(), strict=True):
            values[key] = number
        self.version = self.all._version

    def share(self) -> None:
        """Give all of a run what its leader has."""
        self.all.copy_(self.all[self.leaders])
        self.version = self.all._version


class FlatPlan:
    """Flat tensors for an optimizer's parameters, while these, their state and their gradients lie so.

    Attributes:
        tensors: for each param group, those to step. state: theirs.
    """

    def __init__(
        self, owner: Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        self._sizes, self._absent = sizes_of(owner), list(map(operator.is_, gradients, repeat(None)))
        self._runs, is_whole = _runs(_members(owner, parameters, gradients), gradients)
        members = [member for run in self._runs for member in run.members]
        self._members, self._positions = ([m.parameter for m in members], [m.position for m in members])
        is_whole &= len(members) == sum(
            type(p) is FlatDTensor and g is not None for p, g in zip(parameters, gradients, strict=True)
        )
        # Gradients that break runs may be others the next time.
        self._gradient_ids = None if is_whole else list(map(id, gradients))
        self._specs = list(map(_spec_of, self._members))
        # Of each member the leader's number, and the bytes between the two; those without elements lie nowhere.
        firsts = [0]
        for run in self._runs:
            firsts.append(firsts[-1] + len(run.members))
        self._leads = [first + run.lead for first, run in zip(firsts, self._runs, strict=False)]
        of_run = [(lead, run) for lead, run in zip(self._leads, self._runs, strict=True) for _ in run.members]
        self._leaders = [
            lead if m.start < m.stop else at for at, (m, (lead, _)) in enumerate(zip(members, of_run, strict=True))
        ]
        self._distances = [
            run.distance(m) * m.parameter.dtype.itemsize for m, (_, run) in zip(members, of_run, strict=True)
        ]
        self.state = _State(owner.state)
        self.state.update((run.weight, run.state) for run in self._runs)
        group_of = [number for number, size in enumerate(self._sizes) for _ in range(size)]
        self.tensors: list[list[torch.Tensor]] = [[] for _ in self._sizes]
        for run in self._runs:
            self.tensors[group_of[run.members[0].position]].append(run.weight)
        flat = {*self._positions}
        for position, parameter in enumerate(parameters):
            if position not in flat and gradients[position] is not None:
                self.tensors[group_of[position]].append(parameter)
        self._show(owner, parameters)

    def _show(self, owner: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Let the members' state and that of the runs be one memory, and note what ``fits`` compares."""
        self._numbers = _lay_out_state(owner, self._runs)
        for run in self._runs:
            run.shown = tuple(run.state.values())
        self._seen = self._objects(owner, parameters)
        self._is_settled = True

    def _objects(self, owner: Optimizer, parameters: Sequence[torch.Tensor]) -> list[Any]:
        records = list(map(owner.state.get, self._members))
        values = chain.from_iterable(record.values() for record in records if record is not None)
        return [owner.state, *parameters, *map(_local_of, self._members), *records, *values]

    def fits(
        self, owner: Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> bool:
        """Whether nothing has changed but values, and no step was broken off, whose state may be shown in part."""
        if not self._is_settled or sizes_of(owner) != self._sizes:
            return False
        if list(map(operator.is_, gradients, repeat(None))) != self._absent:
            return False
        if self._gradient_ids is not None and list(map(id, gradients)) != self._gradient_ids:
            return False
        objects = self._objects(owner, parameters)
        is_same = len(objects) == len(self._seen) and _same(objects, self._seen)
        is_same = is_same and all(numbers.all._version == numbers.version for numbers in self._numbers)
        return is_same and self._fits_gradients([gradients[position] for position in self._positions])

    def _fits_gradients(self, gradients: Sequence[Any]) -> bool:
        # What is seen through a window has a layout of its own, so it has not the parameter's.
        if not _same(map(type, gradients), repeat(FlatDTensor)) or not _same(map(_spec_of, gradients), self._specs):
            return False
        rows = list(map(_local_of, gradients))
        if not _same(map(type, rows), repeat(torch.Tensor)):
            return False
        addresses = list(map(torch.Tensor.data_ptr, rows))
        if list(map(operator.sub, addresses, map(addresses.__getitem__, self._leaders))) != self._distances:
            return False
        return all(_has(rows[lead], run.weight.numel()) for lead, run in zip(self._leads, self._runs, strict=True))

    def begin(self, gradients: Sequence[Any]) -> None:
        """Give the flat tensors their gradients, which fit."""
        self._is_settled = False
        for run in self._runs:
            rows = gradients[run.members[run.lead].position]._local_tensor
            run.weight.grad = rows.as_strided(run.weight.shape, (1,))

    def settle(self, owner: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Take the gradients back, and show what the step did to the state."""
        for numbers in self._numbers:
            numbers.share()
        for run in self._runs:
            run.weight.grad = None
        if sum(run.publish(owner.state) for run in self._runs):
            # Nothing is read: what a run got is alike for all of its members.
            self._show(owner, parameters)
        self._is_settled = True


def sizes_of(optimizer: Optimizer) -> list[int]:
    """Return how many parameters each param group has."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    """Whether two lists of one length have the same objects."""
    return all(map(operator.is_, these, those))


def _has(first: torch.Tensor, numel: int) -> bool:
    """Whether a storage goes on for so many elements from the first one of a tensor."""
    return first.untyped_storage().nbytes() >= (first.storage_offset() + numel) * first.itemsize


def _is_ahead(first: torch.Tensor, local: torch.Tensor, distance: int) -> bool:
    """Whether a tensor, if it has elements, lies in the storage of another, so many behind its beginning."""
    is_there = local.data_ptr() - first.data_ptr() == distance * first.itemsize
    return not local.numel() or (is_there and _has(first, distance + local.numel()))


# ---------------------------------------------------------------- which parameters can be stepped so


def _members(
    owner: Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[_Member]:
    """Return the parameters that can be stepped on flat memory, with what they must share to be stepped together."""
    if is_capturing(parameters[0].device):
        # The numbers in their state cannot be read now; a plan that was made before goes on.
        return []
    on_cpu = parameters[0].device.type == "cpu"
    found: list[tuple[_Member, list[torch.Tensor]]] = []
    places: dict[int, dict[int, tuple[int, int]]] = {}
    group_of = chain.from_iterable(repeat(group, len(group["params"])) for group in owner.param_groups)
    for position, (parameter, gradient, group) in enumerate(zip(parameters, gradients, group_of, strict=True)):
        member = _member(position, parameter, gradient, places)
        if member is None or (on_cpu and parameter.dtype not in _WIDE):
            continue
        if on_cpu and group.get("fused"):
            member.alignment = _VECTOR_BYTES // parameter.dtype.itemsize
        record = owner.state.get(parameter) or {}
        numbers = [value for value in record.values() if type(value) is torch.Tensor and not value.ndim]
        others = [value for value in record.values() if type(value) is not torch.Tensor or value.ndim]
        if all(value is None or _has_rows_of(member.parameter, value) for value in others):
            member.likeness = (id(group), *((key, value is None) for key, value in record.items()))
            found.append((member, numbers))
    values = iter(_read([number for _, numbers in found for number in numbers]))
    for member, numbers in found:
        member.likeness += tuple(next(values) for _ in numbers)
    return [member for member, _ in found]


def _member(
    position: int, parameter: Any, gradient: Any, places: dict[int, dict[int, tuple[int, int]]]
) -> _Member | None:
    """Return a parameter as a part of its group's memory, None where it or its gradient is anything else."""
    if type(parameter) is not FlatDTensor or type(gradient) is not FlatDTensor:
        return None
    group, local, rows = group_of_parameter(parameter), parameter._local_tensor, gradient._local_tensor
    if group is None or gradient._spec is not parameter._spec or group.weights.remainder is not None:
        return None
    if id(group) not in places:
        order = sorted(enumerate(group.parameters.values()), key=lambda pair: group.plan.offsets[pair[0]])
        places[id(group)] = {id(param): (place, index) for place, (index, param) in enumerate(order)}
    place, index = places[id(group)].get(id(parameter), (-1, -1))
    if index < 0 or any(type(each) is not torch.Tensor or not each.is_contiguous() for each in (local, rows)):
        return None
    start, stop = local_range(group.main_weight, index)
    is_there = stop == start or local.data_ptr() == group.main_weight.local_buffer[start:].data_ptr()
    if not is_there or not local.numel() == rows.numel() == stop - start:
        return None
    return _Member(position, parameter, group, place, start, stop)


def _has_rows_of(parameter: FlatDTensor, value: Any) -> bool:
    if type(value) is not FlatDTensor or value.window is not None or value.dtype is not parameter.dtype:
        return False
    local = value._local_tensor
    is_alike = value._spec is parameter._spec or (value.shape == parameter.shape and is_laid_out_like(value, parameter))
    return is_alike and type(local) is torch.Tensor and local.is_contiguous() and local.device == parameter.device


def _read(numbers: Sequence[torch.Tensor]) -> list[Hashable]:
    """Return the values of tensors of one number, each with its dtype and device; one transfer for all of a kind."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for position, number in enumerate(numbers):
        kinds[number.dtype, number.device].append(position)
    values: list[Hashable] = [None] * len(numbers)
    for kind, positions in kinds.items():
        for position, value in zip(positions, torch.stack([numbers[p] for p in positions]).tolist(), strict=True):
            values[position] = (value, *kind)
    return values


# ---------------------------------------------------------------- how they lie


def _runs(members: Sequence[_Member], gradients: Sequence[Any]) -> tuple[list[_Run], bool]:
    """Return neighbours in the groups' buffers that are alike, and whether no gradient of theirs parts them."""
    runs: list[list[_Member]] = []
    # State is made in this order, which has to be the same on all ranks.
    order = {id(member.group): number for number, member in reversed(list(enumerate(members)))}
    is_whole = True
    for member in sorted(members, key=lambda member: (order[id(member.group)], member.place)):
        goes_on = bool(runs) and _goes_on(runs[-1], member)
        if goes_on and not _gradient_goes_on(runs[-1], member, gradients):
            goes_on = is_whole = False
        if not goes_on:
            runs.append([])
        runs[-1].append(member)
    return list(map(_Run, runs)), is_whole


def _goes_on(links: Sequence[_Member], member: _Member) -> bool:
    """Whether a neighbour can be stepped together with what lies before it."""
    last, held = links[-1], [link for link in links if link.start < link.stop]
    if (member.group, member.place, member.likeness) != (last.group, last.place + 1, last.likeness):
        return False
    boundaries = (held[-1].stop, member.start) if held and member.start < member.stop else ()
    return all((boundary - held[0].start) % member.alignment == 0 for boundary in boundaries)


def _gradient_goes_on(links: Sequence[_Member], member: _Member, gradients: Sequence[Any]) -> bool:
    first = next((link for link in links if link.start < link.stop), member)
    rows = gradients[first.position]._local_tensor, gradients[member.position]._local_tensor
    return _is_ahead(*rows, member.start - first.start)


def _lay_out_state(owner: Optimizer, runs: Iterable[_Run]) -> list[_Numbers]:
    """Bring the state that members have into flat memory, and give it to the runs."""
    slots: dict[Hashable, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    leaders: dict[Hashable, list[int]] = defaultdict(list)
    shared: list[tuple[_Run, str]] = []
    for run in runs:
        records = [owner.state.get(member.parameter) or {} for member in run.members]
        for key, value in records[0].items():
            run.state[key] = value
            if isinstance(value, FlatDTensor):
                run.state[key] = run.joined([record[key] for record in records])
            elif value is not None and len(records) > 1:
                kind = (value.dtype, value.device)
                leaders[kind] += repeat(len(slots[kind]), len(records))
                slots[kind] += ((record, key) for record in records)
                shared.append((run, key))
    numbers = [_Numbers(slots[kind], leaders[kind]) for kind in slots]
    for run, key in shared:
        run.state[key] = owner.state[run.members[0].parameter][key]
    return numbers
