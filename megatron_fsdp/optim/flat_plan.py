"""Which flat tensors stand for an optimizer's parameters while it steps, and how their state comes to lie so.

Made when a step finds other parameters, gradients or state than the last one (``step_hook``).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from typing import Any, cast

import torch
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from dbuffer.dtensor.attribute_ops import rebind
from megatron_fsdp.optim.param_memory import local_range
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter
from megatron_fsdp.runtime.step.streams import is_capturing
from megatron_fsdp.runtime.weights.param_layout import is_laid_out_like

__all__ = ["FlatPlan", "Numbers", "Run", "local_of", "spec_of"]

# Loops of the CPU take whole vectors and, at the end of a tensor, single elements. In narrow dtypes the two round at
# different places, so an element's value depends on where it lies. So it does in fused optimizers, of any dtype, which
# are stepped together where vectors end at the end of each parameter.
_WIDE = (torch.float32, torch.float64)
_VECTOR_BYTES = 64

local_of = operator.attrgetter("_local_tensor")
spec_of = operator.attrgetter("_spec")


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
        position: among the optimizer's parameters. group, index: which one of a parameter group it is.
        start, stop: of its elements in this rank's part of the main weights.
        alignment: how many elements the boundaries between it and others must be multiples of.
        likeness: neighbours are stepped together where it is equal: their param group, and keys and numbers of state.
    """

    position: int
    parameter: FlatDTensor
    group: ParameterGroup
    index: int
    start: int
    stop: int
    alignment: int = 1
    likeness: Hashable = None

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class Run:
    """Neighbours that are stepped as one tensor.

    Attributes:
        weight: their elements, 1-D. leader: the first member with elements, else the first one.
        state: of the step. shown: its values that the members' state shows.
    """

    members: list[_Member]
    leader: _Member
    weight: torch.Tensor
    state: dict[str, Any] = field(default_factory=dict)
    shown: tuple[Any, ...] = ()

    def over(self, locals_: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the members' parts as one 1-D tensor on their memory, None where they do not lie as the weights do."""
        first = locals_[self.members.index(self.leader)]
        for member, local in zip(self.members, locals_, strict=True):
            if member.numel and not _is_ahead(first, local, member.start - self.leader.start):
                return None
        return first.as_strided((self.weight.numel(),), (1,))

    def join(self, values: Sequence[FlatDTensor]) -> torch.Tensor:
        """Bring values of all members into memory that lies as the weights do, and return that."""
        flat = torch.zeros_like(self.weight, dtype=values[0].dtype)
        for member, value in zip(self.members, values, strict=True):
            part = self.part(flat, member)
            part._local_tensor.copy_(value._local_tensor)
            rebind(value, part)
        return flat

    def part(self, flat: torch.Tensor, member: _Member) -> FlatDTensor:
        """Return a member's part of a tensor that lies as the weights do."""
        begin = member.start - self.leader.start if member.numel else 0
        local = flat[begin : begin + member.numel].view(member.parameter._local_tensor.shape)
        return member.parameter.with_local(local)


class Numbers:
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


class FlatPlan:
    """Flat tensors for an optimizer's parameters, while these, their state and their gradients lie so.

    Attributes:
        tensors: for each param group, those to step. state: theirs.
    """

    def __init__(
        self, owner: Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        self.parameters = parameters
        self.sizes = [len(group["params"]) for group in owner.param_groups]
        self.absent = list(map(operator.is_, gradients, repeat(None)))
        self.gradient_ids = list(map(id, gradients))
        members = _members(owner, parameters, gradients)
        self.runs = list(map(_run, _chains(members, gradients)))
        self.state = _State(owner.state)
        for run in self.runs:
            self.state[run.weight] = run.state
        self.tensors = self._tensors(gradients)
        self.is_settled = True
        self.show(owner)
        # Gradients that break runs may be others the next time.
        self.is_whole = len(self.runs) == len(list(_chains(members))) and len(members) == sum(
            type(p) is FlatDTensor and g is not None for p, g in zip(parameters, gradients, strict=True)
        )

    def _tensors(self, gradients: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor]]:
        """Return the runs of each param group, then its other parameters that have gradients."""
        group_of = [number for number, size in enumerate(self.sizes) for _ in range(size)]
        found: list[list[torch.Tensor]] = [[] for _ in self.sizes]
        for run in self.runs:
            found[group_of[run.leader.position]].append(run.weight)
        flat = {member.position for run in self.runs for member in run.members}
        for position, parameter in enumerate(self.parameters):
            if position not in flat and gradients[position] is not None:
                found[group_of[position]].append(parameter)
        return found

    def show(self, owner: Optimizer) -> None:
        """Let the members' state and that of the runs be one memory, and note what ``fits`` compares."""
        self.numbers = _lay_out_state(owner, self.runs)
        for run in self.runs:
            run.shown = tuple(run.state.values())
        self._remember(owner)

    def _remember(self, owner: Optimizer) -> None:
        # As lists: every parameter is looked at in every step.
        members = [member for run in self.runs for member in run.members]
        self.positions = [member.position for member in members]
        self.members = [member.parameter for member in members]
        self.locals = list(map(local_of, self.members))
        self.specs = list(map(spec_of, self.members))
        self.leaders, self.distances = [], []
        self.numels = [run.weight.numel() for run in self.runs]
        sizes = [len(run.members) for run in self.runs]
        beginnings = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self.firsts = [first + run.members.index(run.leader) for first, run in zip(beginnings, self.runs, strict=True)]
        for first, leader, run in zip(beginnings, self.firsts, self.runs, strict=True):
            for number, member in enumerate(run.members, first):
                # Those without elements lie nowhere.
                self.leaders.append(leader if member.numel else number)
                distance = (member.start - run.leader.start) if member.numel else 0
                self.distances.append(distance * member.parameter.dtype.itemsize)
        self.records = list(map(owner.state.get, self.members))
        self.values = list(chain.from_iterable(record.values() for record in self.records if record is not None))


def _is_ahead(first: torch.Tensor, local: torch.Tensor, distance: int) -> bool:
    """Whether a tensor lies in the storage of another, so many elements behind its beginning."""
    is_there = local.data_ptr() - first.data_ptr() == distance * first.itemsize
    end = (first.storage_offset() + distance + local.numel()) * first.itemsize
    return is_there and first.untyped_storage().nbytes() >= end


# ---------------------------------------------------------------- which parameters can be stepped so


def _members(
    owner: Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[_Member]:
    """Return the parameters that can be stepped on flat memory, with what they must share to be stepped together."""
    if is_capturing(parameters[0].device):
        # The numbers in their state cannot be read now; a plan that was made before goes on.
        return []
    on_cpu = parameters[0].device.type == "cpu"
    found: list[_Member] = []
    numbers: list[torch.Tensor] = []
    indices: dict[int, dict[int, int]] = {}
    group_of = chain.from_iterable(repeat(group, len(group["params"])) for group in owner.param_groups)
    for position, (parameter, gradient, group) in enumerate(zip(parameters, gradients, group_of, strict=True)):
        member = _member(position, parameter, gradient, indices)
        if member is None or (on_cpu and parameter.dtype not in _WIDE):
            continue
        if on_cpu and group.get("fused"):
            member.alignment = _VECTOR_BYTES // parameter.dtype.itemsize
        record = owner.state.get(parameter) or {}
        mine = [value for value in record.values() if _is_number(value)]
        others = [value for value in record.values() if not _is_number(value)]
        if all(value is None or _has_rows_of(member.parameter, value) for value in others):
            kinds = [(key, value is None) for key, value in record.items()]
            member.likeness = (id(group), *kinds, len(numbers), len(mine))
            numbers += mine
            found.append(member)
    values = _read(numbers)
    for member in found:
        *kinds, first, count = cast(tuple[Any, ...], member.likeness)
        member.likeness = (*kinds, *values[first : first + count])
    return found


def _member(position: int, parameter: Any, gradient: Any, indices: dict[int, dict[int, int]]) -> _Member | None:
    """Return a parameter as a part of its group's memory, None where it or its gradient is anything else."""
    if type(parameter) is not FlatDTensor or type(gradient) is not FlatDTensor:
        return None
    group, local, rows = group_of_parameter(parameter), parameter._local_tensor, gradient._local_tensor
    if group is None or gradient._spec is not parameter._spec or group.weights.remainder is not None:
        return None
    if id(group) not in indices:
        indices[id(group)] = {id(param): index for index, param in enumerate(group.parameters.values())}
    index = indices[id(group)].get(id(parameter))
    if index is None or any(type(each) is not torch.Tensor or not each.is_contiguous() for each in (local, rows)):
        return None
    main = group.main_weight
    start, stop = local_range(main, index)
    is_there = stop == start or local.data_ptr() == main.local_buffer[start:].data_ptr()
    if not is_there or not local.numel() == rows.numel() == stop - start:
        return None
    return _Member(position, parameter, group, index, start, stop)


def _is_number(value: Any) -> bool:
    return type(value) is torch.Tensor and not value.ndim


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


def _chains(members: Sequence[_Member], gradients: Sequence[Any] = ()) -> Iterator[list[_Member]]:
    """Yield neighbours in the groups' plans that are alike; given gradients, those whose gradients lie so, too."""
    by_group: dict[int, list[_Member]] = defaultdict(list)
    for member in members:
        by_group[id(member.group)].append(member)
    for found in by_group.values():
        offsets = found[0].group.plan.offsets
        ranks = {index: rank for rank, index in enumerate(sorted(range(len(offsets)), key=offsets.__getitem__))}
        found.sort(key=lambda member: ranks[member.index])
        links = [found[0]]
        for member in found[1:]:
            is_next = ranks[member.index] == ranks[links[-1].index] + 1 and _goes_on(links, member)
            if not is_next or (gradients and not _gradient_goes_on(links, member, gradients)):
                yield links
                links = []
            links.append(member)
        yield links


def _goes_on(links: Sequence[_Member], member: _Member) -> bool:
    """Whether a neighbour can be stepped together with what lies before it."""
    before = [link for link in links if link.numel]
    if member.likeness != links[-1].likeness:
        return False
    boundaries = (before[-1].stop, member.start) if before and member.numel else ()
    return all((boundary - before[0].start) % member.alignment == 0 for boundary in boundaries)


def _gradient_goes_on(links: Sequence[_Member], member: _Member, gradients: Sequence[Any]) -> bool:
    leader = _leader(links)
    if not leader.numel or not member.numel:
        return True
    first, rows = (gradients[each.position]._local_tensor for each in (leader, member))
    return _is_ahead(first, rows, member.start - leader.start)


def _leader(members: Sequence[_Member]) -> _Member:
    return next((member for member in members if member.numel), members[0])


def _run(members: list[_Member]) -> Run:
    leader = _leader(members)
    stop = max(member.stop for member in members) if leader.numel else leader.start
    return Run(members, leader, leader.group.main_weight.local_buffer[leader.start : stop])


def _lay_out_state(owner: Optimizer, runs: Iterable[Run]) -> list[Numbers]:
    """Bring the state that members have into flat memory, and give it to the runs."""
    slots: dict[Hashable, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    leaders: dict[Hashable, list[int]] = defaultdict(list)
    shared: list[tuple[Run, str]] = []
    for run in runs:
        records = [owner.state.get(member.parameter) or {} for member in run.members]
        for key, value in records[0].items():
            run.state[key] = value
            if isinstance(value, FlatDTensor):
                values = [record[key] for record in records]
                flat = run.over(list(map(local_of, values)))
                run.state[key] = run.join(values) if flat is None else flat
            elif value is not None and len(records) > 1:
                kind = (value.dtype, value.device)
                leaders[kind] += repeat(len(slots[kind]), len(records))
                slots[kind] += ((record, key) for record in records)
                shared.append((run, key))
    numbers = [Numbers(slots[kind], leaders[kind]) for kind in slots]
    for run, key in shared:
        run.state[key] = owner.state[run.members[0].parameter][key]
    return numbers
