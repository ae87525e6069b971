"""Cost model: predict the time of a step on given hardware from the engine's own recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from dbuffer import CollectiveCall
from megatron_fsdp.planning.played_step import PlayedStep
from megatron_fsdp.planning.transformer import Workload
from megatron_fsdp.virtual.playback import DEVICE, Playback, play
from megatron_fsdp.virtual.recording import Work

__all__ = ["Hardware", "Link", "StepTime", "play_in_time", "predict_step", "transfer_seconds"]


@dataclass(frozen=True, slots=True)
class Link:
    """The link of one rank along a mesh axis: bytes per second, and seconds of latency per hop between neighbours."""

    bytes_per_second: float
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of the hardware. The defaults are the link rates of nodes with eight H100, each with a 400 Gb/s port.

    Attributes:
        flops: floating-point operations per second that training achieves on one accelerator.
        memory_bandwidth: bytes per second of an accelerator's memory.
        gpus_per_node: accelerators per node; consecutive ranks fill a node.
        node_bandwidth, network_bandwidth: bytes per second and direction of one accelerator, inside its node and
            through its network port. node_latency, network_latency: seconds per hop.
        links: the link of a rank along each mesh axis.
    """

    flops: float = 400e12
    memory_bandwidth: float = 3.35e12
    gpus_per_node: int = 8
    node_bandwidth: float = 450e9
    network_bandwidth: float = 50e9
    node_latency: float = 1e-6
    network_latency: float = 5e-6
    links: Mapping[str, Link] = field(default_factory=dict)

    def link(self, size: int, stride: int, rate: float | None = None) -> Link:
        """Return the link of a ring of ``size`` ranks that are ``stride`` apart; ``rate``: measured bytes per second.

        If a node has k ranks of the ring, one hop in k leaves the node, and the ring uses the ports of all k ranks. It
        therefore runs at k times a port's rate, or at the node's own rate if that is less. Other rings use other ports.
        """
        members = max(1, min(size, self.gpus_per_node // stride))
        if members == size:
            return Link(rate or self.node_bandwidth, self.node_latency)
        bandwidth = min(self.node_bandwidth if members > 1 else float("inf"), members * self.network_bandwidth)
        latency = (self.network_latency + (members - 1) * self.node_latency) / members
        return Link(rate or bandwidth, latency)


def transfer_seconds(transfer: CollectiveCall, link: Link) -> float:
    """Return the seconds that one collective takes on a ring of n ranks.

    All-gather and reduce-scatter of S bytes (the full side) take n - 1 hops of S / n bytes: (n - 1) latency +
    (n - 1) / n S / bandwidth. An all-reduce is a reduce-scatter and an all-gather. Source: Thakur, Rabenseifner and
    Gropp 2005, sections 4.1 and 4.4; the time of the additions is omitted, because accelerators hide it behind the
    hops. An all-to-all of S bytes per rank keeps 1 / n of them local. A send is one hop of S bytes.
    """
    if transfer.kind == "send":
        return link.latency_seconds + transfer.num_bytes / link.bytes_per_second
    hops = transfer.num_ranks - 1
    once = hops * link.latency_seconds + hops / transfer.num_ranks * transfer.num_bytes / link.bytes_per_second
    return 2 * once if transfer.kind == "all_reduce" else once


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of one optimizer step; equal on all ranks.

    Attributes:
        compute: forward and backward. communication: all collectives, hidden or not.
        exposed: time that compute waits, mostly for communication, in the engine's own step on this hardware.
        copying: the engine's copies on the compute stream.
        optimizer: the optimizer step on this rank's shards.
        causes: the longest waits of compute in at most three microbatches: pairs of a description and seconds.
        model_parallel: collectives inside the model; all are assumed to be exposed.
        bubble: waiting for other pipeline stages.
    """

    compute: float
    communication: float
    exposed: float
    copying: float
    optimizer: float
    model_parallel: float = 0.0
    bubble: float = 0.0
    causes: tuple[tuple[str, float], ...] = field(repr=False, default=())

    def extended(self, more: StepTime, times: int) -> StepTime:
        """Return the time with ``times`` more layers; ``more`` is the time with one more layer."""
        pairs = ((getattr(self, each.name), getattr(more, each.name)) for each in fields(self) if each.name != "causes")
        return StepTime(*(max(few + times * (many - few), 0.0) for few, many in pairs))

    @property
    def busy(self) -> float:
        """Seconds of a stage without bubble and optimizer; other pipeline stages may wait for them."""
        return self.compute + self.exposed + self.copying + self.model_parallel

    @property
    def total(self) -> float:
        """The predicted seconds of the step."""
        return self.busy + self.optimizer + self.bubble


# Recomputed operations, relative to backward's operations of the same kind without the weight gradient.
_AGAIN = {"attention in a layer": 0.5, "matrix in a layer": 1.0}


@dataclass(frozen=True, slots=True)
class _Speeds:
    """The speed of the hardware for a recorded step; the recorded operations are those of one token."""

    hardware: Hardware
    workload: Workload
    call: float = 5e-6
    stream_call: float = 1.5e-6
    launch: float = 5e-6

    def seconds(self, work: Work) -> float:
        """Return the seconds that a piece of work takes when it runs alone."""
        if work.ranks:
            transfer = CollectiveCall(work.kind, work.axis, len(work.ranks), work.num_bytes)
            return transfer_seconds(transfer, self.hardware.links[work.axis])
        if work.kind == "memory":
            return work.num_bytes / self.hardware.memory_bandwidth
        again = _AGAIN.get(work.kind, 0.0) if self.workload.recomputes and work.name == "backward" else 0.0
        return (1 + again) * work.flops * self.workload.tokens / self.hardware.flops

    def link(self, work: Work) -> str:
        """Return the shared resources: each mesh axis has its own links, and kernels share the device."""
        return work.axis if work.ranks else DEVICE

    def occupied(self, work: Work) -> float:
        """Return 0, because ``Hardware.flops`` is a rate that kernels reach while collectives run."""
        return 0.0


def play_in_time(played: PlayedStep, workload: Workload, hardware: Hardware) -> Playback:
    """Return the timeline of forward and backward on this hardware, for at most three microbatches."""
    return play(played.items.get(workload.num_microbatches) or played.items[3], _Speeds(hardware, workload))


def predict_step(played: PlayedStep, workload: Workload, hardware: Hardware) -> StepTime:
    """Predict the time of an optimizer step; ``played`` must have steps of as many microbatches."""
    count = workload.num_microbatches
    found = play_in_time(played, workload, hardware)
    quantities = _quantities(found)
    if count not in played.items:
        before = _quantities(play(played.items[2], _Speeds(hardware, workload)))
        quantities = [now + (count - 3) * (now - then) for now, then in zip(quantities, before, strict=True)]
    total, communication, copying = quantities
    compute = count * sum(each.microbatch(workload) for each in played.works) / hardware.flops
    return StepTime(
        compute=compute,
        communication=communication,
        exposed=max(total - compute - copying, 0.0),
        copying=copying,
        optimizer=played.moved_bytes / hardware.memory_bandwidth,
        causes=tuple((f"{unit} waits for {cause}", seconds) for (unit, cause), seconds in found.exposed().items()),
    )


def _quantities(found: Playback) -> list[float]:
    """Return the seconds of a step, of its collectives, and of the copies on the compute stream."""
    sent = sum(found.machine.seconds(each.work) for each in found.runs if each.work.ranks)
    copied = (each for each in found.runs if each.work.kind == "memory" and each.stream == "compute")
    return [found.seconds, sent, sum(each.end - each.start for each in copied)]
