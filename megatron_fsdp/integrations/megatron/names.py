"""The names that this rank's weights have in the whole model, and their parts of whole tensors; imports no Megatron.

A pipeline stage counts its layers from 0, an expert-parallel rank its experts, and a tensor-parallel rank has a part of
a weight under the name of all: in a checkpoint those would be one name with different contents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron_fsdp.checkpoint.parts import CutPart, Part
from megatron_fsdp.errors import CheckpointError, ConfigError
from megatron_fsdp.integrations.megatron.groups import ModelGroups, is_cut, is_expert, rank_in, size_of

__all__ = ["GATED", "WholeNames"]

# Names of weights that combine a gate and an up-projection.
GATED = re.compile(r"\.mlp\.((experts|shared_experts|experts\.local_experts\.\d+)\.)?linear_fc1\.(weight|bias)\d*$")
_LAYER = re.compile(r"(^|\.)layers\.\d+$")
# Experts as modules of their own, or as weights of a grouped layer.
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc\d\.(?:weight|bias)(\d+)$)")
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


class WholeNames:
    """Translates the state dict of one chunk.

    Args:
        chunk: the sharded model, or the chunk of a pipeline stage.
        groups: the process groups over which the model is divided.
        is_gated: whether ``linear_fc1`` combines a gate and an up-projection.
    """

    def __init__(self, chunk: nn.Module, groups: ModelGroups, *, is_gated: bool) -> None:
        self._groups = groups
        self._is_gated = is_gated
        self._parameters = dict(chunk.named_parameters(remove_duplicate=False))
        self._layers = {
            # Megatron counts from 1.
            path: int(part.layer_number) - 1
            for path, part in chunk.named_modules()
            if _LAYER.search(path) and isinstance(getattr(part, "layer_number", None), int) and "mtp." not in path
        }
        experts = (match for name in self._parameters if (match := _EXPERT.search(name)))
        self._num_experts = 1 + max((int(match[1] or match[2]) for match in experts), default=-1)
        self._entries = chunk.state_dict().keys() | self._parameters.keys()

    def whole_name(self, name: str) -> str:
        """Return the name of one of the chunk's entries in the whole model."""
        if getattr(self._parameters.get(name), "shared", False) and name.endswith(_OUTPUT):
            return name.removesuffix(_OUTPUT) + _EMBEDDING
        self._check_expert(name)
        for prefix, number in self._layers.items():
            if name.startswith(f"{prefix}."):
                name = re.sub(r"\d+$", str(number), prefix) + name[len(prefix) :]
                break
        first = rank_in(self._groups.expert) * self._num_experts
        if first and (found := _EXPERT.search(name)):
            start, stop = found.span(found.lastindex or 0)
            name = f"{name[:start]}{int(name[start:stop]) + first}{name[stop:]}"
        return name

    def _check_expert(self, name: str) -> None:
        parameter = self._parameters.get(name)
        is_spread = parameter is not None and is_expert(parameter) and size_of(self._groups.expert) > 1
        if is_spread and not _EXPERT.search(name):
            raise ConfigError(
                f"parameter {name!r} holds this rank's experts, but its name has no expert numbers and is the same on "
                "other ranks, so it cannot be saved. fix: build experts as SequentialMLP or TEGroupedMLP "
                "(without --moe-use-legacy-grouped-gemm)"
            )

    def outgoing(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of the chunk under the whole model's names, with cut weights as parts of whole ones."""
        return {self.whole_name(name): self.part(name, value) for name, value in state.items()}

    def incoming(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict under the chunk's own names, from one under the whole model's or the chunk's names."""
        own = {self.whole_name(name): name for name in self._entries}
        theirs, mine = own.keys() & state.keys(), self._entries & state.keys()
        if own.keys() == self._entries or (mine - own.keys() and not theirs - self._entries):
            return {name: self._received(name, value) for name, value in state.items()}
        if not theirs - self._entries:
            raise CheckpointError(
                f"none of the {len(state)} entries shows whether layers and experts are numbered on this rank or in "
                f"the whole model, as {sorted(own.keys() - self._entries)[:1]} would. fix: load a state dict with the "
                "names of sharded_state_dict()"
            )
        return {own[name]: self._received(own[name], value) for name, value in state.items() if name in own} | {
            name: value for name, value in state.items() if name not in own and name not in self._entries
        }

    def part(self, name: str, value: Any) -> Any:
        """Return a value with the parameter's shape as its part of the whole tensor; other values unchanged."""
        parameter = self._parameters.get(name)
        if parameter is None or not is_cut(parameter) or not isinstance(value, torch.Tensor):
            return value
        group = self._groups.expert_tensor if is_expert(parameter) else self._groups.tensor
        if size_of(group) == 1 or value.shape != parameter.shape:
            return value
        dim = int(parameter.partition_dim)  # type: ignore[attr-defined]
        return CutPart(value, dim, rank_in(group), size_of(group), self._stride(name, parameter, dim))

    def _received(self, name: str, value: Any) -> Any:
        if isinstance(value, Part):
            return value.source
        parameter = self._parameters.get(name)
        if parameter is None or not isinstance(value, torch.Tensor) or value.shape == parameter.shape:
            return value
        if self.part(name, parameter) is not parameter:
            raise CheckpointError(
                f"{name!r} is cut over {size_of(self._groups.tensor)} tensor-parallel ranks, found a tensor of shape "
                f"{tuple(value.shape)}. fix: read the checkpoint into sharded_state_dict() with "
                "torch.distributed.checkpoint"
            )
        return value

    def _stride(self, name: str, parameter: nn.Parameter, dim: int) -> int:
        stride = int(getattr(parameter, "partition_stride", 1))
        if self._is_gated and GATED.search(name):
            stride = 2
        if parameter.shape[dim] % stride:
            raise ConfigError(
                f"parameter {name!r} of shape {tuple(parameter.shape)} has partition_stride={stride}, which does not "
                "divide its dimension, so no whole tensor can hold it. fix: set a partition_stride that divides it"
            )
        return stride
