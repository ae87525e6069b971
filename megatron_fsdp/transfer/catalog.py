"""WeightCatalog: every weight of a model, in one order on all ranks, and where its values lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.model_state import canonical, unwrapped
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.unit import Unit, units_below
from megatron_fsdp.errors import ConfigError, StateError

__all__ = ["CatalogGroup", "LooseWeight", "ShardedWeight", "WeightCatalog", "check_wire_dtype"]


@dataclass(frozen=True, slots=True)
class ShardedWeight:
    """A parameter in a group's flat buffer.

    Attributes:
        name: its first name in the model. aliases: its other names.
        index: its position in the group's plan. shape: of the whole parameter, tensor-parallel parts put together.
    """

    name: str
    aliases: tuple[str, ...]
    index: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LooseWeight:
    """A parameter that no flat buffer holds (ignored, outside of all units), or a persistent buffer of a module.

    Attributes:
        tensor: the value: plain and whole on every rank, or a DTensor that ``fully_shard`` did not make.
        addition: returns what is added before it is sent, in a dtype, such as a merged adapter.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: torch.Tensor
    is_buffer: bool
    addition: Callable[[torch.dtype], torch.Tensor] | None = None

    def value(self) -> torch.Tensor:
        """Return the whole value to send; every rank of a DTensor must call it."""
        found = self.tensor.full_tensor() if isinstance(self.tensor, DTensor) else self.tensor
        return found if self.addition is None else found.clone().add_(self.addition(found.dtype).to(found.device))


@dataclass(frozen=True, slots=True)
class CatalogGroup:
    """A parameter group and its weights, in the order of the flat buffer."""

    group: ParameterGroup
    weights: tuple[ShardedWeight, ...]


@dataclass(frozen=True, slots=True)
class WeightCatalog:
    """Every weight of a model: parameter groups in the order of their first parameter, then loose weights.

    Attributes:
        groups: groups of one unit follow each other. loose: in the order of the state dict.
        ranks: the ranks that hold parts of the model, ascending.
    """

    groups: tuple[CatalogGroup, ...]
    loose: tuple[LooseWeight, ...]
    ranks: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """The device that weights are gathered on: that of the first group's compute, or of the first loose weight."""
        devices = [each.group.spec.device for each in self.groups] + [each.tensor.device for each in self.loose]
        return devices[0] if devices else torch.device("cpu")

    @classmethod
    def of(cls, model: nn.Module) -> WeightCatalog:
        """Look at a model between steps; its units are resharded, nothing else changes, nothing is sent.

        Raises:
            StateError: parameters are on the meta device, or were replaced by other tensors; or the model is in a
                backward or in an ``unsharded()`` block.
            ConfigError: a parameter without a whole value (packed subclasses, Megatron's own tensor parallelism).
        """
        for module in model.modules():
            if isinstance(refusal := vars(module).get("checkpoint_refusal"), str):
                raise ConfigError(refusal)
        plain = unwrapped(model)
        for unit in units_below(plain):
            unit.check_replaced_params()
            _refuse_use(unit)
            unit.reshard()
        by_parameter: dict[int, tuple[nn.Parameter, list[str]]] = {}
        for name, parameter in plain.named_parameters(remove_duplicate=False):
            by_parameter.setdefault(id(parameter), (parameter, []))[1].append(canonical(name))
        found: dict[int, tuple[ParameterGroup, list[ShardedWeight]]] = {}
        loose: list[LooseWeight] = []
        for parameter, names in by_parameter.values():
            owner = group_of_parameter(parameter)
            if owner is None:
                loose.append(LooseWeight(names[0], tuple(names[1:]), parameter.detach(), False))
            else:
                found.setdefault(id(owner), (owner, []))[1].append(_sharded(owner, parameter, names))
        loose += [LooseWeight(name, (), value, True) for name, value in _persistent_buffers(plain)]
        by_unit: dict[int, list[CatalogGroup]] = {}
        for group, weights in found.values():
            weights.sort(key=lambda weight, plan=group.plan: plan.offsets[weight.index])  # type: ignore[misc]
            by_unit.setdefault(group.unit_id, []).append(CatalogGroup(group, tuple(weights)))
        groups = tuple(each for same in by_unit.values() for each in same)
        return cls(groups, tuple(loose), _ranks_of(each.group for each in groups))


def _refuse_use(unit: Unit) -> None:
    if unit.num_holds:
        raise StateError(
            f"unit {unit.name!r}: its weights are to be sent inside unsharded(), where the module shows weights in the "
            "compute dtype and not the main weights. fix: send them after the block"
        )
    if unit.backward_reads_weights:
        raise StateError(
            f"unit {unit.name!r}: its weights are to be sent in a backward, which needs the gathered weights. fix: "
            "send them after backward() has returned"
        )


def check_wire_dtype(dtype: torch.dtype | None) -> None:
    """Raise ``ConfigError`` for a dtype to send that would cut the fractions off weights."""
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(
            f"dtype={dtype}: weights are sent as floating-point numbers, and a cast to {dtype} would cut off their "
            "fractions. fix: dtype=None sends each in its own dtype; or give a floating-point dtype and quantize at "
            "the receiver"
        )


def _sharded(group: ParameterGroup, parameter: torch.Tensor, names: list[str]) -> ShardedWeight:
    index = next(index for index, param in enumerate(group.parameters.values()) if param is parameter)
    if group.spec.is_meta:
        raise StateError(
            f"unit {group.name!r}: parameter {names[0]!r} is on the meta device still, so it has no value to send. "
            "fix: call materialize(model) first; or model.to_empty(device=...), and load a checkpoint"
        )
    owned = group.owned[index]
    if owned.extension is not None and owned.extension.is_packed:
        raise ConfigError(
            f"unit {group.name!r}: parameter {names[0]!r} is a {owned.extension.kind.__name__}, which rests as packed "
            "bytes and has no whole tensor in a floating-point dtype. fix: list it in ignored_params= of fully_shard, "
            "and send it with the functions of its own package"
        )
    return ShardedWeight(names[0], tuple(names[1:]), index, tuple(parameter.shape))


def _persistent_buffers(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield canonical(f"{prefix}.{name}" if prefix else name), value.detach()


def _ranks_of(groups: Iterable[ParameterGroup]) -> tuple[int, ...]:
    """Return the ranks that gather together, the same on each of them: those of the largest mesh of a parameter."""
    meshes = [parameter.device_mesh for group in groups for parameter in group.parameters.values()]  # type: ignore[attr-defined]  # DTensors
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())): mesh for mesh in meshes}
    if not ranks:
        return tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
    largest = max(ranks, key=len)
    if all(set(each) <= set(largest) for each in ranks):
        return largest
    root = ranks[largest]._get_root_mesh()
    return tuple(sorted(root.mesh.flatten().tolist()))
