"""Gather encoded bytes instead of main weights, by a pair of all-gather hooks.

The first hook writes this rank's bytes. The second one decodes the gathered bytes into weights, on the all-gather lane.
This file has the pair for ``gather_dtype``; gather_hooks.py has the pair for tensor subclasses
(docs/design/low_precision.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from dbuffer import DBuffer, Element, Flat, Plan, Replicate
from dbuffer.collectives.parts import Part
from dbuffer.route import Route
from dbuffer_kernels import decode_rows, encode_row
from dbuffer_kernels.quantize import row_bytes
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.engine.weight_buffers import WeightBuffers
from megatron_fsdp.errors import ConfigError

__all__ = ["ByteWire", "check_resting", "packed_weights"]


def check_resting(spec: GroupSpec, who: str, fix: str) -> None:
    """Check that the weights are sharded over one axis like the main weights, and not offloaded.

    Args:
        who: the beginning of the error message: unit, and parameter or setting.
        fix: an alternative for the end of the message.
    Raises:
        ConfigError: the weights are replicated, sharded differently from the main weights, or in CPU memory.
    """
    resting = spec.placements.parameter
    if spec.is_offloaded or spec.placements.optimizer != resting or resting.count(Flat()) != 1:
        raise ConfigError(
            f"{who} needs weights that are sharded over one axis like the main weights, and not offloaded. fix: "
            f"placements=Placements.optim_grads_params() or Placements.hsdp() without CPU offload, or {fix}"
        )


class ByteWire:
    """Two uint8 buffers and the all-gather between them.

    Args:
        spec: the parameter group's spec.
        num_bytes: bytes per rank.
        name: name of the buffers in error messages.

    Attributes:
        num_ranks: the number of ranks that shard the weights.
        sent: this rank's ``num_bytes`` bytes.
        arrived: the gathered bytes of all ranks.
    """

    def __init__(self, spec: GroupSpec, num_bytes: int, name: str) -> None:
        resting = spec.placements.parameter
        self.num_ranks = spec.mesh.size(resting.index(Flat()))
        plan = Plan(((self.num_ranks * num_bytes,),), (Element(),), self.num_ranks, (0,), num_bytes)
        self.sent, self.arrived = (
            DBuffer.from_plan(plan, spec.mesh, placed, torch.uint8, spec.compute_device, name=name)
            for placed in (resting, (Replicate(),) * len(resting))
        )
        self._route = Route(self.sent, self.arrived)

    def parts(self, works: list[dist.Work] | None) -> list[Part]:
        """Allocate ``arrived`` and return the parts of its all-gather, like ``WeightBuffers.gather``."""
        self.arrived.storage.reallocate()
        return self._route.parts(works)


class Int8Codes:
    """All-gather hooks for weights that are gathered as int8 codes with one scale per 256 elements.

    Each rank quantizes its shard of the main weights once per optimizer step. One kernel decodes the gathered codes.
    Implements ``GatherHooks``.
    """

    sent: DBuffer
    arrived: DBuffer
    has_arrived = False
    _wire: ByteWire
    _main: DBuffer
    _gathered: DBuffer

    def __init__(self, spec: GroupSpec, who: str) -> None:
        self._spec, self._who = spec, who

    def attach(self, weights: WeightBuffers) -> DBuffer:
        """Allocate the buffers of the codes; return the buffer of gathered weights, in the compute dtype."""
        self._main, self._gathered = weights.main, weights.make_gathered()
        self._wire = ByteWire(self._spec, row_bytes(self._main.layout.numel), self._who)
        self.sent, self.arrived = self._wire.sent, self._wire.arrived
        self.arrived.release_storage()
        return self._gathered

    def refresh(self) -> None:
        """Quantize this rank's shard of the main weights."""
        encode_row(self._main.local_buffer.detach(), self.sent.local_buffer)

    def pre_all_gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the parts of the all-gather of the codes."""
        return self._wire.parts(works)

    def post_all_gather(self) -> None:
        """Decode the gathered codes into the compute dtype."""
        decode_rows(self.arrived.local_buffer, self._main.layout.numel, self._gathered.local_buffer)

    def release(self, *, keeps_gathered: bool) -> None:
        """Do nothing: ``post_all_gather`` has released the codes."""

    def agreed(self) -> Iterator[str]:
        """Yield nothing: ranks already compare the plan and the dtypes."""
        yield from ()


def packed_weights(plan: Plan, spec: GroupSpec, name: str) -> WeightBuffers:
    """Return the weight buffers of a group whose weights are gathered as int8 codes.

    Raises:
        ConfigError: as ``check_resting``.
    """
    who = f"unit {name!r}: MixedPrecisionPolicy(gather_dtype={spec.dtypes.gather!r})"
    check_resting(spec, who, "gather_dtype=None")
    weights = WeightBuffers(plan, spec, name, hooks=Int8Codes(spec, who))
    # Codes are computed after an optimizer step. A dtype cast is checked for staleness in every forward instead.
    weights.has_copy, weights.refreshes_locally = True, False
    return weights
