"""Memory that an optimizer steps in one launch: the buffers of a parameter group, or one plain parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.from_buffer import buffer_dtensor
from dbuffer.storage import FlatStorage
from dbuffer_kernels import MuonWeights, cast_copy
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.local_parts import holders_of, local_of, local_range

__all__ = [
    "ABSENT",
    "FlatGradient",
    "GroupMemory",
    "Owned",
    "ParamMemory",
    "PlainMemory",
    "find_owned",
]

ABSENT = -1
# Past the property of sharded parameters, which is a call of Python for each of them.
_gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class FlatGradient:
    """Gradients as one flat tensor, laid out like the weights.

    Attributes:
        flat: every element of a parameter without gradient, and all padding, is zero.
        present: for each parameter, whether it has a gradient.
    """

    flat: torch.Tensor
    present: tuple[bool, ...]


class GroupMemory:
    """The buffers of one parameter group that an optimizer uses. The group is referenced weakly.

    Attributes:
        params, names: of the parameters, and what messages call them.
        pieces, held: for each, where its elements begin and end in flat memory, and which of all its elements they are.
        numel, dtype, device: of flat memory; main weights of this dtype are stepped, FP32 where they are split.
        axes, compute_device: over whose ranks the elements are spread, and where collectives over them run.
        is_invariant: whether norms are the same bits for any number of ranks.
    """

    def __init__(self, group: ParameterGroup) -> None:
        main = group.main_weight
        self.params = tuple(group.parameters.values())
        self.names = tuple(f"unit {group.name!r}: parameter {name!r}" for name in group.parameters)
        self.pieces = tuple(local_range(main, index) for index in range(len(self.params)))
        self.held = tuple(map(main.layout.held, range(len(self.params))))
        self.numel, self.dtype, self.device = main.local_buffer.numel(), group.spec.dtypes.stepped, main.device
        self.compute_device = group.spec.compute_device
        self.axes = tuple(group.spread_over(main.placements))
        self.is_invariant = group.spec.dtypes.reduction is not None
        self._group = weakref.ref(group)
        self._storages: list[FlatStorage] = []
        self._all_present = (True,) * len(self.params)

    @property
    def owner(self) -> ParameterGroup | None:
        """The parameter group; None if its model was deleted."""
        return self._group()

    @property
    def group(self) -> ParameterGroup:
        """The group.

        Raises:
            StateError: its model is gone.
        """
        found = self._group()
        if found is None:
            raise StateError(f"{self.names[0]}: its model was deleted. fix: build an optimizer of a model in use")
        return found

    def gradient(self, members: Sequence[int]) -> FlatGradient | None:
        """Return the gradients of this optimizer's parameters; None for parameters without one."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = list(map(_gradient_of, self.params))
        group = self._group()
        gradients = None if group is None else group.gradient_buffer
        is_final = gradients is not None and gradients.binding.has_final
        if gradients is not None and is_final and ABSENT not in members and gradients.binding.are_own(grads):
            return FlatGradient(gradients.binding.final.local_buffer, self._all_present)
        # Gradients of other optimizers' parameters must not count in the norm.
        is_foreign = any(m == ABSENT and grad is not None for m, grad in zip(members, grads, strict=True))
        grads = [None if member == ABSENT else grad for grad, member in zip(grads, members, strict=True)]
        if group is None or all(grad is None for grad in grads):
            return None
        present = tuple(grad is not None for grad in grads)
        if gradients is None or not is_final:
            return FlatGradient(self._packed(grads), present)
        final = gradients.binding.final_gradients()
        assert final is not None
        return FlatGradient(self._packed(grads) if is_foreign else final.local_buffer, present)

    def _packed(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Copy gradients that are not in the group's buffer into a separate flat tensor."""
        flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        for grad, name, (start, stop) in zip(grads, self.names, self.pieces, strict=True):
            if grad is None:
                continue
            local = local_of(grad)
            if local.numel() != stop - start:
                raise StateError(
                    f"{name}: .grad has {local.numel()} elements on this rank, the parameter {stop - start}. fix: "
                    "assign a DTensor laid out like the parameter, such as torch.zeros_like(parameter)"
                )
            cast_copy(local, flat[start:stop])
        return flat

    def zeros(self, dtype: torch.dtype | None, what: str, numel: int | None = None) -> torch.Tensor:
        """Return flat zeros, of the weights' dtype and number where none is given."""
        numel, name = self.numel if numel is None else numel, f"unit {self.group.name!r}: {what}"
        self._storages.append(FlatStorage(numel, dtype or self.dtype, self.device, name=name))
        return self._storages[-1].tensor.zero_()

    def view(self, index: int, piece: torch.Tensor) -> Any:
        """Return the slice of flat memory for a parameter's state, in the parameter's shape and layout."""
        main = self.group.main_weight
        rows = piece.view(main.get_local_tensor(index).shape)
        shown = buffer_dtensor(rows, main.layout, index, main.mesh, main.name)
        return self.group.fsdp_params.wrap(index, shown)

    def holders(self, index: int, num_shards: int) -> tuple[tuple[int, range], ...]:
        """Return the shards that hold a parameter, with the range of its elements that each has."""
        plan = self.group.plan
        return holders_of(plan.offsets[index], plan.tensor_numel(index), plan.numel // num_shards)

    def weights(self) -> MuonWeights:
        """Return the flat weights that a step writes, with the compute weights where they are a copy on this rank."""
        group = self.group
        main, model, remainder = group.main_weight, group.model_weight, group.weights.remainder
        weight, copy = main.local_buffer, None
        if model is not main:
            shard = model if model.placements == main.placements else model.slice_view(main.placements)
            copy = shard.local_buffer if shard.local_buffer.data_ptr() != weight.data_ptr() else None
        return MuonWeights(weight, copy, None if remainder is None else remainder.current())

    def settle(self) -> None:
        """Mark the step complete: all its launches were made."""
        if (remainder := self.group.weights.remainder) is not None:
            remainder.accept()


class PlainMemory:
    """A parameter without a sharded group: a plain tensor, or another library's DTensor. See ``GroupMemory``.

    Args:
        name: what messages call it.
    """

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        local: torch.Tensor = local_of(parameter)
        self.params, self.names = (parameter,), (name,)
        self.numel, self.dtype, self.device = local.numel(), parameter.dtype, parameter.device
        self.axes, self.compute_device, self.is_invariant = (), parameter.device, False
        self.pieces, self.held = ((0, self.numel),), (range(self.numel),)
        # Elements in row-major order; a copy where the parameter's memory has another.
        self._flat: torch.Tensor | None = None

    @property
    def owner(self) -> torch.Tensor:
        """See ``GroupMemory``."""
        return self.params[0]

    def gradient(self, members: Sequence[int]) -> FlatGradient | None:
        """See ``GroupMemory``; gradients of DTensors are this rank's parts."""
        parameter, gradient = self.params[0], self.params[0].grad
        if gradient is None:
            return None
        if gradient.layout is not torch.strided or parameter.is_complex():
            raise ConfigError(
                f"AdamW: a parameter of shape {tuple(parameter.shape)}, {parameter.dtype}, has a gradient of layout "
                f"{gradient.layout}; wanted real numbers and dense gradients. fix: use torch.optim.SparseAdam for "
                "sparse gradients, and torch.view_as_real for complex parameters."
            )
        return FlatGradient(local_of(gradient).detach().reshape(-1), (True,))

    def zeros(self, dtype: torch.dtype | None, what: str, numel: int | None = None) -> torch.Tensor:
        """See ``GroupMemory``."""
        return torch.zeros(self.numel if numel is None else numel, dtype=dtype or self.dtype, device=self.device)

    def view(self, index: int, piece: torch.Tensor) -> Any:
        """See ``GroupMemory``."""
        (parameter,) = self.params
        rows = piece.view(local_of(parameter).shape)
        if not isinstance(parameter, DTensor):
            return rows
        mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
        return DTensor.from_local(rows, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)

    def holders(self, index: int, num_shards: int) -> tuple[tuple[int, range], ...]:
        """See ``GroupMemory``."""
        return ((0, range(self.numel)),)

    def weights(self) -> MuonWeights:
        """See ``GroupMemory``."""
        if self._flat is None:
            self._flat = local_of(self.params[0]).detach().reshape(-1)
        return MuonWeights(self._flat)

    def settle(self) -> None:
        """See ``GroupMemory``."""
        flat, self._flat, local = self._flat, None, local_of(self.params[0]).detach()
        if flat is not None and flat.data_ptr() != local.data_ptr():
            local.copy_(flat.view(local.shape))


ParamMemory: TypeAlias = GroupMemory | PlainMemory


@dataclass(frozen=True, slots=True)
class Owned:
    """Memory that holds parameters of an optimizer.

    Attributes:
        members: for each parameter the number of its param group; ``ABSENT`` for one that the optimizer lacks.
    """

    memory: ParamMemory
    members: tuple[int, ...]


def find_owned(param_groups: Sequence[dict[str, Any]]) -> list[Owned]:
    """Return where the parameters of an optimizer lie, sharded groups first."""
    places: dict[int, int] = {}
    owners: dict[int, ParameterGroup] = {}
    plain: list[torch.Tensor] = []
    for number, group in enumerate(param_groups):
        for parameter in group["params"]:
            places[id(parameter)] = number
            owner = group_of_parameter(parameter)
            if owner is None:
                plain.append(parameter)
            else:
                owners[id(owner)] = owner
    memories: list[ParamMemory] = [GroupMemory(owner) for owner in owners.values()]
    memories += [PlainMemory(parameter, f"plain parameter {number}") for number, parameter in enumerate(plain)]
    return [Owned(memory, tuple(places.get(id(param), ABSENT) for param in memory.params)) for memory in memories]
