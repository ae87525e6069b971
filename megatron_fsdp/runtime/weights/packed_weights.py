"""PackedWeights: main weights that travel in 8 bits, whatever the sharding with the same values on every rank.

After a step each rank quantizes its shard of the main weights, once; a gather moves these bytes and its end turns them
into the compute dtype (docs/design/low_precision.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from dbuffer import DBuffer, Element, Flat, Plan, Replicate
from dbuffer.collectives import Part, all_reduce
from dbuffer.route import Route
from dbuffer_kernels import QUANT_BLOCK
from dbuffer_kernels.quantize import (
    MX_BLOCK,
    fp8_scale,
    from_fp8,
    from_int8,
    from_mx,
    int8_scales,
    mx_exponents,
    to_fp8,
    to_int8,
    to_mx,
)
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.packed_layout import cut_blocks, num_grids, wire_bytes
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.weights.sharded_weights import ShardedWeights
from megatron_fsdp.runtime.weights.split_weights import Remainder

__all__ = ["PackedWeights"]

# Elements that are in fp32 at once on their way into the compute dtype: a multiple of all blocks.
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class _Held:
    """This rank's part of one tensor: its elements [start, stop), and where they lie in the shard."""

    index: int
    width: int
    start: int
    stop: int
    position: int

    @property
    def part(self) -> slice:
        return slice(self.position, self.position + self.stop - self.start)


class PackedWeights(ShardedWeights):
    """Weight buffers of a group whose weights are gathered as 8-bit codes.

    Attributes:
        refreshes_locally: False: what is quantized is not looked at again in every forward, as a cast is.
        main, model: main weights, which rest in no other dtype. gathered: in the compute dtype, made of the codes.
    Raises:
        ConfigError: weights that rest whole, finer than main weights or in CPU memory; or a device without FP8.
    """

    refreshes_locally = False

    def __init__(self, plan: Plan, spec: GroupSpec, name: str) -> None:
        assert spec.dtypes.gather is not None
        self._gather = spec.dtypes.gather
        _check(plan, spec, name)
        self._spec, self._plan = spec, plan
        resting = spec.placements.parameter
        self._arrived: int | None = None
        self.main = self.model = self._buffer(resting, spec.dtypes.main, spec.resting_device)
        whole = tuple(Replicate() for _ in resting)
        self.gathered = self._buffer(whole, spec.dtypes.compute, spec.compute_device)
        self._gathered_shard = self.gathered.slice_view(resting)
        self._axis = self.main.axes[resting.index(Flat())]
        # On the communicator of gathers, of which it is a part.
        self._exchange_axis = replace(self._axis, has_separate_reduce_group=False)
        self._held = self._held_parts()
        local = self._local_numel = self.main.layout.numel
        wire = Plan(
            ((self._axis.size * wire_bytes(self._gather, local),),),
            (Element(),),
            self._axis.size,
            (0,),
            wire_bytes(self._gather, local),
        )
        make = DBuffer.from_plan
        device = spec.compute_device
        # Of forward, and of backward where that has a grid of its own.
        self._sent = [make(wire, spec.mesh, resting, torch.uint8, device) for _ in range(num_grids(self._gather))]
        self._wire = make(wire, spec.mesh, whole, torch.uint8, device)
        self._routes = [Route(sent, self._wire) for sent in self._sent]
        self._tensor_scales = torch.ones(len(plan.shapes), device=device)
        self._slots = {block: slot for slot, block in enumerate(cut_blocks(plan, self._gather))}
        self.remainder = Remainder(self.main, pin_memory=spec.is_pinned) if spec.dtypes.is_split else None
        self.rename(name)
        self.main.zero_()
        self._wire.release_storage()

    def _held_parts(self) -> list[_Held]:
        layout, plan = self.main.layout, self._plan
        parts = []
        for index, shape in enumerate(plan.shapes):
            held = layout.held(index)
            if held:
                position = plan.offsets[index] + held.start - layout.start
                parts.append(_Held(index, shape[-1], held.start, held.stop, position))
        return parts

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        super().rename(name)
        for buffer in (*self._sent, self._wire):
            buffer.rename(f"unit {name!r}: packed weights")

    @property
    def sent(self) -> tuple[DBuffer, ...]:
        """This rank's parts of what travels, which rest beside main weights."""
        return tuple(self._sent)

    # ------------------------------------------------------------------ quantize

    def start_refresh(self) -> list[Part]:
        """Quantize this rank's shard of the main weights; ranks exchange largest magnitudes where scales need it."""
        values = self.main.local_buffer.detach()
        if self._gather == "fp8":
            self._quantize_tensors(values)
        elif self._gather == "int8_block":
            self._quantize_runs(values, QUANT_BLOCK, 0)
        else:
            self._quantize_runs(values, MX_BLOCK, 0)
            self._quantize_columns(values)
        return []

    def _parts_of(self, sent: DBuffer) -> tuple[torch.Tensor, torch.Tensor]:
        local = sent.local_buffer
        return local[: self._local_numel], local[self._local_numel :]

    def _quantize_tensors(self, values: torch.Tensor) -> None:
        amax = torch.zeros_like(self._tensor_scales)
        for held in self._held:
            amax[held.index] = values[held.part].abs().amax().float()
        all_reduce(amax, self._exchange_axis, "max")
        self._tensor_scales.copy_(fp8_scale(amax))
        codes, _ = self._parts_of(self._sent[0])
        for held in self._held:
            codes[held.part].copy_(to_fp8(values[held.part], self._tensor_scales[held.index]))

    def _quantize_runs(self, values: torch.Tensor, block: int, grid: int) -> None:
        """Quantize runs of ``block`` elements, which begin at multiples of it in every tensor and shard."""
        codes, scales = self._parts_of(self._sent[grid])
        for start in range(0, values.numel(), _CHUNK):
            runs = values[start : start + _CHUNK].view(-1, block)
            amax = runs.abs().amax(1).float()
            own = mx_exponents(amax) if self._gather == "mxfp8" else int8_scales(amax)
            found = to_mx(runs, own[:, None]) if self._gather == "mxfp8" else to_int8(runs, own[:, None])
            codes[start : start + _CHUNK].copy_(found.view(-1))
            first = start // block * own.itemsize
            scales[first : first + own.numel() * own.itemsize].copy_(own.view(torch.uint8))

    def _quantize_columns(self, values: torch.Tensor) -> None:
        """Quantize blocks of 32 rows of a column; of those that a shard boundary cuts, ranks exchange magnitudes."""
        amaxes = [self._column_magnitudes(values, held) for held in self._held]
        self._exchange(amaxes)
        codes, scales = self._parts_of(self._sent[1])
        for held, amax in zip(self._held, amaxes, strict=True):
            exponents = mx_exponents(amax)
            rows = values[held.part].view(-1, held.width)
            first_row = held.start // held.width
            block_of_row = (torch.arange(len(rows), device=rows.device) + first_row) // MX_BLOCK - first_row // MX_BLOCK
            codes[held.part].copy_(to_mx(rows, exponents[block_of_row]).view(-1))
            # Scale q of a tensor belongs to the shard that holds element 32 q, which lies in the block of that scale.
            base = first_row // MX_BLOCK * held.width
            own = exponents.view(-1)[held.start // MX_BLOCK - base : held.stop // MX_BLOCK - base]
            start = held.position // MX_BLOCK
            scales[start : start + own.numel()].copy_(own)

    def _column_magnitudes(self, values: torch.Tensor, held: _Held) -> torch.Tensor:
        """Return (blocks of which some row is here, columns)."""
        rows = values[held.part].view(-1, held.width).abs().float()
        first, last = held.start // held.width, held.stop // held.width
        above, below = first % MX_BLOCK, -last % MX_BLOCK
        return torch.nn.functional.pad(rows, (0, 0, above, below)).view(-1, MX_BLOCK, held.width).amax(1)

    def _exchange(self, amaxes: list[torch.Tensor]) -> None:
        if not self._slots:
            return
        widths = [self._plan.shapes[tensor][-1] for tensor, _ in self._slots]
        starts = [sum(widths[:slot]) for slot in range(len(widths) + 1)]
        packed = torch.zeros(starts[-1], device=self._tensor_scales.device)
        places = []
        for held, amax in zip(self._held, amaxes, strict=True):
            first = held.start // held.width // MX_BLOCK
            for row in range(len(amax)):
                slot = self._slots.get((held.index, first + row))
                if slot is not None:
                    places.append((amax[row], packed[starts[slot] : starts[slot + 1]]))
        for own, place in places:
            place.copy_(own)
        all_reduce(packed, self._exchange_axis, "max")
        for own, place in places:
            own.copy_(place)

    # ------------------------------------------------------------------ gather

    def gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Return the gather of the codes: those of backward's grid where one is under way."""
        self._arrived = None
        if self.is_from_part and self.post_forward is not None:
            self.gathered.reallocate_storage()
            return [self.post_forward.gather()]
        if self.gather_function is not None:
            raise ConfigError(f"{self.main.name}: gather_dtype={self._gather!r} and a custom all-gather; give one")
        self._wire.reallocate_storage()
        self.gathered.reallocate_storage()
        self._arrived = min(int(torch._C._current_graph_task_id() != -1), len(self._sent) - 1)
        return self._routes[self._arrived].parts(works)

    def gathered_is_used(self) -> None:
        """Turn the codes that arrived into the compute dtype, and release them."""
        super().gathered_is_used()
        if self._arrived is None:
            return
        grid = self._arrived
        rows = self._wire.local_buffer.view(self._axis.size, -1)
        codes = rows[:, : self._local_numel].reshape(-1)
        scales = rows[:, self._local_numel :].reshape(-1)
        out = self.gathered.local_buffer
        with torch.no_grad():
            for part, values in self._decoded(codes, scales, grid):
                out[part].copy_(values.view(-1))
        self._arrived = None
        self._wire.release_storage()

    def _decoded(self, codes: torch.Tensor, scales: torch.Tensor, grid: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield parts of the flat buffer with their fp32 values."""
        if self._gather == "fp8":
            yield from self._decoded_tensors(codes)
        elif grid == 1:
            yield from self._decoded_columns(codes, scales)
        else:
            decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
            block, decode = (MX_BLOCK, from_mx) if self._gather == "mxfp8" else (QUANT_BLOCK, from_int8)
            own = scales if self._gather == "mxfp8" else scales.view(torch.float32)
            for start in range(0, codes.numel(), _CHUNK):
                part = slice(start, min(start + _CHUNK, codes.numel()))
                runs = codes[part].view(-1, block)
                yield part, decode(runs, own[start // block : start // block + len(runs), None])

    def _decoded_tensors(self, codes: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for index, offset in enumerate(self._plan.offsets):
            end = offset + self._plan.tensor_numel(index)
            for start in range(offset, end, _CHUNK):
                part = slice(start, min(start + _CHUNK, end))
                yield part, from_fp8(codes[part], self._tensor_scales[index])

    def _decoded_columns(self, codes: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        for index, offset in enumerate(self._plan.offsets):
            width, numel = self._plan.shapes[index][-1], self._plan.tensor_numel(index)
            step = max(_CHUNK // (MX_BLOCK * width), 1) * MX_BLOCK * width
            for start in range(offset, offset + numel, step):
                part = slice(start, min(start + step, offset + numel))
                own = scales[part.start // MX_BLOCK : part.stop // MX_BLOCK].view(-1, 1, width)
                yield part, from_mx(codes[part].view(-1, MX_BLOCK, width), own)


def _check(plan: Plan, spec: GroupSpec, name: str) -> None:
    gather, placements = spec.dtypes.gather, spec.placements
    where = f"unit {name!r}: MixedPrecisionPolicy(gather_dtype={gather!r})"
    resting = placements.parameter
    if spec.is_offloaded or placements.optimizer != resting or resting.count(Flat()) != 1:
        raise ConfigError(
            f"{where} needs weights that rest sharded over one axis, as main weights do, on their device. Use "
            "Placements.optim_grads_params or hsdp without CPU offload, or gather_dtype=None"
        )
    if gather == "int8_block" or spec.is_meta:
        return
    try:
        torch.zeros(1, device=spec.device).to(torch.float8_e4m3fn)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{where}: {spec.device} has no float8_e4m3fn ({error}), which parameters of shapes "
            f"{plan.shapes[:3]} would travel in. Use gather_dtype='int8_block' or None"
        ) from error
