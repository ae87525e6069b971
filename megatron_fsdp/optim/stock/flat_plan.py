"""Choose the flat tensors that replace an optimizer's parameters in a step, and move their state into flat memory.

Made when a step finds other parameters, gradients or state than the last one (``flat_step``).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from dbuffer.dtensor.attribute_ops import rebind
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.params import is_laid_out_like
from megatron_fsdp.engine.streams import is_capturing
from megatron_fsdp.optim.local_parts import local_range

__all__ = ["FlatPlan", "Run", "local_of", "spec_of"]

# CPU loops compute whole vectors and, at the end of a tensor, single elements. In narrow dtypes both round differently,
# so the result for an element depends on its position. The same holds for fused steps of any dtype; they combine
# parameters only where each one ends with a whole vector.
_WIDE = (torch.float32, torch.float64)
_VECTOR_BYTES = 64

local_of = operator.attrgetter("_local_tensor")
spec_of = operator.attrgetter("_spec")


class _State(dict[torch.Tensor, Any]):
    """State of flat tensors. Lookups of the optimizer's own parameters are passed on to their state."""

    def __init__(self, owner: Mapping[torch.Tensor, Any]) -> None:
        super().__init__()
        self.owner = owner

    def __missing__(self, parameter: torch.Tensor) -> Any:
        return self.owner[parameter]


@dataclass(slots=True, eq=False)
class _Member:
    """A sharded parameter that is stepped as a part of flat memory.

    Attributes:
        position: among the optimizer's parameters.
        start, stop: of its elements in this rank's part of the main weights.
        likeness: neighbours are stepped together where it is equal: their param group, keys of state, steps.
    """

    position: int
    parameter: FlatDTensor
    start: int
    stop: int
    likeness: Hashable


class Run:
    """Neighbours that are stepped as one tensor.

    Attributes:
        leader: the first one with elements, else the first. weight: their elements, 1-D. state: of the step.
        shown: its values that the members' state shows.
    """

    def __init__(self, members: list[_Member], main: torch.Tensor, owner: Mapping[Any, Any]) -> None:
        self.members, self.leader = members, _leader(members)
        self.weight = main[self.leader.start : max(self.leader.start, *(member.stop for member in members))]
        records = [owner.get(member.parameter) or {} for member in members]
        # The leader's own state that is not in flat memory: the step counter.
        self.state: dict[str, Any] = dict(records[members.index(self.leader)])
        for key, value in self.state.items():
            if isinstance(value, FlatDTensor):
                self.state[key] = self._join([record[key] for record in records])
        self.shown: list[Any] = []

    def _join(self, values: Sequence[FlatDTensor]) -> torch.Tensor:
        """Return the members' parts as one 1-D tensor; those that do not lie as the weights do are brought there."""
        first: torch.Tensor = local_of(values[self.members.index(self.leader)])
        pairs = list(zip(self.members, values, strict=True))
        if all(not m.parameter._local_tensor.numel() or _is_ahead(first, local_of(v), self._at(m)) for m, v in pairs):
            return first.as_strided((self.weight.numel(),), (1,))
        flat = torch.zeros_like(self.weight, dtype=first.dtype)
        for member, value in pairs:
            part = self._part(flat, member)
            part._local_tensor.copy_(value._local_tensor)
            rebind(value, part)
        return flat

    def _at(self, member: _Member) -> int:
        return member.start - self.leader.start

    def _part(self, flat: torch.Tensor, member: _Member) -> FlatDTensor:
        local = member.parameter._local_tensor
        begin = self._at(member) if local.numel() else 0
        return member.parameter.with_local(flat[begin : begin + local.numel()].view(local.shape))

    def distance(self, member: _Member) -> int:
        """Return how many bytes a member lies behind the leader."""
        return self._at(member) * member.parameter.dtype.itemsize

    def show(self, owner: Mapping[Any, Any]) -> None:
        """Show each member's part of the state in its own."""
        for member, (key, value) in ((m, item) for m in self.members for item in self.state.items()):
            is_flat = isinstance(value, torch.Tensor) and value.shape == self.weight.shape
            owner[member.parameter][key] = self._part(value, member) if is_flat else value


class FlatPlan:
    """Flat tensors for an optimizer's parameters, while these, their state and their gradients lie so.

    Attributes:
        tensors: for each param group, those to step. state: theirs. seen: what weights and state were made of.
        is_settled: False while a step is under way, or where one was broken off, whose state may be shown in part.
    """

    def __init__(
        self, owner: Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        self.parameters, self.gradient_ids = parameters, list(map(id, gradients))
        self.absent = list(map(operator.is_, gradients, repeat(None)))
        # Gradients that break runs may be others the next time.
        self.is_whole, self.is_settled = True, True
        self.seen: list[Any] = []
        self.sizes = [len(group["params"]) for group in owner.param_groups]
        self.state = _State(owner.state)
        # Numbers in state cannot be read in a capture; a plan that was made before goes on.
        self.runs = [] if is_capturing(parameters[0].device) else list(self._find_runs(owner, gradients))
        self.state.update((run.weight, run.state) for run in self.runs)
        self.members = [(run, member) for run in self.runs for member in run.members]
        flat = {member.position for _, member in self.members}
        group_of = [number for number, size in enumerate(self.sizes) for _ in range(size)]
        self.tensors: list[list[torch.Tensor]] = [[] for _ in self.sizes]
        for run in self.runs:
            self.tensors[group_of[run.leader.position]].append(run.weight)
        for position, parameter in enumerate(parameters):
            if position not in flat and gradients[position] is not None:
                self.tensors[group_of[position]].append(parameter)
        self._note_members()
        self.note(owner)

    def _note_members(self) -> None:
        # Lists, because every step reads every parameter.
        self.positions = [member.position for _, member in self.members]
        self.flat_parameters = [member.parameter for _, member in self.members]
        self.specs = list(map(spec_of, self.flat_parameters))
        self.numels = [run.weight.numel() for run in self.runs]
        number = {id(member): number for number, (_, member) in enumerate(self.members)}
        self.firsts = [number[id(run.leader)] for run in self.runs]
        # Those without elements lie nowhere.
        held = [(run, run.leader if member.stop > member.start else member, member) for run, member in self.members]
        self.leaders = [number[id(leader)] for _, leader, _ in held]
        self.distances = [0 if leader is member else run.distance(member) for run, leader, member in held]

    def note(self, owner: Optimizer) -> None:
        """Stack the step counters, and record the tensors in the members' state."""
        counted = [(run, member) for run, member in self.members if "step" in run.state]
        self.steps = torch.empty(0)
        if counted:
            # One operator then copies the leaders' step counters to all members.
            self.steps = torch.stack([owner.state[member.parameter]["step"] for _, member in counted])
            number = {id(member): number for number, (_, member) in enumerate(counted)}
            # Pinned, because a copy from pageable memory would make the host wait for the stream.
            indices = [number[id(run.leader)] for run, _ in counted]
            leads = torch.tensor(indices, device="cpu", pin_memory=self.steps.is_cuda)
            self.leads = leads.to(self.steps.device, non_blocking=True)
            for (run, member), step in zip(counted, self.steps.unbind(), strict=True):
                owner.state[member.parameter]["step"] = step
                run.state["step"] = step if member is run.leader else run.state["step"]
        self.version = self.steps._version
        for run in self.runs:
            run.shown = list(run.state.values())

    # ------------------------------------------------------------------ which parameters can be stepped so

    def _find_runs(self, owner: Optimizer, gradients: Sequence[Any]) -> Iterator[Run]:
        """Yield neighbours in the groups' plans that are alike and whose gradients lie so, too."""
        groups = {id(group): group for p in self.parameters if (group := group_of_parameter(p)) is not None}
        likenesses = _likenesses(owner)
        self.is_fused_on_cpu = self.parameters[0].device.type == "cpu" and bool(owner.param_groups[0].get("fused"))
        position_of = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        for group in groups.values():
            params, main = list(group.parameters.values()), group.main_weight.local_buffer
            links: list[_Member] = []
            for index in sorted(range(len(params)), key=group.plan.offsets.__getitem__):
                member, position = None, position_of.get(id(params[index]))
                if position is not None and likenesses[position] is not None and gradients[position] is not None:
                    member = _member(group, index, position, likenesses[position], gradients[position])
                    self.is_whole = self.is_whole and member is not None
                if links and (member is None or not self._goes_on(links, member, gradients)):
                    yield Run(links, main, owner.state)
                    links = []
                links += [] if member is None else [member]
            if links:
                yield Run(links, main, owner.state)

    def _goes_on(self, links: Sequence[_Member], member: _Member, gradients: Sequence[Any]) -> bool:
        leader = _leader(links)
        if member.likeness != leader.likeness:
            return False
        if leader.start == leader.stop or member.start == member.stop:
            return True
        if self.is_fused_on_cpu:
            before = next(each for each in reversed(links) if each.stop > each.start)
            ends = (member.start - leader.start, before.stop - before.start)
            if any(end * member.parameter.dtype.itemsize % _VECTOR_BYTES for end in ends):
                return False
        first, rows = (local_of(gradients[each.position]) for each in (leader, member))
        is_next = _is_ahead(first, rows, member.start - leader.start)
        self.is_whole = self.is_whole and is_next
        return is_next


def _likenesses(owner: Optimizer) -> list[Hashable]:
    """Return for each parameter the key it must share with others of a run; None if the user replaced its state."""
    pairs = [(number, param) for number, group in enumerate(owner.param_groups) for param in group["params"]]
    records = [owner.state.get(parameter) or {} for _, parameter in pairs]
    steps = {id(record): record["step"] for record in records if _is_number(record.get("step"))}
    kind = next(((step.dtype, step.device) for step in steps.values()), None)
    alike = {key: step for key, step in steps.items() if (step.dtype, step.device) == kind}
    # One transfer for all.
    counts = dict(zip(alike, torch.stack(list(alike.values())).tolist(), strict=True)) if alike else {}
    found: list[Hashable] = []
    for (number, parameter), record in zip(pairs, records, strict=True):
        count = counts.get(id(record))
        values = [value for key, value in record.items() if key != "step" or count is None]
        is_ours = type(parameter) is FlatDTensor and all(v is None or _has_rows_of(parameter, v) for v in values)
        is_wide = parameter.device.type != "cpu" or parameter.dtype in _WIDE
        keys = [(key, value is None) for key, value in record.items()]
        found.append((number, count, *keys) if is_ours and is_wide else None)
    return found


def _member(group: ParameterGroup, index: int, position: int, likeness: Hashable, gradient: Any) -> _Member | None:
    """Return a parameter as a part of its group's memory, None where it or its gradient is anything else."""
    parameter: Any = list(group.parameters.values())[index]
    if type(gradient) is not FlatDTensor or gradient._spec is not parameter._spec:
        return None
    local, rows, main = parameter._local_tensor, gradient._local_tensor, group.main_weight
    start, stop = local_range(main, index)
    is_there = stop == start or local.data_ptr() == main.local_buffer[start:].data_ptr()
    is_plain = all(type(each) is torch.Tensor and each.is_contiguous() for each in (local, rows))
    if group.weights.remainder is not None or not is_plain or not is_there:
        return None
    is_all = local.numel() == rows.numel() == stop - start
    return _Member(position, parameter, start, stop, likeness) if is_all else None


def _leader(members: Sequence[_Member]) -> _Member:
    return next((member for member in members if member.stop > member.start), members[0])


def _is_number(value: Any) -> bool:
    return type(value) is torch.Tensor and not value.ndim


def _has_rows_of(parameter: FlatDTensor, value: Any) -> bool:
    if type(value) is not FlatDTensor or value.window is not None or value.dtype is not parameter.dtype:
        return False
    local = value._local_tensor
    is_alike = value._spec is parameter._spec or (value.shape == parameter.shape and is_laid_out_like(value, parameter))
    return is_alike and type(local) is torch.Tensor and local.is_contiguous() and local.device == parameter.device


def _is_ahead(first: torch.Tensor, local: torch.Tensor, distance: int) -> bool:
    """Return whether a tensor is in the storage of another one, at this offset in elements."""
    is_there = local.data_ptr() - first.data_ptr() == distance * first.itemsize
    end = (first.storage_offset() + distance + local.numel()) * first.itemsize
    return is_there and first.untyped_storage().nbytes() >= end
