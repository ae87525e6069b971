"""Int8State: AdamW's moments as 8-bit codes and their scales, the same for any sharding.

A block is 256 elements of a whole flattened parameter, and its plan never cuts one (docs/design/low_precision.md), so
codes and scales are those of a single process. The optimizer's ``state`` shows them as DTensors: codes in the shape of
the parameter, scales in one dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer, Element, Plan
from dbuffer_kernels import (
    QUANT_BLOCK,
    CodedSegment,
    CodedSegments,
    Int8AdamWBuffers,
    Int8Moments,
    MuonWeights,
    dequantize_blocks,
    num_blocks,
    quantize_blocks,
)
from megatron_fsdp.engine.param_group import group_of_parameter
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.adamw.flat_state import KEYS, Moments, State, state_values
from megatron_fsdp.optim.adamw.param_memory import ABSENT, GroupMemory, ParamMemory
from megatron_fsdp.optim.local_parts import local_of

__all__ = ["CODED_KEYS", "Int8State", "decoded_state", "is_coded"]

CODED_KEYS = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
MIN_NUMEL = 4096
"""Smaller parameters keep FP32 moments; torchao's and bitsandbytes' number, asked of the whole parameter here."""
_PLAIN_ALIGNMENT = 4


def is_coded(shape: Sequence[int]) -> bool:
    """Return whether moments of a parameter of this full shape are stored in 8 bits."""
    return math.prod(shape) >= MIN_NUMEL


def _plan_of_scales(plan: Plan) -> Plan:
    """Return where the scales of a plan's tensors lie: shard k holds those of the blocks of shard k of ``plan``."""
    return Plan(
        shapes=tuple((num_blocks(math.prod(shape)),) for shape in plan.shapes),
        granularities=(Element(),) * len(plan.shapes),
        num_shards=plan.num_shards,
        offsets=tuple(offset // QUANT_BLOCK for offset in plan.offsets),
        shard_numel=plan.shard_numel // QUANT_BLOCK,
    )


def decoded_state(parameter: torch.Tensor, values: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the state of one parameter with moments of ``dtype`` in place of codes, and its other state unchanged.

    All ranks must call this together. Codes have the parameter's rows; scales may be whole or a DTensor.
    """
    if CODED_KEYS[0] not in values:
        return dict(values)
    group, plain = group_of_parameter(parameter), {key: each for key, each in values.items() if key not in CODED_KEYS}
    if group is None and isinstance(parameter, DTensor):
        raise ConfigError(
            f"a DTensor parameter of shape {tuple(parameter.shape)} that fully_shard did not make: which blocks of 256 "
            "elements its 8-bit moments belong to is unknown. fix: load a dequantized state dict "
            "(AdamW.dequantized_state_dict)"
        )
    held = range(parameter.numel())
    if group is not None:
        index = next(index for index, param in enumerate(group.parameters.values()) if param is parameter)
        held = group.main_weight.layout.held(index)
    for name, signed in _MOMENTS:
        codes = local_of(values[f"{name}_codes"]).reshape(-1)
        scales = _scales_of(values[f"{name}_scales"], held, num_blocks(parameter.numel()), f"{name} to be decoded")
        plain[name] = torch.zeros_like(parameter.detach(), dtype=dtype)
        decoded = dequantize_blocks(
            codes, scales.to(codes.device), signed=signed, first_element=held.start % QUANT_BLOCK
        )
        local_of(plain[name]).view(-1).copy_(decoded)
    return plain


class Int8State(Moments):
    """The two moments as codes and scales, or in FP32 for parameters of less than 4096 elements.

    Args:
        memory, members, is_capturable: as in ``FlatState``.
    Raises:
        ConfigError: the group's plan may cut a block of 256, or a parameter is cut by tensor parallelism.
    """

    def __init__(self, memory: ParamMemory, members: Sequence[int], *, is_capturable: bool) -> None:
        _check(memory)
        super().__init__(memory, members, torch.uint8, is_capturable=is_capturable)
        self._is_coded = tuple(is_coded(param.shape) for param in memory.params)
        # The offset of each small parameter's FP32 moments on this rank; None for parameters with codes.
        self._offsets: list[int | None] = []
        self._num_small = 0
        for (start, stop), coded in zip(memory.pieces, self._is_coded, strict=True):
            self._offsets.append(None if coded else self._num_small)
            self._num_small += 0 if coded else -(-(stop - start) // _PLAIN_ALIGNMENT) * _PLAIN_ALIGNMENT

    @functools.cached_property
    def _moments(self) -> Int8Moments:
        codes = (self.memory.zeros(torch.uint8, name) for name, _ in _MOMENTS)
        small = (self.memory.zeros(torch.float32, f"small {name}", self._num_small) for name, _ in _MOMENTS)
        return Int8Moments(*codes, *(flat for flat, _ in self._scales), *small)

    @functools.cached_property
    def _scales(self) -> list[tuple[torch.Tensor, DBuffer | None]]:
        """The scales of both moments, and their buffer if the group is sharded."""
        if not isinstance(self.memory, GroupMemory):
            return [
                (self.memory.zeros(torch.float32, name, num_blocks(self.memory.numel)), None) for name, _ in _MOMENTS
            ]
        group, main = self.memory.group, self.memory.group.main_weight
        plan, fp32 = _plan_of_scales(main.plan), torch.float32
        names = [f"unit {group.name!r}: {name}_scales" for name, _ in _MOMENTS]
        buffers = [DBuffer.from_plan(plan, main.mesh, main.placements, fp32, main.device, name=name) for name in names]
        return [(buffer.zero_().local_buffer, buffer) for buffer in buffers]

    # ------------------------------------------------------------------ state

    def keys(self, index: int) -> tuple[str, ...]:
        """See ``FlatState``."""
        return ("step", *CODED_KEYS) if self._is_coded[index] else KEYS

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See ``FlatState``."""
        return *(getattr(self._moments, field.name) for field in dataclasses.fields(Int8Moments)), self.steps

    def _make_views(self, index: int) -> tuple[Any, ...]:
        moments, begin = self._moments, self._offsets[index]
        if begin is None:
            codes = (self._view(index, flat) for flat in (moments.exp_avg, moments.exp_avg_sq))
            scales = (flat if buffer is None else buffer.get_dtensor(index) for flat, buffer in self._scales)
            return self.steps[index], *itertools.chain.from_iterable(zip(codes, scales, strict=True))
        place = slice(begin, begin + len(self.memory.held[index]))
        small = (moments.plain_exp_avg[place], moments.plain_exp_avg_sq[place])
        return self.steps[index], *(self.memory.view(index, piece) for piece in small)

    def take_over(self, state: State, index: int) -> None:
        """See ``FlatState``."""
        super().take_over(state, index)
        for key in {*KEYS, *CODED_KEYS}.difference(self.keys(index)):
            self._shown[index].pop(key, None)

    def _found(self, values: Mapping[str, Any], views: Sequence[Any], index: int) -> tuple[Any, ...]:
        """Load codes unchanged; encode moments that were saved without codes."""
        if not self._is_coded[index]:
            return super()._found(values, views, index)
        name, held = self.memory.names[index], self.memory.held[index]
        if CODED_KEYS[0] in values:
            # Counters of records without one begin at zero.
            found = [values.get("step"), *(values[key] for key in CODED_KEYS)]
            for place in (2, 4):
                if found[place] is not views[place]:
                    found[place] = _scales_of(found[place], held, num_blocks(self.memory.params[index].numel()), name)
            return tuple(found)
        step, *moments = state_values(values, name)
        codes = [
            quantize_blocks(self._rows(value, local_of(view), index).reshape(-1).float(), signed=signed)
            for value, view, (_, signed) in zip(moments, (views[1], views[3]), _MOMENTS, strict=True)
        ]
        return (step, *codes[0], *codes[1])

    # ------------------------------------------------------------------ step

    def _segments(self, rows: Sequence[int]) -> CodedSegments:
        memory, segments = self.memory, []
        for (start, stop), row, plain in zip(memory.pieces, rows, self._offsets, strict=True):
            if start != stop and row != ABSENT:
                segments.append(CodedSegment(start, stop, row, plain))
        return CodedSegments(segments, memory.numel)

    def _with_moments(self, gradient: torch.Tensor, weights: MuonWeights) -> Int8AdamWBuffers:
        return Int8AdamWBuffers(gradient, weights.weight, self._moments, weights.model_weight, weights.remainder)


def _scales_of(value: torch.Tensor, held: range, num_wanted: int, name: str) -> torch.Tensor:
    """Return those of a parameter's scales that belong to the elements that this rank holds; every rank calls it."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if whole.numel() != num_wanted:
        raise StateError(
            f"{name}: its state has {whole.numel()} scales, wanted {num_wanted}, one for each {QUANT_BLOCK} elements. "
            "fix: load the state of a parameter of this shape"
        )
    return whole[held.start // QUANT_BLOCK : num_blocks(held.stop) if held else 0]


def _check(memory: ParamMemory) -> None:
    wrong = ""
    if isinstance(memory, GroupMemory):
        plan, policy = memory.group.plan, "MixedPrecisionPolicy(moments='int8', ...)"
        if plan.alignment_numel % QUANT_BLOCK:
            wrong = (
                f"buffers laid out in multiples of {plan.alignment_numel} elements, whose shards may cut blocks of "
                f"{QUANT_BLOCK}. fix: give fully_shard mp_policy={policy} for every unit"
            )
        elif memory.group.fsdp_params.has_tensor_parallel:
            wrong = "a tensor-parallel parameter, whose blocks of 256 would depend on the degree. fix: use moments=None"
    elif isinstance(memory.params[0], DTensor) and is_coded(memory.params[0].shape):
        wrong = "a DTensor that fully_shard did not make. fix: shard it with fully_shard, or step it with moments=None"
    if memory.dtype is torch.float64:
        wrong = "FP64 weights. fix: give FP32 ones, or moments=None"
    if wrong:
        raise ConfigError(f"{memory.names[0]}: AdamW(moments='int8') found {wrong}")
