"""Machine: accelerators in nodes, and what a mesh axis gets of their links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fsdp.cost import Hardware, Link
from megatron_fsdp.facts import AxisFacts

__all__ = ["Machine"]


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

    def hardware(self, axes: Sequence[AxisFacts], bandwidths: Sequence[float] = ()) -> Hardware:
        """Return what a rank has on each axis of a mesh.

        Args:
            bandwidths: measured ones, one per axis; empty: derived from the nodes.
        """
        links = {}
        stride = 1
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
