"""``checksum``: 64 bits of weights and moments that do not depend on sharding (docs/design/checksums.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import dbuffer_kernels
from dbuffer import DBuffer
from dbuffer.collectives.all_reduce import reduce_numbers
from dbuffer.mesh import MeshAxis
from dbuffer_kernels import QUANT_BLOCK
from megatron_fsdp.checkpoint.model_state import canonical, unwrapped
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.local_parts import local_of

__all__ = ["checksum", "parameter_checksums", "unit_checksums"]

_MODULUS = 1 << 64
_SCALES = "_scales"


def checksum(model: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Return a 64-bit checksum of a model's weights and an optimizer's moments; the same for all strategies and ranks.

    Every rank must call this, between steps. It reads main weights, so a model in FP32 has one checksum, sharded or
    not, and computing in bf16 does not change it. Moments in 8 bits are read as codes and scales. Step counters,
    buffers and gradients are not included. A tied parameter counts once. Replicas are not compared: each rank sums its
    own replica. For each set of axes that shard elements it runs one all-reduce of 8 bytes per parameter.

    Raises:
        ConfigError: a parameter is divided by tensor or expert parallelism, is a DTensor that ``fully_shard`` did not
            make, or has optimizer state in another layout than its own.
        StateError: a parameter of a unit was replaced by another object.

    Example:
        print(f"{checksum(model, optimizer):016x}")
    """
    return sum(parameter_checksums(model, optimizer).values()) % _MODULUS


def parameter_checksums(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
    """Return the checksum of each parameter by name; ``checksum`` is their sum. Raises the same errors."""
    names: list[str] = []
    sums: list[tuple[list[MeshAxis], torch.Tensor]] = []
    values: dict[int, DBuffer] = {}
    for name, parameter in _parameters(model):
        group = group_of_parameter(parameter)
        found = [
            dbuffer_kernels.checksum(piece.values, key=_key(f"{name}\0{piece.kind}"), first_element=piece.first)
            for piece in _pieces(name, parameter, group, optimizer, values)
        ]
        device = found[0].device if group is None else group.spec.device
        axes = [] if group is None else group.spread_over(group.main_weight.placements)
        names.append(name)
        sums.append((axes, torch.stack([each.to(device) for each in found]).sum()))
    return {name: int(total) % _MODULUS for name, total in zip(names, reduce_numbers(sums, "sum"), strict=True)}


def unit_checksums(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
    """Return the checksum of each unit by its module's name ("" is the root); ``checksum`` is their sum.

    Raises:
        ConfigError, StateError: as ``checksum``.

    Example:
        for name, number in unit_checksums(model, optimizer).items():
            print(f"{name}: {number:016x}")
    """
    units = {canonical(name) for name, each in unwrapped(model).named_modules() if "_fsdp_unit" in each.__dict__}
    sums: dict[str, int] = {}
    for name, number in parameter_checksums(model, optimizer).items():
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
        unit = next((prefix for prefix in prefixes if prefix in units), "")
        sums[unit] = (sums.get(unit, 0) + number) % _MODULUS
    return sums


class _Piece(NamedTuple):
    """This rank's part of a parameter ("weight") or of one state key, and its first element's index in the whole."""

    kind: str
    values: torch.Tensor
    first: int


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with its first name; units are resharded first."""
    for unit in units_below(model):
        unit.check_replaced_params()
        # After resharding, modules hold the sharded parameters that the optimizer knows.
        unit.reshard()
    for name, parameter in unwrapped(model).named_parameters():
        yield canonical(name), parameter


def _pieces(
    name: str,
    parameter: nn.Parameter,
    group: ParameterGroup | None,
    optimizer: Optimizer | None,
    values: dict[int, DBuffer],
) -> Iterator[_Piece]:
    """Yield this rank's part of the weight and of its optimizer state.

    ``values`` caches main weights by the group's ``id``, because split main weights are copied.
    """
    if group is None:
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"checksum: parameter {name!r} is a DTensor that fully_shard did not make. fix: shard it with "
                "fully_shard, or take the checksum of full_state_dict(model)"
            )
        first = 0
        yield _Piece("weight", parameter.detach().contiguous(), first)
    else:
        if group.owned[0].tensor_parallel is not None:
            raise ConfigError(
                f"checksum: parameter {name!r} of unit {group.name!r} is cut by tensor or expert parallelism; wanted "
                "parameters that only data-parallel axes shard. fix: compare full_state_dict(model) instead"
            )
        index = next(index for index, param in enumerate(group.parameters.values()) if param is parameter)
        if id(group) not in values:
            values[id(group)] = group.weights.values()
        buffer = values[id(group)]
        first = buffer.layout.held(index).start
        yield _Piece("weight", buffer.layout.piece(index, buffer.local_buffer), first)
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    for key in sorted(key for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()):
        yield _state_piece(name, key, state[key], parameter, first)


def _state_piece(name: str, key: str, value: torch.Tensor, parameter: torch.Tensor, first: int) -> _Piece:
    local, own = local_of(value.detach()), local_of(parameter.detach())
    if key.endswith(_SCALES):
        # Shards never cut a block, so the shard's first scale belongs to its first element's block.
        return _Piece(key, local.contiguous(), first // QUANT_BLOCK)
    if value.shape != parameter.shape or local.numel() != own.numel():
        raise ConfigError(
            f"checksum: state {key!r} of parameter {name!r} has shape {tuple(value.shape)}, {local.numel()} elements "
            f"here; wanted the parameter's {tuple(parameter.shape)} and {own.numel()}. fix: leave the optimizer out"
        )
    return _Piece(key, local.contiguous(), first)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
