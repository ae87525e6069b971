"""What is gathered in place of main weights: a run of bytes of each rank, by a pair of all-gather hooks.

The first hook fills this rank's run of bytes. The second one makes weights of what arrived, on the lane of the gather.
The pairs are that of ``gather_dtype``, below, and those of tensor subclasses (gather_hooks.py;
docs/design/low_precision.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from dbuffer import DBuffer, Element, Flat, Plan, Replicate
from dbuffer.collectives import Part
from dbuffer.route import GatherRoutes
from dbuffer_kernels import decode_rows, encode_row
from dbuffer_kernels.quantize import row_bytes
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.engine.param_group import WeightBuffers
from megatron_fsdp.errors import ConfigError

__all__ = ["ByteWire", "check_resting", "packed_weights"]


def check_resting(spec: GroupSpec, who: str, fix: str) -> None:
    """Refuse to gather anything but main weights where these do not rest sharded over one axis, on their device.

    Args:
        who: begins the message. fix: ends it.
    Raises:
        ConfigError: the weights are replicated, cut finer than the main weights, or in CPU memory.
    """
    resting = spec.placements.parameter
    if spec.is_offloaded or spec.placements.optimizer != resting or resting.count(Flat()) != 1:
        raise ConfigError(
            f"{who} needs weights that rest sharded over one axis, as main weights do, on their device. Use "
            f"Placements.optim_grads_params or hsdp without CPU offload, or {fix}"
        )


class ByteWire:
    """Bytes of each rank, and the gather of them.

    Args:
        spec: of the group. num_bytes: of each rank. name: of the buffers, for messages.

    Attributes:
        num_ranks: over which the weights are sharded. sent: the bytes of this rank. arrived: those of all ranks.
    """

    def __init__(self, spec: GroupSpec, num_bytes: int, name: str) -> None:
        resting = spec.placements.parameter
        self.num_ranks = spec.mesh.size(resting.index(Flat()))
        plan = Plan(((self.num_ranks * num_bytes,),), (Element(),), self.num_ranks, (0,), num_bytes)
        self.sent, self.arrived = (
            DBuffer.from_plan(plan, spec.mesh, placed, torch.uint8, spec.compute_device, name=name)
            for placed in (resting, (Replicate(),) * len(resting))
        )
        self._routes = GatherRoutes(self.sent, self.arrived)

    def parts(self, works: list[dist.Work] | None, in_forward: bool) -> list[Part]:
        """Bring the memory of ``arrived`` back, and return the gather, as ``WeightBuffers.gather`` does."""
        self.arrived.storage.reallocate()
        return (self._routes.forward if in_forward else self._routes.backward).parts(works)


class Int8Codes:
    """The pair of hooks for weights that are gathered as int8 codes, with a scale for 256 elements.

    After a step each rank quantizes its shard of the main weights, once; one kernel makes weights of what arrives. See
    ``GatherHooks``.
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
        """Make room for the codes; the gathered weights are of the compute dtype."""
        self._main, self._gathered = weights.main, weights.make_gathered()
        self._wire = ByteWire(self._spec, row_bytes(self._main.layout.numel), self._who)
        self.sent, self.arrived = self._wire.sent, self._wire.arrived
        self.arrived.release_storage()
        return self._gathered

    def refresh(self) -> None:
        """Quantize this rank's shard of the main weights."""
        encode_row(self._main.local_buffer.detach(), self.sent.local_buffer)

    def pre_all_gather(self, works: list[dist.Work] | None, in_forward: bool) -> list[Part]:
        """Return the gather of the codes, which rest."""
        return self._wire.parts(works, in_forward)

    def post_all_gather(self) -> None:
        """Turn the codes into the compute dtype."""
        decode_rows(self.arrived.local_buffer, self._main.layout.numel, self._gathered.local_buffer)

    def release(self, *, keeps_gathered: bool) -> None:
        """Do nothing: the codes were released when weights were made of them."""

    def agreed(self) -> Iterator[str]:
        """Yield nothing: plan and dtypes say all."""
        yield from ()


def packed_weights(plan: Plan, spec: GroupSpec, name: str) -> WeightBuffers:
    """Return the weight buffers of a group whose weights are gathered as int8 codes.

    Raises:
        ConfigError: as ``check_resting``.
    """
    who = f"unit {name!r}: MixedPrecisionPolicy(gather_dtype={spec.dtypes.gather!r})"
    check_resting(spec, who, "gather_dtype=None")
    weights = WeightBuffers(plan, spec, name, hooks=Int8Codes(spec, who))
    # What is quantized rests, and is not looked at again in every forward, as a cast is.
    weights.has_copy, weights.refreshes_locally = True, False
    return weights
