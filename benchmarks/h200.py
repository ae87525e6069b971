"""The times that an accelerator takes for kernels, collectives and host calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_fsdp.virtual.playback import DEVICE
from megatron_fsdp.virtual.recording import Work

__all__ = ["H200", "Machine"]

_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds of one accelerator, its links and its host.

    Attributes:
        flops: operations per second of large matrix products, by dtype. full_size: the least of a product's three
            sizes from which it has that rate. attention: share of the rate that fused attention reaches.
        memory: bytes per second. kernel: least seconds of a kernel.
        ranks_per_node: consecutive ranks. node, network: bytes per second that one rank sends in a collective, inside
            a node and to another. node_hop, network_hop: seconds per step of a collective.
        collective: seconds per collective in addition to its steps.
        collective_share: part of the device that a collective takes from kernels: 24 of 132 multiprocessors. NCCL takes
            16 with in-switch sums and up to 32 with rings.
        call, stream_call, launch: as in ``megatron_fsdp.virtual.playback.Speeds``.
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(repr=False)
    memory: float
    full_size: int = 1024
    attention: float = 0.6
    kernel: float = 3 * _MICRO
    ranks_per_node: int = 8
    node: float = 370e9
    network: float = 48e9
    node_hop: float = 1 * _MICRO
    network_hop: float = 5 * _MICRO
    collective: float = 10 * _MICRO
    collective_share: float = 24 / 132
    call: float = 5 * _MICRO
    stream_call: float = 1.5 * _MICRO
    launch: float = 5 * _MICRO

    def seconds(self, work: Work) -> float:
        """Return the seconds of work that runs alone on the device or its link."""
        if work.ranks:
            return self._collective_seconds(work)
        moving = work.num_bytes / self.memory
        if not work.flops:
            return max(self.kernel, moving)
        rate = self.flops.get(work.dtype, min(self.flops.values()))
        rate *= self.attention if work.kind == "attention" else min(1.0, work.least / self.full_size)
        return max(self.kernel, moving, work.flops / rate)

    def occupied(self, work: Work) -> float:
        """Return the part of the device that a collective takes from kernels."""
        return self.collective_share

    def link(self, work: Work) -> str:
        """Return the shared resource: links of the node or the network for a collective, else the device."""
        if not work.ranks:
            return DEVICE
        return "node" if self._num_nodes(work) == 1 else "network"

    def _num_nodes(self, work: Work) -> int:
        return len({rank // self.ranks_per_node for rank in work.ranks})

    def _collective_seconds(self, work: Work) -> float:
        num_ranks = len(work.ranks)
        is_inside = self.link(work) == "node"
        neighbours = num_ranks // self._num_nodes(work)
        # A ring through whole nodes uses the network ports of all ranks of a node.
        rate = self.node if is_inside else min(self.node, self.network * neighbours)
        hop = self.node_hop if is_inside else self.network_hop
        once = (num_ranks - 1) / num_ranks * work.num_bytes / rate
        ring = self.collective + (num_ranks - 1) * hop + once
        if work.kind != "all_reduce":
            return ring
        # NCCL takes the faster of two algorithms: a ring, passed twice, or a double binary tree, up and down.
        tree = self.collective + 2 * math.ceil(math.log2(num_ranks)) * hop + 2 * work.num_bytes / rate
        return min(2 * ring - self.collective, tree)


H200 = Machine(
    "H200",
    flops={torch.bfloat16: 620e12, torch.float16: 620e12, torch.float32: 50e12},
    memory=4.3e12,
)
"""Estimates, not measurements: see benchmarks/RESULTS.md, "Predicted"."""
