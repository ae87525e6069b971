"""Cost: how long the collectives and the compute of a step take, and how much of the former the latter hides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_fsdp.planning.model_spec import (
    AxisFacts,
    GroupFacts,
    ModelFacts,
    Redistribution,
    Transfer,
    UnitFacts,
    VisitKind,
)
from megatron_fsdp.planning.step_simulator import Forecast, Phase
from megatron_fsdp.planning.transformer import UnitWork, Workload

__all__ = [
    "Hardware",
    "Link",
    "Machine",
    "Span",
    "StepTime",
    "UnitTime",
    "microbatch_spans",
    "predict_step",
    "transfer_seconds",
]


@dataclass(frozen=True, slots=True)
class Link:
    """What one rank sends and receives along a mesh axis: bytes per second, and seconds per hop between neighbours."""

    bytes_per_second: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator and its links.

    Attributes:
        flops: operations per second that training achieves, not the peak of the data sheet.
        memory_bytes_per_second: of its memory, which bounds the optimizer. links: by mesh axis.
    """

    flops: float
    memory_bytes_per_second: float
    links: Mapping[str, Link]


def transfer_seconds(transfer: Transfer, link: Link) -> float:
    """Return how long one collective takes on a ring of n ranks.

    All-gather and reduce-scatter of S bytes (the full side) take n - 1 hops of S / n bytes: (n - 1) latency +
    (n - 1) / n S / bandwidth. An all-reduce is both in turn. Source: Thakur, Rabenseifner and Gropp 2005, sections 4.1
    and 4.4 (the time to add is left out: it is hidden behind the hops on an accelerator). An all-to-all of S bytes from
    each rank leaves 1 / n of them where they are; a send is one hop of S bytes.
    """
    if transfer.kind == "send":
        return link.latency + transfer.num_bytes / link.bytes_per_second
    hops = transfer.num_ranks - 1
    once = hops * link.latency + hops / transfer.num_ranks * transfer.num_bytes / link.bytes_per_second
    return 2 * once if transfer.kind == "all_reduce" else once


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Seconds of one unit and microbatch: what it computes, and the collectives that can overlap with its neighbours.

    Attributes:
        tail: of the collectives after the last backward, per step: reductions over outer axes, the refresh of weights.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_gather: float = 0.0
    backward_gather: float = 0.0
    reduce: float = 0.0
    tail: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step on every rank.

    Attributes:
        compute: of forward and backward. communication: of all collectives, hidden or not.
        exposed: what of them no compute hides. optimizer: the step over this rank's part.
        tokens_to_hide: tokens per rank and microbatch from which on the largest unit's collectives hide behind its
            own compute; 0 where there are none, None where compute is not known.
        units: by position in the facts.
        model_parallel: of collectives inside the model, none of which is taken to be hidden.
        bubble: waiting for other stages of a pipeline.
    """

    compute: float
    communication: float
    exposed: float
    optimizer: float
    tokens_to_hide: int | None
    units: tuple[UnitTime, ...] = field(repr=False, default=())
    model_parallel: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """The predicted length of the step."""
        return self.compute + self.exposed + self.optimizer + self.model_parallel + self.bubble


def predict_step(
    facts: ModelFacts,
    forecast: Forecast,
    work: Callable[[UnitFacts], UnitWork],
    workload: Workload,
    hardware: Hardware,
) -> StepTime:
    """Predict an optimizer step of ``workload.num_microbatches`` microbatches.

    The gather of a unit overlaps with the compute of the unit before it, its reduction with that of the unit after it
    in backward; gathers and reductions share the link. What starts when backward has ended is not hidden. Compute that
    waits for memory rather than arithmetic, launch overheads and stragglers are not counted.
    """
    gathers = _gather_seconds(forecast, workload.num_microbatches, hardware)
    # Equal units share their groups.
    groups = {id(group): group for unit in facts.units for group in unit.groups}
    reductions = {key: _reduction_seconds(group, hardware) for key, group in groups.items()}
    conditions = (workload, hardware)
    times = [
        _unit_time(gathers.get(position, {}), [reductions[id(group)] for group in unit.groups], work(unit), conditions)
        for position, unit in enumerate(facts.units)
    ]
    microbatches = workload.num_microbatches
    compute = microbatches * sum(time.forward + time.backward for time in times)
    overlapping = microbatches * sum(time.forward_gather + time.backward_gather + time.reduce for time in times)
    tail = sum(time.tail for time in times)
    passes = microbatches * max(span.stop for span in microbatch_spans(facts, times))
    return StepTime(
        compute=compute,
        communication=overlapping + tail,
        exposed=passes - compute + tail,
        optimizer=_optimizer_bytes(facts) / hardware.memory_bytes_per_second,
        tokens_to_hide=_tokens_to_hide(times, workload),
        units=tuple(times),
    )


def _gather_seconds(forecast: Forecast, num_microbatches: int, hardware: Hardware) -> dict[int, dict[Phase, float]]:
    """Return the seconds of each unit's gathers in forward and in backward, of a microbatch on average."""
    seconds: dict[int, dict[Phase, float]] = {}
    for issue in forecast.issues:
        if issue.transfer.kind == "all_gather":
            once = transfer_seconds(issue.transfer, hardware.links[issue.transfer.axis])
            by_phase = seconds.setdefault(issue.unit, {})
            by_phase[issue.phase] = by_phase.get(issue.phase, 0.0) + issue.count * once / num_microbatches
    return seconds


def _reduction_seconds(group: GroupFacts, hardware: Hardware) -> tuple[float, float]:
    """Return how long a group's reduction takes in each microbatch, and after the last."""

    def seconds(redistribution: Redistribution) -> float:
        return sum(transfer_seconds(each, hardware.links[each.axis]) for each in redistribution.transfers)

    return seconds(group.reduce()), seconds(group.finalize())


def _unit_time(
    gathers: Mapping[Phase, float],
    reductions: Sequence[tuple[float, float]],
    work: UnitWork,
    conditions: tuple[Workload, Hardware],
) -> UnitTime:
    workload, hardware = conditions
    return UnitTime(
        forward=work.forward(workload) / hardware.flops,
        backward=work.backward(workload) / hardware.flops,
        forward_gather=gathers.get(Phase.FORWARD, 0.0),
        backward_gather=gathers.get(Phase.BACKWARD, 0.0),
        reduce=sum(each for each, _ in reductions),
        tail=sum(last for _, last in reductions) + gathers.get(Phase.STEP, 0.0) * workload.num_microbatches,
    )


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank does for one unit, in seconds from the start of a microbatch.

    Attributes:
        lane: "gather", "compute" or "reduce". unit: its position in the facts.
    """

    lane: str
    unit: int
    phase: Phase
    start: float
    stop: float


def microbatch_spans(facts: ModelFacts, times: Sequence[UnitTime]) -> list[Span]:
    """Return the forward and the backward of one microbatch, in the order of units, as ``predict_step`` has them."""
    spans: list[Span] = []
    forward = [visit.unit for visit in facts.visits if visit.kind is VisitKind.OPEN]
    backward = [visit.unit for visit in reversed(facts.visits) if visit.kind is VisitKind.CLOSE]

    def add(lane: str, unit: int, phase: Phase, start: float, seconds: float) -> float:
        spans.append(Span(lane, unit, phase, start, start + seconds))
        return start + seconds

    now = add("gather", forward[0], Phase.FORWARD, 0.0, times[forward[0]].forward_gather)
    for unit, ahead in zip(forward, [*forward[1:], None], strict=True):
        ends = [add("compute", unit, Phase.FORWARD, now, times[unit].forward)]
        if ahead is not None:
            ends.append(add("gather", ahead, Phase.FORWARD, now, times[ahead].forward_gather))
        now = max(ends)
    now = add("gather", backward[0], Phase.BACKWARD, now, times[backward[0]].backward_gather)
    behind = None
    for unit, ahead in zip(backward, [*backward[1:], None], strict=True):
        computed = add("compute", unit, Phase.BACKWARD, now, times[unit].backward)
        if ahead is not None:
            now = add("gather", ahead, Phase.BACKWARD, now, times[ahead].backward_gather)
        if behind is not None:
            now = add("reduce", behind, Phase.BACKWARD, now, times[behind].reduce)
        now, behind = max(computed, now), unit
    add("reduce", backward[-1], Phase.BACKWARD, now, times[backward[-1]].reduce)
    return spans


def _optimizer_bytes(facts: ModelFacts) -> int:
    """Return what one AdamW step reads and writes: gradient, weights and both moments, and the compute weights."""
    return sum(
        group.local_numel(group.placements.optimizer) * _bytes_per_element(group)
        for unit in facts.units
        for group in unit.groups
        if group.requires_grad
    )


def _bytes_per_element(group: GroupFacts) -> int:
    dtypes = group.dtypes
    stepped = dtypes.stepped.itemsize
    # Split weights are read and written in two halves, one of which is the compute weight.
    weights = 2 * stepped + (dtypes.compute.itemsize if group.has_compute_copy else 0)
    # Both moments are read and written; codes are bytes, with a scale for each 256.
    moments = 4 if dtypes.moments == "int8" else 4 * stepped
    return dtypes.main_grad.itemsize + weights + moments


def _tokens_to_hide(times: Sequence[UnitTime], workload: Workload) -> int | None:
    """Return the tokens at which compute takes as long as the collectives beside it, for the neediest unit.

    Compute grows with the tokens at a given sequence length, collectives do not. Units that compute nothing, such as
    an embedding that is looked up, hide behind their neighbours or not at all, and are left out.
    """
    ratios = [
        max(time.forward_gather / time.forward, (time.backward_gather + time.reduce) / time.backward)
        for time in times
        if time.forward
    ]
    return -int(-max(ratios) * workload.tokens // 1) if ratios else None


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes of accelerators; the defaults are the line rates of eight H100 in a node with a 400 Gb/s port each.

    Attributes:
        flops: operations per second that training achieves on one accelerator.
        memory_bytes_per_second: of an accelerator's memory.
        node_size: accelerators of one node; consecutive ranks fill it.
        node_bandwidth, network_bandwidth: bytes per second and direction of one accelerator inside its node, and of
            its port to the network. node_latency, network_latency: seconds per hop.
    """

    flops: float = 400e12
    memory_bytes_per_second: float = 3.35e12
    node_size: int = 8
    node_bandwidth: float = 450e9
    network_bandwidth: float = 50e9
    node_latency: float = 1e-6
    network_latency: float = 5e-6

    def hardware(self, axes: Sequence[AxisFacts], bandwidths: Sequence[float] = (), *, stride: int = 1) -> Hardware:
        """Return what a rank has on each axis of a mesh.

        Args:
            bandwidths: measured ones, one per axis; empty: derived from the nodes.
            stride: how far apart neighbours on the innermost axis are.
        """
        links = {}
        for position in reversed(range(len(axes))):
            axis = axes[position]
            link = self._link(axis.size, stride)
            links[axis.name] = Link(bandwidths[position], link.latency) if bandwidths else link
            stride *= axis.size
        return Hardware(self.flops, self.memory_bytes_per_second, links)

    def _link(self, size: int, stride: int) -> Link:
        """Return the link of a ring of ``size`` ranks that lie ``stride`` apart.

        Of k members in each node one hop in k leaves the node, and the ring is spread over the ports of all k, so it
        runs at k times a port's rate, or at the node's own if that is less. Rings of other ranks use other ports.
        """
        members = max(1, min(size, self.node_size // stride))
        if members == size:
            return Link(self.node_bandwidth, self.node_latency)
        bandwidth = min(self.node_bandwidth if members > 1 else float("inf"), members * self.network_bandwidth)
        latency = (self.network_latency + (members - 1) * self.node_latency) / members
        return Link(bandwidth, latency)
