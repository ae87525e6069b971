"""HookedWeights: weights with a pair of all-gather hooks that encode and decode the gathered bytes.

The first hook fills this rank's bytes. The second one makes weights of the gathered bytes, on the stream of the
all-gather. ``gather_dtype`` uses such a pair (below), and so do tensor subclasses (docs/design/low_precision.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dbuffer import DBuffer, Element, Flat, Plan, Replicate
from dbuffer.collectives import Part
from dbuffer.route import Route
from dbuffer_kernels import decode_rows, encode_row
from dbuffer_kernels.quantize import row_bytes
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.engine.param_group import WeightBuffers
from megatron_fsdp.errors import ConfigError

__all__ = ["HookedWeights", "PackedWeights"]


class HookedWeights(WeightBuffers):
    """Weight buffers with a pair of hooks.

    Args:
        who: the start of error messages. cure: the end of the error about weights with unsuitable placements.
    Attributes:
        sent: the bytes of this rank, allocated permanently. arrived: the bytes of all ranks, released after use; it may
            be ``gathered`` itself.
        num_ranks: the number of ranks that shard the weights.
    Raises:
        ConfigError: the weights are replicated, cut finer than the main weights, or in CPU memory.
    """

    sent: DBuffer
    arrived: DBuffer
    lands = True
    # The first fills ``sent``, the second makes weights of ``arrived``.
    pre_all_gather: Callable[[], None]
    post_all_gather: Callable[[], None]

    def __init__(self, plan: Plan, spec: GroupSpec, name: str, *, who: str, cure: str) -> None:
        resting = spec.placements.parameter
        if spec.is_offloaded or spec.placements.optimizer != resting or resting.count(Flat()) != 1:
            raise ConfigError(
                f"{who} needs weights that rest sharded over one axis, as main weights do, on their device. Use "
                f"Placements.optim_grads_params or hsdp without CPU offload, or {cure}"
            )
        self._who, self._has_arrived = who, False
        self.num_ranks = spec.mesh.size(resting.index(Flat()))
        super().__init__(plan, spec, name)

    def _make_wire(self, num_bytes: int) -> None:
        """Allocate the buffers for ``num_bytes`` bytes of each rank."""
        spec, resting = self._spec, self._spec.placements.parameter
        plan = Plan(((self.num_ranks * num_bytes,),), (Element(),), self.num_ranks, (0,), num_bytes)
        self.sent, self.arrived = (
            DBuffer.from_plan(plan, spec.mesh, placed, torch.uint8, spec.compute_device, name=self._who)
            for placed in (resting, (Replicate(),) * len(resting))
        )
        self._wire = Route(self.sent, self.arrived)

    def gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the all-gather of the bytes, or of the part that was kept after forward."""
        self.gathered.storage.reallocate()
        if self.is_from_part and self.post_forward is not None:
            self._has_arrived = self.arrived is self.gathered
            return [self.post_forward.gather()]
        if self.gather_function is not None:
            raise ConfigError(f"{self._who}: all-gather hooks and a custom all-gather function; give one of the two")
        self.pre_all_gather()
        self.arrived.storage.reallocate()
        self._has_arrived = True
        return self._wire.parts(works)

    @torch.no_grad()
    def land(self, weights: Sequence[WeightBuffers]) -> None:
        """Decode the gathered bytes of a unit, on the all-gather's stream. Safe to repeat after an interruption."""
        for each in weights:
            if isinstance(each, HookedWeights) and each._has_arrived:
                each.post_all_gather()
                each._has_arrived = False
                # Keep bytes of which a part stays after forward, and bytes in slots, which the compute stream returns.
                is_kept = each.post_forward is not None or each.arrived.storage.takes_slots
                if each.arrived is not each.gathered or not is_kept:
                    each.arrived.release_storage()


class PackedWeights(HookedWeights):
    """Weight buffers of a group whose weights are gathered as int8 codes, with a scale for 256 elements.

    After a step each rank quantizes its shard of the main weights once. One kernel decodes the gathered codes.

    Attributes:
        refreshes_locally: False, because codes are not recomputed in every forward, unlike a cast.
    """

    def __init__(self, plan: Plan, spec: GroupSpec, name: str) -> None:
        who = f"unit {name!r}: MixedPrecisionPolicy(gather_dtype={spec.dtypes.gather!r})"
        super().__init__(plan, spec, name, who=who, cure="gather_dtype=None")
        self.has_copy, self.refreshes_locally = True, False
        self._make_wire(row_bytes(self.main.layout.numel))
        self.arrived.release_storage()

    def start_refresh(self) -> list[Part]:
        """Quantize this rank's shard of the main weights."""
        encode_row(self.main.local_buffer.detach(), self.sent.local_buffer)
        return []

    def pre_all_gather(self) -> None:
        """Do nothing: the codes are in ``sent`` already."""

    def post_all_gather(self) -> None:
        """Decode the codes to the compute dtype."""
        decode_rows(self.arrived.local_buffer, self.main.layout.numel, self.gathered.local_buffer)
