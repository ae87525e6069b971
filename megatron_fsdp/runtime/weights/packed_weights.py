"""PackedWeights: main weights that travel in 8 bits, whatever the sharding with the same values on every rank.

After a step each rank quantizes its shard of the main weights, once; gathers move these bytes, and one kernel turns
them into the compute dtype (docs/design/low_precision.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from dbuffer import Flat, Plan
from dbuffer.collectives import Part
from dbuffer.collectives_together import all_reduce_together
from dbuffer_kernels import CodedRows, decode_rows
from dbuffer_kernels.quantize import CHUNK, MX_BLOCK, RUNS, encode, scales_of
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.packed_layout import amax_numel, cut_blocks
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.runtime.step.freshness import MOMENTS
from megatron_fsdp.runtime.step.fsdp_params import handle_of
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup
from megatron_fsdp.runtime.weights.hooked_weights import HookedWeights, Wire

__all__ = ["PackedWeights"]


class PackedWeights(HookedWeights):
    """Weight buffers of a group whose weights are gathered as 8-bit codes.

    Attributes:
        refreshes_locally: False: what is quantized is not looked at again in every forward, as a cast is.
        magnitudes: fp32, the largest ones that ranks exchange before they quantize. known_at: for what state of the
            weights those are of all ranks.
    Raises:
        ConfigError: as ``HookedWeights``, or a device without FP8.
    """

    known_at: tuple[int, int, int] | None = None

    def __init__(self, plan: Plan, spec: GroupSpec, name: str) -> None:
        gather = spec.dtypes.gather
        assert gather is not None
        self._gather: str = gather
        who = f"unit {name!r}: MixedPrecisionPolicy(gather_dtype={gather!r})"
        super().__init__(plan, spec, name, who=who, cure="gather_dtype=None")
        if gather != "int8_block" and not spec.is_meta:
            _check_device(plan, spec, who)
        # What rests beside main weights: their codes, of forward, and of backward where that has a grid of its own.
        self.has_copy, self.refreshes_locally = True, False
        self._axis = replace(
            self.main.axes[spec.placements.parameter.index(Flat())],
            # On the communicator of gathers, of which the exchange is a part.
            has_separate_reduce_group=False,
        )
        self.magnitudes = torch.zeros(amax_numel(plan, gather), device=spec.compute_device)
        self._scales = torch.ones(len(plan.shapes), device=spec.compute_device) if gather == "fp8" else None
        self._places = cut_blocks(plan, gather)
        numel, num_ranks = self.main.layout.numel, self._axis.size
        # MXFP8 has a grid for forward and one for backward.
        kinds = (gather, "mxfp8 columns") if gather == "mxfp8" else (gather,)
        self._layouts = [CodedRows.of(kind, numel, num_ranks, plan.offsets, plan.shapes) for kind in kinds]
        for grid, layout in enumerate(self._layouts):
            self._wires[grid] = Wire(layout.row_bytes, spec, who)
            self._wires[grid].gathered.release_storage()

    # ------------------------------------------------------------------ quantize

    def _held(self) -> Iterator[tuple[int, slice, range]]:
        """Yield the tensors of which rows are here: number, place in the shard, rows."""
        layout, plan = self.main.layout, self._plan
        for index, shape in enumerate(plan.shapes):
            held = layout.held(index)
            if held:
                start = plan.offsets[index] + held.start - layout.start
                rows = range(held.start // shape[-1], held.stop // shape[-1])
                yield index, slice(start, start + len(rows) * shape[-1]), rows

    def _cut(self, index: int, rows: range) -> Iterator[tuple[int, slice]]:
        """Yield the blocks of which others have rows, counted from the first one here, and their magnitudes' place."""
        for block in {row // MX_BLOCK for row in (rows[0], rows[-1])}:
            if (index, block) in self._places:
                yield block - rows[0] // MX_BLOCK, self._places[index, block]

    def before_refresh(self, groups: Sequence[ParameterGroup]) -> None:
        """Let groups that are about to be quantized have the largest magnitudes of all ranks.

        The first one in a forward of the root asks for all units that will be quantized in it, by one all-reduce; of a
        group that has changed since they are asked for again.
        """
        asking = _exchanging(groups)
        if not asking:
            return
        unit = handle_of(groups[0].fsdp_params.unsharded_params[0]).unit()
        root = None if unit is None else unit.schedule.root_ref()
        call = None if root is None or root.open_call is None else root.open_call.begin
        together = dict(asking)
        if unit is not None and call is not None:
            if all(weights.known_at == _state(group, call) for weights, group in asking.items()):
                together = {}
            else:
                served = _exchanging(group for each in unit.schedule.units() for group in each.groups)
                is_evaluating = not torch.is_grad_enabled()
                together |= {w: g for w, g in served.items() if is_evaluating or g.freshness.is_changed()}
        if together:
            all_reduce_together([weights._look() for weights in together])
        for weights, group in together.items():
            weights.known_at = None if call is None else _state(group, call)
        for weights in asking:
            # For once: PyTorch does not count every change that may follow.
            weights.known_at = None

    def _look(self) -> Part:
        """Find this rank's ``magnitudes``, and return the exchange."""
        values, found = self.main.local_buffer.detach(), self.magnitudes.zero_()
        for index, part, rows in self._held():
            if self._scales is not None:
                found[index] = values[part].abs().amax()
            for block, place in self._cut(index, rows):
                found[place] = _blocks(values[part], rows)[block].abs().amax(0)
        return Part(self._axis, found, found, "max")

    def start_refresh(self) -> list[Part]:
        """Quantize this rank's shard of the main weights, for which ``magnitudes`` are those of all ranks."""
        values, kind = self.main.local_buffer.detach(), self._gather
        for layout, wire in zip(self._layouts, self._wires.values(), strict=True):
            codes, rest = wire.sent.local_buffer.tensor_split([values.numel()])
            if self._scales is not None:
                self._scales.copy_(scales_of(self.magnitudes, kind))
                for index, part, _ in self._held():
                    codes[part] = encode(values[part], self._scales[index], kind)
                continue
            for part, before, blocks, amax in self._in_blocks(values, layout):
                own = scales_of(amax, kind)
                numel, block, itemsize = part.stop - part.start, layout.block, own.itemsize
                codes[part] = encode(blocks, own[:, None], kind).view(-1)[before : before + numel]
                # Scale q of a tensor belongs to the shard with element 32 q, which lies in the block of that scale.
                own = own.view(-1)[before // block : (before + numel) // block].view(torch.uint8)
                rest[part.start // block * itemsize : part.stop // block * itemsize] = own
        return []

    def _in_blocks(
        self, values: torch.Tensor, layout: CodedRows
    ) -> Iterator[tuple[slice, int, torch.Tensor, torch.Tensor]]:
        """Yield parts of the shard, how many elements of others are before them, as blocks, and largest magnitudes."""
        if layout.kind in RUNS:
            for start in range(0, values.numel(), CHUNK):
                blocks = values[start : start + CHUNK].view(-1, layout.block)
                yield slice(start, start + blocks.numel()), 0, blocks, blocks.abs().amax(1).float()
            return
        for index, part, rows in self._held():
            blocks = _blocks(values[part], rows)
            amax = blocks.abs().amax(1).float()
            for block, place in self._cut(index, rows):
                amax[block] = self.magnitudes[place]
            yield part, rows.start % MX_BLOCK * blocks.shape[-1], blocks, amax

    # ------------------------------------------------------------------ hooks

    def pre_all_gather(self) -> Wire:
        """Return the codes: those of backward's grid where one is under way."""
        self.gathered.reallocate_storage()
        return self._wires[min(int(torch._C._current_graph_task_id() != -1), len(self._wires) - 1)]

    def post_all_gather(self, wire: Wire) -> None:
        """Turn the codes into the compute dtype."""
        layout = next(self._layouts[grid] for grid, each in self._wires.items() if each is wire)
        decode_rows(wire.gathered.local_buffer, layout, self._scales, self.gathered.local_buffer)


def _exchanging(groups: Iterable[ParameterGroup]) -> dict[PackedWeights, ParameterGroup]:
    pairs = [(group.weights, group) for group in groups if not group.is_meta]
    return {each: group for each, group in pairs if isinstance(each, PackedWeights) and each.magnitudes.numel()}


def _state(group: ParameterGroup, call: int) -> tuple[int, int, int]:
    return call, MOMENTS[0], sum(tensor._version for tensor in group.fsdp_params.counted)


def _blocks(values: torch.Tensor, rows: range) -> torch.Tensor:
    """Return (blocks of 32 rows of which some are here, 32, columns), with zeros for rows of others."""
    padded = torch.nn.functional.pad(values.view(len(rows), -1), (0, 0, rows.start % MX_BLOCK, -rows.stop % MX_BLOCK))
    return padded.view(-1, MX_BLOCK, padded.shape[-1])


def _check_device(plan: Plan, spec: GroupSpec, who: str) -> None:
    try:
        torch.zeros(1, device=spec.device).to(torch.float8_e4m3fn)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{who}: {spec.device} has no float8_e4m3fn ({error}), which parameters of shapes "
            f"{plan.shapes[:3]} would travel in. Use gather_dtype='int8_block' or None"
        ) from error
