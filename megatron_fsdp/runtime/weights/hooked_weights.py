"""HookedWeights: weights of which a pair of all-gather hooks says what travels, and makes weights of what arrived.

The first hook fills this rank's run of bytes; the second one runs in the lane of the gather, behind it. The pairs are
those of tensor subclasses (extension_hooks.py), and of ``gather_dtype`` (packed_weights.py;
docs/design/low_precision.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dbuffer import DBuffer, Element, Flat, Plan, Replicate
from dbuffer.collectives import Part
from dbuffer.route import Route
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.step.parameter_group import WeightBuffers
from megatron_fsdp.runtime.weights.sharded_weights import ShardedWeights

__all__ = ["HookedWeights", "Wire"]


class Wire:
    """Bytes on their way: this rank's run (``sent``), which rests, and those of all ranks, which come and go.

    Args:
        num_bytes: of each rank.
    Attributes:
        num_ranks: over which the weights are sharded.
    """

    def __init__(self, num_bytes: int, spec: GroupSpec, name: str) -> None:
        resting = spec.placements.parameter
        self.num_ranks = spec.mesh.size(resting.index(Flat()))
        plan = Plan(((self.num_ranks * num_bytes,),), (Element(),), self.num_ranks, (0,), num_bytes)
        self.sent, self.gathered = (
            DBuffer.from_plan(plan, spec.mesh, placed, torch.uint8, spec.compute_device, name=name)
            for placed in (resting, (Replicate(),) * len(resting))
        )
        self.route = Route(self.sent, self.gathered)

    @property
    def rows(self) -> torch.Tensor:
        """What arrived, (ranks, bytes)."""
        return self.gathered.local_buffer.view(self.num_ranks, -1)


class HookedWeights(ShardedWeights):
    """Weight buffers with a pair of hooks.

    Args:
        who: begins messages. cure: ends that of weights that do not rest as they should.
    Raises:
        ConfigError: the weights rest whole, finer than main weights or in CPU memory.
    """

    # Of each kind: what is gathered now, filled with this rank's bytes, and what makes weights of what arrived.
    pre_all_gather: Callable[[], Wire]
    post_all_gather: Callable[[Wire], None]

    def __init__(self, plan: Plan, spec: GroupSpec, name: str, *, who: str, cure: str) -> None:
        resting = spec.placements.parameter
        if spec.is_offloaded or spec.placements.optimizer != resting or resting.count(Flat()) != 1:
            raise ConfigError(
                f"{who} needs weights that rest sharded over one axis, as main weights do, on their device. Use "
                f"Placements.optim_grads_params or hsdp without CPU offload, or {cure}"
            )
        self._who = who
        self._wires: dict[Any, Wire] = {}
        self._arriving: Wire | None = None
        super().__init__(plan, spec, name)

    @property
    def sent(self) -> tuple[DBuffer, ...]:
        """This rank's parts of what travels, which rest beside main weights."""
        return tuple(wire.sent for wire in self._wires.values())

    def gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the gather of the bytes; or of the part kept after forward, of the bytes or of what they became."""
        if self.is_from_part and self.post_forward is not None:
            self.gathered.reallocate_storage()
            self._arriving = next((wire for wire in self._wires.values() if wire.gathered is self.gathered), None)
            return [self.post_forward.gather()]
        if self.gather_function is not None:
            raise ConfigError(f"{self._who}: all-gather hooks and a custom all-gather function; give one of the two")
        wire = self._arriving = self.pre_all_gather()
        wire.gathered.reallocate_storage()
        return wire.route.parts(works)

    @torch.no_grad()
    def land(self, weights: Sequence[WeightBuffers]) -> None:
        """Do what follows the gather of a unit's weights, in its lane; what was interrupted may be done again."""
        for each in weights:
            if isinstance(each, HookedWeights):
                each._use_arrived()

    def _use_arrived(self) -> None:
        """Make weights of the bytes that arrived, if any did, and release these."""
        wire = self._arriving
        if wire is None:
            return
        self.post_all_gather(wire)
        self._arriving = None
        # Of bytes a part may be kept after forward; and slots are given back where compute does so.
        if wire.gathered is not self.gathered or (self.post_forward is None and not wire.gathered.storage.takes_slots):
            wire.gathered.release_storage()
