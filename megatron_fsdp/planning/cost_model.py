"""Cost: how long the collectives and the compute of a step take, and how much of the former the latter hides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_fsdp.build.grouping import gathers_main_weights
from megatron_fsdp.planning.forecast import Forecast
from megatron_fsdp.planning.model_spec import AxisFacts, GroupFacts, ModelFacts, Transfer, UnitFacts
from megatron_fsdp.planning.played_step import PlayedStep, Run, with_names
from megatron_fsdp.planning.transformer import Recompute, UnitWork, Workload
from megatron_fsdp.virtual.playback import Playback, play
from megatron_fsdp.virtual.recording import Work

__all__ = [
    "Hardware",
    "Link",
    "Machine",
    "StepTime",
    "UnitTime",
    "played_microbatches",
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
        exposed: in which compute waits, most of it for communication, in the engine's own step on this hardware.
        copying: of the engine's passes over memory beside compute.
        optimizer: the step over this rank's part.
        tokens_to_hide: tokens per rank and microbatch from which on the largest unit's collectives hide behind its
            own compute; 0 where there are none, None where compute is not known.
        units: by position in the facts. causes: what compute waits for, the longest first.
        model_parallel: of collectives inside the model, none of which is taken to be hidden.
        bubble: waiting for other stages of a pipeline.
    """

    compute: float
    communication: float
    exposed: float
    copying: float
    optimizer: float
    tokens_to_hide: int | None
    units: tuple[UnitTime, ...] = field(repr=False, default=())
    causes: tuple[tuple[str, float], ...] = field(repr=False, default=())
    model_parallel: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """The predicted length of the step."""
        return self.compute + self.exposed + self.copying + self.optimizer + self.model_parallel + self.bubble


@dataclass(frozen=True, slots=True)
class _Speeds:
    """The hardware for a recorded step, whose operations are those of one token."""

    hardware: Hardware
    workload: Workload
    call: float = 5e-6
    stream_call: float = 1.5e-6
    launch: float = 5e-6

    def seconds(self, work: Work) -> float:
        """Return how long it takes alone."""
        if work.ranks:
            transfer = Transfer(work.kind, work.axis, len(work.ranks), work.num_bytes)
            return transfer_seconds(transfer, self.hardware.links[work.axis])
        kind, _, again = work.kind.partition(" ")
        if kind == "memory":
            return work.num_bytes / self.hardware.memory_bytes_per_second
        is_skipped = again and (
            self.workload.recompute is Recompute.NONE
            or (self.workload.recompute is Recompute.SELECTIVE and kind == "matrix")
        )
        return 0.0 if is_skipped else work.flops * self.workload.tokens / self.hardware.flops

    def link(self, work: Work) -> str:
        """Return the axis: each has links of its own."""
        return work.axis


def predict_step(
    facts: ModelFacts,
    work: Callable[[UnitFacts], UnitWork],
    played: PlayedStep,
    forecast: Forecast,
    workload: Workload,
    hardware: Hardware,
) -> StepTime:
    """Predict an optimizer step of ``workload.num_microbatches`` microbatches.

    Args:
        played: what the engine asked of a device in steps of as many, with the same ``facts`` and ``work``.
        forecast: of the same.
    """
    times = _unit_times(facts, work, forecast, workload, hardware)
    count = workload.num_microbatches
    total, communication, copying = (
        sum(run.times * each for run, each in zip(played.runs, column, strict=True))
        for column in zip(*(_repeated(run, workload, hardware) for run in played.runs), strict=True)
    )
    compute = count * sum(time.forward + time.backward for time in times)
    return StepTime(
        compute=compute,
        communication=communication,
        exposed=max(total - compute - copying, 0.0),
        copying=copying,
        optimizer=_optimizer_bytes(facts) / hardware.memory_bytes_per_second,
        tokens_to_hide=_tokens_to_hide(times, workload),
        units=tuple(times),
        causes=_causes(facts, played, workload, hardware),
    )


def played_microbatches(played: PlayedStep, workload: Workload, hardware: Hardware) -> Playback:
    """Return the step of at most three microbatches of the model with few layers of each kind, in time."""
    known = played.runs[0].items
    items = known.get(workload.num_microbatches) or known[3]
    return play(items, _Speeds(hardware, workload))


def _repeated(run: Run, workload: Workload, hardware: Hardware) -> tuple[float, float, float]:
    """Return the seconds of a run, of its collectives, and of its copies on compute, with all microbatches."""
    speeds, count = _Speeds(hardware, workload), workload.num_microbatches

    def quantities(count: int) -> tuple[float, float, float]:
        found = play(run.items[count], speeds)
        sent = sum(speeds.seconds(each.work) for each in found.runs if each.work.ranks)
        copied = (each for each in found.runs if each.work.kind == "memory" and each.stream == "compute")
        return found.seconds, sent, sum(each.end - each.start for each in copied)

    if count in run.items:
        return quantities(count)
    last = quantities(3)
    before = quantities(2)
    seconds, sent, copied = (now + (count - 3) * (now - then) for now, then in zip(last, before, strict=True))
    return seconds, sent, copied


def _causes(
    facts: ModelFacts, played: PlayedStep, workload: Workload, hardware: Hardware
) -> tuple[tuple[str, float], ...]:
    found = played_microbatches(played, workload, hardware).exposed()
    return tuple((with_names(f"{unit} waits for {cause}", facts), seconds) for (unit, cause), seconds in found.items())


def _unit_times(
    facts: ModelFacts,
    work: Callable[[UnitFacts], UnitWork],
    forecast: Forecast,
    workload: Workload,
    hardware: Hardware,
) -> list[UnitTime]:
    """Return the times of each unit: what it computes, and what it sends."""
    sent: defaultdict[tuple[int, str], float] = defaultdict(float)
    for issue in forecast.issues:
        what = {"gather": f"{issue.phase.value}_gather", "reduce": "reduce"}.get(issue.lane, "tail")
        if issue.lane == "gather" and all(group.rests_whole for group in facts.units[issue.unit].groups):
            what = "tail"
        times = issue.count / (1 if what == "tail" else workload.num_microbatches)
        sent[issue.unit, what] += times * transfer_seconds(issue.transfer, hardware.links[issue.transfer.axis])
    kinds = ("forward_gather", "backward_gather", "reduce", "tail")
    found = []
    for position, unit in enumerate(facts.units):
        computes = work(unit)
        forward, backward = (each(workload) / hardware.flops for each in (computes.forward, computes.backward))
        found.append(UnitTime(forward, backward, *(sent[position, kind] for kind in kinds)))
    return found


def _optimizer_bytes(facts: ModelFacts) -> int:
    """Return what one AdamW step reads and writes: gradient, weights and both moments, and the compute weights."""
    return sum(
        group.local_numel(group.placements.optimizer) * _bytes_per_element(group)
        for unit in facts.units
        for group in unit.groups
        if group.is_trained
    )


def _bytes_per_element(group: GroupFacts) -> int:
    dtypes = group.dtypes
    stepped = dtypes.stepped.itemsize
    # Split weights are read and written in two halves, one of which is the compute weight.
    is_alone = gathers_main_weights(group.placements, dtypes)
    has_copy = dtypes.gather is None and dtypes.main is not dtypes.compute and not is_alone
    weights = 2 * stepped + (dtypes.compute.itemsize if has_copy else 0)
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
