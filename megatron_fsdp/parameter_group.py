"""ParameterGroup: the buffers of one unit's parameters of one dtype, and the switch between their two faces.

Between uses a module shows its parameters as DTensors over ``main_weight``; from ``unshard`` to ``reshard`` it shows
plain tensors,
views of gathered storage, which the forward and backward compute with. Both sets of objects live as long as the
group: switching is a
few dictionary writes, and nothing is built on the hot path.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import DBuffer, Plan, RaggedShard, Replicate
from dbuffer.placements import BufferPlacement
from dbuffer_kernels import cast_copy
from megatron_fsdp.errors import StateError
from megatron_fsdp.gradients import GradientBuffer, GradientDtypes
from megatron_fsdp.lanes import Ticket, lane
from megatron_fsdp.ownership import OwnedParameter, mark_owned
from megatron_fsdp.precision import GroupDtypes
from megatron_fsdp.sites import Sites
from megatron_fsdp.strategy import Placements

__all__ = ["GroupSpec", "ParameterGroup", "WeightState", "group_of_parameter", "is_laid_out_like", "refreshes_itself"]

# Fused and foreach optimizers change a DTensor's memory without touching any version counter, so every step of any
# torch.optim.Optimizer in the process counts as a change (docs/design/freshness.md).
_optimizer_steps = [0]
_REFRESHING: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _count_step(optimizer: Optimizer, *_: object) -> None:
    if optimizer not in _REFRESHING:
        _optimizer_steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def refreshes_itself(optimizer: Optimizer) -> None:
    """Say that ``optimizer`` calls ``catch_up`` on its groups after each step, so its steps need no other notice."""
    _REFRESHING.add(optimizer)


def group_of_parameter(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group that a sharded parameter belongs to, None for any other tensor."""
    reference = _GROUPS.get(parameter)
    return None if reference is None else reference()


class WeightState(enum.Enum):
    """Where a group's compute weights are: SHARDED -> GATHERING (unshard issued) -> UNSHARDED (usable) -> SHARDED."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Everything a group is built from besides its parameters.

    Attributes:
        mesh: of the data-parallel axes alone. placements: the strategy on these axes.
        device: where the buffers live. dtypes: of the four copies.
        divisor: gradients are divided by this (the number of data-parallel ranks unless told otherwise).
    """

    mesh: DeviceMesh
    placements: Placements
    device: torch.device
    dtypes: GroupDtypes
    divisor: float


class ParameterGroup:
    """Buffers for parameters of one dtype, ``requires_grad`` and strategy, laid out by one plan.

    Attributes:
        name: the unit's name, for messages.
        parameters: the sharded parameters by name within the unit, in plan order.
        plan: where the tensors sit.
        main_weight: what the optimizer updates. model_weight: the compute-dtype copy at rest; the same buffer where
            dtype and
            placement agree. main_grad: the gradient accumulator; None for a frozen group.
        gathered: the weights that compute uses, allocated from ``unshard`` to ``reshard``.
    """

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name = name
        self.plan = plan
        self.spec = spec
        self.weight_state = WeightState.SHARDED
        self.requires_grad = owned[0].parameter.requires_grad
        self._gather_ticket: Ticket | None = None
        self._is_changed = True
        self._is_suspect = False
        self._seen_version = -1
        self._generation = 0
        self._gathered_generation = 0
        self._make_weight_buffers()
        for index, parameter in enumerate(owned):
            self.main_weight.write_tensor(index, parameter.parameter)
        sharded = [self._sharded_parameter(index, parameter) for index, parameter in enumerate(owned)]
        self._sharded = sharded
        self.parameters: dict[str, nn.Parameter] = {
            parameter.name: face for parameter, face in zip(owned, sharded, strict=True)
        }
        self._unsharded = [self._unsharded_parameter(index, parameter) for index, parameter in enumerate(owned)]
        if not self.rests_whole:
            self.gathered.release_storage()
        self._sites = Sites(owned, self._sharded, self._unsharded)
        self.gradients: GradientBuffer | None = None
        if self.requires_grad:
            dtypes = GradientDtypes(spec.dtypes.reduce, spec.dtypes.main_grad)
            self.gradients = GradientBuffer(self.main_weight, spec.placements, dtypes, spec.divisor, self.parameters)
            self.gradients.rename(f"unit {name!r}")
        self._sites.show_sharded()

    def _make_weight_buffers(self) -> None:
        placements, dtypes = self.spec.placements, self.spec.dtypes
        resting, stepped = placements.parameter, placements.optimizer
        whole: tuple[BufferPlacement, ...] = tuple(Replicate() for _ in resting)
        self.rests_whole = resting == whole
        self.model_weight = self._buffer(resting, dtypes.compute, "model_weight")
        if dtypes.main is not dtypes.compute:
            self.main_weight = self._buffer(stepped, dtypes.main, "main_weight")
        elif resting == stepped:
            self.main_weight = self.model_weight
        else:
            # Same dtype, finer placement: the optimizer's shard is a slice of the compute weights, not a second copy.
            self.main_weight = self.model_weight.slice_view(stepped)
        self.gathered = self.model_weight
        if not self.rests_whole:
            # PyTorch makes views only on memory that is there; __init__ releases it when the views exist.
            self.gathered = self._buffer(whole, dtypes.compute, "gathered weights")
        self.main_weight.zero_()

    def _buffer(self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, what: str) -> DBuffer:
        name = f"unit {self.name!r}: {what}"
        return DBuffer.from_plan(self.plan, self.spec.mesh, placements, dtype, self.spec.device, name=name)

    def _sharded_parameter(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        face = nn.Parameter(self.main_weight.get_dtensor(index), requires_grad=self.requires_grad)
        _copy_attributes(owned.parameter, face)
        _GROUPS[face] = weakref.ref(self)
        mark_owned(face, self.name, owned.name)
        return face

    def _unsharded_parameter(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        # .data gives the view a version counter of its own. Gathering again must not look to autograd like a change of
        # the tensors it saved: the values are the same.
        face = nn.Parameter(self.gathered.get_local_tensor(index).data, requires_grad=self.requires_grad)
        _copy_attributes(owned.parameter, face)
        if self.requires_grad:
            face.register_post_accumulate_grad_hook(_gradient_hook(weakref.ref(self), index))
        return face

    @property
    def main_grad(self) -> DBuffer | None:
        """The gradient accumulator, at the gradient placement; None for a frozen group."""
        return None if self.gradients is None else self.gradients.main_grad

    # ------------------------------------------------------------------ unshard, reshard

    def unshard(self) -> None:
        """Gather the weights and show them in the modules. Compute issued afterwards may use them."""
        self.start_gather()
        self.finish_gather()

    def start_gather(self, *, check: bool = True) -> None:
        """Issue the gather on its lane; no-op unless SHARDED.

        Args:
            check: look whether main weights changed since the last gather. Backward has no need to: nothing steps
                between.
        """
        if self.weight_state is not WeightState.SHARDED:
            return
        if check and (self._main_changed() or self._is_suspect):
            self.refresh()
        self.weight_state = WeightState.GATHERING
        self._gathered_generation = self._generation
        if not self.rests_whole:
            self._gather_ticket = lane("gather", self.spec.device).submit(self._gather)

    def _gather(self, works: list[torch.distributed.Work] | None) -> None:
        self.gathered.reallocate_storage()
        self.model_weight.redistribute(self.gathered.placements, out=self.gathered, works=works)

    def finish_gather(self) -> None:
        """Make compute wait for the gather and show the gathered weights; no-op unless GATHERING."""
        if self.weight_state is not WeightState.GATHERING:
            return
        if self._gather_ticket is not None:
            self._gather_ticket.wait()
            self._gather_ticket = None
        self.weight_state = WeightState.UNSHARDED
        self._sites.show_unsharded()

    def reshard(self) -> None:
        """Show the sharded parameters and release the gathered weights."""
        if self.weight_state is WeightState.SHARDED:
            return
        self.finish_gather()
        self._sites.show_sharded()
        self.weight_state = WeightState.SHARDED
        if not self.rests_whole:
            self.gathered.release_storage()

    # ------------------------------------------------------------------ main weight to model weight

    def suspect_change(self) -> None:
        """Say that main weights may have changed in a way that shows nowhere: the next gather refreshes first."""
        self._is_suspect = True

    def _main_changed(self) -> bool:
        version = self._version()
        if version != self._seen_version:
            self._seen_version = version
            self._is_changed = True
        return self._is_changed

    def _version(self) -> int:
        version: int = self.main_weight.local_buffer._version + _optimizer_steps[0]
        for face in self._sharded:
            version += face._version + face._local_tensor._version  # type: ignore[attr-defined]  # a DTensor
        return version

    @property
    def refreshes_locally(self) -> bool:
        """Whether a refresh is a cast of this rank's shard, without communication."""
        return self.main_weight.placements == self.model_weight.placements

    def catch_up(self) -> None:
        """Take notice of an optimizer step or a load: gather what rests whole, leave the rest to its next gather."""
        self._main_changed()
        if self.refreshes_locally:
            self._is_changed = True
        else:
            self.refresh()

    def is_stale(self) -> bool:
        """Whether the gathered weights are older than the main weights."""
        return self._main_changed() or self._gathered_generation != self._generation

    def refresh(self) -> None:
        """Bring ``model_weight`` up to date with ``main_weight``: one cast, and a gather where weights rest whole."""
        self._is_changed = False
        self._is_suspect = False
        self._generation += 1
        main, model = self.main_weight, self.model_weight
        if main is model:
            return
        shard = model if main.placements == model.placements else model.slice_view(main.placements)
        if shard.local_buffer.data_ptr() != main.local_buffer.data_ptr():
            cast_copy(main.local_buffer, shard.local_buffer)
        if shard is not model:
            shard.redistribute(model.placements, out=model)
            # Where both share memory the gather has written the main weights' bytes too, which is no change of theirs.
            self._seen_version = self._version()

    # ------------------------------------------------------------------ faces

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply what ``nn.Module.to`` and its like apply to parameters; buffers keep their dtype and device.

        Raises:
            StateError: the function changes dtype or device.
        """
        current = self.main_weight.local_buffer
        with torch.no_grad():
            result = function(current)
        if result.dtype != current.dtype or result.device != current.device:
            raise StateError(
                f"unit {self.name!r}: parameters {', '.join(map(repr, self.parameters))} rest in a buffer of "
                f"{current.dtype} on {current.device} and cannot become {result.dtype} on {result.device}. Change "
                "dtype or device before fully_shard, or use MixedPrecisionPolicy."
            )
        if result is not current:
            current.copy_(result)
            self._is_changed = True

    def hide(self) -> None:
        """Take the parameters out of their modules until ``show``."""
        self._sites.hide()

    def show(self) -> None:
        """Register the sharded parameters again."""
        self._sites.show_sharded()

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        self.name = name
        self.main_weight.rename(f"unit {name!r}: main_weight")
        self.model_weight.rename(f"unit {name!r}: model_weight")
        self.gathered.rename(f"unit {name!r}: gathered weights")
        if self.gradients is not None:
            self.gradients.rename(f"unit {name!r}")

    def readopt(self) -> None:
        """Copy values back into the buffers where somebody replaced a parameter's tensor (``module.to``,
        ``assign=True``).

        Raises:
            StateError: the replacement has another shape, dtype or device.
        """
        for index, (name, face) in enumerate(self.parameters.items()):
            current = self._sites.registered(index)
            local = current.to_local() if isinstance(current, DTensor) else current.data
            wanted = self.main_weight.get_local_tensor(index)
            if current is face and local.data_ptr() == wanted.data_ptr():
                continue
            self._adopt(index, name, current)
        self._sites.show_sharded()

    def laid_out(self, face: torch.Tensor, value: torch.Tensor) -> DTensor:
        """Return ``value``, a whole tensor or a DTensor of any placement, as a DTensor laid out like one of the
        parameters.

        Every rank of the mesh calls it. One whole tensor exists at a time.
        """
        index = next(position for position, other in enumerate(self._sharded) if other is face)
        template = self._sharded[index]
        assert isinstance(template, DTensor)
        held = self.main_weight.layout.held(index)
        whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach().reshape(-1)
        local = torch.empty_like(template.to_local(), dtype=value.dtype)
        local.view(-1).copy_(whole[held.start : held.stop])
        stride = template.stride()
        return DTensor.from_local(
            local, template.device_mesh, template.placements, run_check=False, shape=template.shape, stride=stride
        )

    def _adopt(self, index: int, name: str, current: torch.Tensor) -> None:
        wanted = self.main_weight
        if (
            current.shape != wanted.plan.shapes[index]
            or current.dtype != wanted.dtype
            or current.device != wanted.device
        ):
            raise StateError(
                f"unit {self.name!r}: parameter {name!r} was replaced by {current.dtype} {tuple(current.shape)} on "
                f"{current.device}; its buffer holds {wanted.dtype} {wanted.plan.shapes[index]} on {wanted.device}. "
                "Change dtype or device before fully_shard, or use MixedPrecisionPolicy."
            )
        with torch.no_grad():
            if not isinstance(current, DTensor):
                wanted.write_tensor(index, current)
            elif current.to_local().shape == wanted.get_local_tensor(index).shape and _is_ragged(current):
                wanted.get_local_tensor(index).copy_(current.to_local())
            else:
                wanted.write_tensor(index, current.full_tensor())
            face = self._sharded[index]
            face.data = wanted.get_dtensor(index)
        self._is_changed = True

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters, {self.weight_state.value})"


def _gradient_hook(group: weakref.ref[ParameterGroup], index: int) -> Callable[[torch.Tensor], None]:
    def receive(parameter: torch.Tensor) -> None:
        owner = group()
        if owner is not None and owner.gradients is not None:
            owner.gradients.receive(index, parameter)

    return receive


def _copy_attributes(source: nn.Parameter, target: nn.Parameter) -> None:
    for name, value in vars(source).items():
        setattr(target, name, value)


def is_laid_out_like(value: torch.Tensor, face: torch.Tensor) -> bool:
    """Whether ``value`` may stand beside a sharded parameter as it is: a DTensor with the very rows of its ranks."""
    if not isinstance(value, DTensor) or not isinstance(face, DTensor):
        return False
    return [repr(placement) for placement in value.placements] == [repr(placement) for placement in face.placements]


def _is_ragged(tensor: DTensor) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in tensor.placements)
