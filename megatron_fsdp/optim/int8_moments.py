"""Int8GroupMoments: the AdamW state of one parameter group as 8-bit codes and their scales, the same for any sharding.

A block is 256 elements of a whole flattened parameter, and its plan never cuts one (docs/design/low_precision.md), so
codes and scales are those of a single process. The optimizer's ``state`` shows them as DTensors: codes in the shape of
the parameter, scales in one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer, Element, Plan
from dbuffer.dtensor.from_buffer import buffer_dtensor
from dbuffer.storage import FlatStorage
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
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.adamw_state import ABSENT, KEYS, GroupMoments, local_of, state_values
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter

__all__ = [
    "CODED_KEYS",
    "Int8GroupMoments",
    "coded_state",
    "decoded_state",
    "is_coded",
    "plan_of_scales",
    "random_position",
]

State = MutableMapping[Any, Any]
CODED_KEYS = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
MIN_NUMEL = 4096
"""Smaller parameters keep FP32 moments; torchao's and bitsandbytes' number, asked of the whole parameter here."""
_PLAIN_ALIGNMENT = 4


def is_coded(shape: Sequence[int]) -> bool:
    """Whether moments of a parameter of this (whole) shape are kept in 8 bits."""
    return math.prod(shape) >= MIN_NUMEL


def random_position(number: int, element: int) -> int:
    """Return what stochastic rounding counts from: an element of the optimizer's parameter of that number."""
    return (number << 40) + element


def plan_of_scales(plan: Plan) -> Plan:
    """Return where the scales of a plan's tensors lie: shard k holds those of the blocks of shard k of ``plan``."""
    return Plan(
        shapes=tuple((num_blocks(math.prod(shape)),) for shape in plan.shapes),
        granularities=(Element(),) * len(plan.shapes),
        num_shards=plan.num_shards,
        offsets=tuple(offset // QUANT_BLOCK for offset in plan.offsets),
        shard_numel=plan.shard_numel // QUANT_BLOCK,
    )


def decoded_state(parameter: torch.Tensor, values: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the state of one parameter with moments of ``dtype`` in place of codes; other state as it is.

    Every rank calls it. Codes have the parameter's rows; scales may be whole or a DTensor.
    """
    if CODED_KEYS[0] not in values:
        return dict(values)
    held, plain = _held(parameter), {key: value for key, value in values.items() if key not in CODED_KEYS}
    first = held.start // QUANT_BLOCK
    for name, signed in _MOMENTS:
        codes, scales = local_of(values[f"{name}_codes"]).reshape(-1), _whole(values[f"{name}_scales"])
        own = scales[first : num_blocks(held.stop)].to(codes.device)
        moment = torch.zeros_like(parameter.detach(), dtype=dtype)
        found = dequantize_blocks(codes, own, signed=signed, first_element=held.start - first * QUANT_BLOCK)
        local_of(moment).view(-1).copy_(found)
        plain[name] = moment
    return plain


def coded_state(parameter: torch.Tensor, values: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return the coded state of a parameter that is not sharded, of the moments in ``values`` or of zeros."""
    made: dict[str, Any] = {"step": values.get("step", torch.zeros((), device=device))}
    for name, signed in _MOMENTS:
        moment = values.get(name)
        flat = parameter.new_zeros(parameter.numel(), dtype=torch.float32) if moment is None else moment.reshape(-1)
        codes, scales = quantize_blocks(flat.float(), signed=signed)
        made |= {f"{name}_codes": codes.view(parameter.shape), f"{name}_scales": scales}
    return made


def _held(parameter: torch.Tensor) -> range:
    """Return which elements of the flattened parameter this rank has."""
    group = group_of_parameter(parameter)
    if group is None:
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"a DTensor parameter of shape {tuple(parameter.shape)} that fully_shard did not make: which blocks of "
                "256 its 8-bit moments are of cannot be told. Load a dequantized state dict "
                "(AdamW.dequantized_state_dict)"
            )
        return range(parameter.numel())
    index = next(index for index, param in enumerate(group.parameters.values()) if param is parameter)
    return group.main_weight.layout.held(index)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Int8GroupMoments(GroupMoments):
    """Both moments of one parameter group: codes, scales, and FP32 for parameters of less than 4096 elements.

    Args:
        group, members, is_capturable: as in ``GroupMoments``.
        numbers: for each parameter its position in the optimizer, for stochastic rounding.
    Raises:
        ConfigError: the group's plan may cut a block of 256, or a parameter is cut by tensor parallelism.
    """

    def __init__(
        self, group: ParameterGroup, members: Sequence[int], numbers: Sequence[int], *, is_capturable: bool
    ) -> None:
        _check(group)
        super().__init__(group, members, torch.uint8, is_capturable=is_capturable)
        self._numbers = tuple(numbers)
        main = group.main_weight
        plan = plan_of_scales(main.plan)
        self._scales = tuple(
            DBuffer.from_plan(
                plan, main.mesh, main.placements, torch.float32, main.device, name=f"unit {group.name!r}: {name}_scales"
            ).zero_()
            for name, _ in _MOMENTS
        )
        self._is_coded = tuple(map(is_coded, main.plan.shapes))
        # Where each small parameter's FP32 moments begin on this rank; None for one that has codes.
        self._offsets: list[int | None] = []
        numel = 0
        for (start, stop), coded in zip(self._pieces, self._is_coded, strict=True):
            self._offsets.append(None if coded else numel)
            numel += 0 if coded else -(-(stop - start) // _PLAIN_ALIGNMENT) * _PLAIN_ALIGNMENT
        names = (f"unit {group.name!r}: small {name}" for name, _ in _MOMENTS)
        self._small = [FlatStorage(numel, torch.float32, main.device, name=name) for name in names]
        small = [storage.tensor.zero_() for storage in self._small]
        codes = self.exp_avg.local_buffer, self.exp_avg_sq.local_buffer
        self.moments = Int8Moments(*codes, *(scale.local_buffer for scale in self._scales), *small)

    # ------------------------------------------------------------------ state

    def keys(self, index: int) -> tuple[str, ...]:
        """See ``GroupState``."""
        return ("step", *CODED_KEYS) if self._is_coded[index] else KEYS

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See ``GroupState``."""
        small = (storage.tensor for storage in self._small)
        return *super().flat(), *(scale.local_buffer for scale in self._scales), *small

    def _make_views(self, index: int) -> tuple[Any, ...]:
        if self._is_coded[index]:
            pairs = zip((self.exp_avg, self.exp_avg_sq), self._scales, strict=True)
            return self.steps[index], *(buffer.get_dtensor(index) for pair in pairs for buffer in pair)
        main, start = self.exp_avg, self._offsets[index]
        assert start is not None
        like = main.get_local_tensor(index)
        locals_ = (each.tensor[start : start + like.numel()].view(like.shape) for each in self._small)
        return self.steps[index], *(
            buffer_dtensor(local, main.layout, index, main.mesh, main.name) for local in locals_
        )

    def take_over(self, state: State, index: int) -> None:
        """See ``GroupState``."""
        super().take_over(state, index)
        for key in {*KEYS, *CODED_KEYS}.difference(self.keys(index)):
            self._shown[index].pop(key, None)

    def _found(self, values: Mapping[str, Any], views: Sequence[Any], index: int) -> tuple[Any, ...]:
        """Take codes as they are, and encode moments that have none."""
        if not self._is_coded[index]:
            return super()._found(values, views, index)
        if CODED_KEYS[0] in values:
            # Counters of records without one begin at zero.
            found = [values.get("step"), *(values[key] for key in CODED_KEYS)]
            for place in (2, 4):
                if found[place] is not views[place]:
                    found[place] = self._own_scales(found[place], views[place], index)
            return tuple(found)
        step, *moments = state_values(values, self._names[index])
        codes = [
            quantize_blocks(self._rows(value, view._local_tensor, index).reshape(-1).float(), signed=signed)
            for value, view, (_, signed) in zip(moments, (views[1], views[3]), _MOMENTS, strict=True)
        ]
        return (step, *codes[0], *codes[1])

    def _own_scales(self, value: torch.Tensor, view: DTensor, index: int) -> torch.Tensor:
        if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (view.device_mesh, view.placements):
            return value._local_tensor
        held = self._scales[0].layout.held(index)
        whole = _whole(value)
        if whole.numel() != view.numel():
            raise StateError(
                f"{self._names[index]}: its state has {whole.numel()} scales, wanted {view.numel()}, one for each "
                f"{QUANT_BLOCK} elements; load the state of a parameter of this shape"
            )
        return whole[held.start : held.stop]

    # ------------------------------------------------------------------ step

    def _segments(self, rows: Sequence[int]) -> CodedSegments:
        group = self.group
        assert group is not None
        segments = []
        for index, ((start, stop), row, number) in enumerate(zip(self._pieces, rows, self._numbers, strict=True)):
            if start == stop or row == ABSENT:
                continue
            held = group.main_weight.layout.held(index)
            position = random_position(number, held.start)
            segments.append(CodedSegment(start, stop, row, position, self._offsets[index]))
        return CodedSegments(segments, self.exp_avg.local_buffer.numel())

    def _with_moments(self, gradient: torch.Tensor, weights: MuonWeights) -> Int8AdamWBuffers:
        return Int8AdamWBuffers(gradient, weights.weight, self.moments, weights.model_weight, weights.remainder)


def _check(group: ParameterGroup) -> None:
    plan, name = group.plan, next(iter(group.parameters))
    if plan.alignment_numel % QUANT_BLOCK:
        raise ConfigError(
            f"unit {group.name!r}, parameter {name!r}: AdamW(moments='int8') found buffers laid out in multiples of "
            f"{plan.alignment_numel} elements, whose shards may cut blocks of {QUANT_BLOCK}. Give fully_shard "
            "mp_policy=MixedPrecisionPolicy(moments='int8', ...) for every unit"
        )
    if group.fsdp_params.has_splits:
        raise ConfigError(
            f"unit {group.name!r}, parameter {name!r}: AdamW(moments='int8') found a tensor-parallel parameter, whose "
            "blocks of 256 would depend on the degree; use moments=None or moments_dtype=torch.bfloat16"
        )
    if group.spec.dtypes.stepped is torch.float64:
        raise ConfigError(f"unit {group.name!r}: AdamW(moments='int8') of FP64 weights; give FP32 main weights")
