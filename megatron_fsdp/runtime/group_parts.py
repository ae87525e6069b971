"""GroupParts: what a parameter group is made of, and how it is made again between steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import BufferPlacement, DBuffer, Flat, FlatDTensor, Plan
from dbuffer.mesh import MeshAxis
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter, mark_owned
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.policy.precision import GradDtype, MixedPrecisionPolicy, grad_dtype_of, set_grad_dtype
from megatron_fsdp.runtime.extension_hooks import ExtensionParams, ExtensionWeights
from megatron_fsdp.runtime.freshness import Freshness
from megatron_fsdp.runtime.fsdp_params import FSDPParams
from megatron_fsdp.runtime.fused_linear import fuse_linear_layers
from megatron_fsdp.runtime.gradients import GradientBuffer
from megatron_fsdp.runtime.lanes import join_lanes
from megatron_fsdp.runtime.packed_weights import PackedWeights
from megatron_fsdp.runtime.reduction import GradientSpec, ReduceFunction
from megatron_fsdp.runtime.weight_buffers import WeightBuffers

if TYPE_CHECKING:
    from megatron_fsdp.runtime.parameter_group import ParameterGroup

__all__ = ["GroupParts", "group_of_parameter"]

_WEIGHTS = (WeightBuffers, PackedWeights)
_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def group_of_parameter(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group that a sharded parameter belongs to, None for any other tensor."""
    reference = _GROUPS.get(parameter)
    return None if reference is None else reference()


class GroupParts:
    """The buffers and the parameters of one group, laid out by one plan.

    Attributes:
        name: the unit's name, for messages. unit: its identity.
        owned: what it was built from. parameters: the sharded ones by name within the unit, in plan order.
        plan: where the tensors sit. spec: what else it was built from.
        weights: its weight buffers. gradients: its gradient buffers; None for a frozen group.
        fsdp_params: the two sets of parameter objects.
        rests_whole: whether compute weights are whole on every rank all the time.
        freshness: how old the compute weights are.
        circle: of ``MissingGradients``: the ranks that reduce its gradients together; None before the first time.
    """

    freshness: Freshness

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name = name
        self.unit = 0
        self.plan = plan
        self.owned = tuple(owned)
        self.circle: Any = None
        self._hook: Callable[[torch.Tensor], None] | None = None
        self._function: ReduceFunction | None = None
        # Before the buffers: their memory goes back to an allocator that knows nothing of lanes.
        weakref.finalize(self, join_lanes).atexit = False
        if spec.fuses_weight_gradients:
            fuse_linear_layers(owned)
        self._build(spec)
        if not spec.is_meta:
            self.weights.fill([parameter.local_tensor for parameter in owned])

    def _build(self, spec: GroupSpec, params: Sequence[nn.Parameter] = ()) -> None:
        self.spec = spec
        self.weights: WeightBuffers
        self.fsdp_params: FSDPParams
        if self.owned[0].extension is None:
            self.weights = _WEIGHTS[spec.dtypes.gather is not None](self.plan, spec, self.name)
            self.fsdp_params = FSDPParams(self.owned, self.main_weight, self.gathered, self, params)
        else:
            weights = ExtensionWeights(self.owned[0], self.plan, spec, self.name)
            self.weights, self.fsdp_params = weights, ExtensionParams(self.owned, weights, self)
        self.weights.keeps_gathered = spec.keeps_gathered
        self.parameters: dict[str, nn.Parameter] = self.fsdp_params.by_name()
        for owned, param in zip(self.owned, self.fsdp_params.sharded_params, strict=True):
            _GROUPS[param] = weakref.ref(self)
            set_grad_dtype(param, owned.grad_dtype)
        if self.weights.remainder is not None:
            self.weights.remainder.watch(self.fsdp_params.sharded_params)
        self.fsdp_params.adopt_names(self.name)
        self.rests_whole = self.weights.rests_whole
        if not self.rests_whole:
            # Only now: PyTorch makes views on memory that is there.
            self.fsdp_params.released()
            self.weights.release()
        self.gradients: GradientBuffer | None = None
        if any(param.requires_grad for param in self.fsdp_params.sharded_params):
            self._make_gradients()
        self.fsdp_params.module_infos.register()

    def _make_gradients(self) -> None:
        spec, dtypes = self.spec, self.spec.dtypes
        rest = (
            spec.compute_device, spec.is_offloaded, spec.is_pinned, spec.fuses_weight_gradients, dtypes.accumulate
        )  # fmt: skip
        like = GradientSpec(spec.placements, dtypes.reduce, dtypes.main_grad, spec.divisor, *rest)
        self.gradients = GradientBuffer(self.main_weight, like, self.fsdp_params)
        self.gradients.rename(self.name)
        self.set_reduction()
        if dtypes.reduce.itemsize > dtypes.compute.itemsize:
            # What autograd's functions give in more than the compute dtype is not rounded to it.
            for param in self.fsdp_params.unsharded_params:
                param.grad_dtype = None

    def make_gradients_as(self, policy: MixedPrecisionPolicy, grad_dtype: GradDtype) -> None:
        """Make other gradient buffers, of the dtypes that are asked for; before any gradient came."""
        if self.gradients is not None:
            self.spec = replace(self.spec, dtypes=policy.with_gradients(self.spec.dtypes, grad_dtype))
            self._make_gradients()

    def _check_main_dtype(self, index: int) -> None:
        wanted = self.owned[index].trained_main_dtype
        if wanted is not None and wanted is not self.spec.dtypes.main:
            raise StateError(
                f"unit {self.name!r}: parameter {self.owned[index].name!r} was frozen when it was sharded, so it has "
                f"no main weight of {wanted}. Call fully_shard while it is trainable, and freeze it afterwards; or "
                f"leave main_params_dtype None."
            )

    @property
    def main_weight(self) -> DBuffer:
        """What the optimizer updates, at the optimizer placement."""
        return self.weights.main

    @property
    def model_weight(self) -> DBuffer:
        """The compute-dtype copy at rest; ``main_weight`` itself where dtype and placement agree."""
        return self.weights.model

    @property
    def gathered(self) -> DBuffer:
        """The weights that compute uses, allocated from ``unshard`` to ``reshard``."""
        return self.weights.gathered

    @property
    def main_grad(self) -> DBuffer | None:
        """The gradient accumulator, at the gradient placement; None for a frozen group."""
        return None if self.gradients is None else self.gradients.main_grad

    @property
    def requires_grad(self) -> bool:
        """Whether any of its parameters is trained."""
        return self.gradients is not None and 1 in self.gradients.binding.trained

    @property
    def is_meta(self) -> bool:
        """Whether nothing is allocated yet: the parameters were on the meta device."""
        return self.spec.is_meta

    def materialize(self) -> None:
        """Allocate the buffers of a group that was built from meta parameters, with zeros; no-op for any other.

        Like ``nn.Module.to_empty`` this makes new parameter objects: build optimizers afterwards.
        """
        if self.is_meta:
            for owned, param in zip(self.owned, self.fsdp_params.sharded_params, strict=True):
                owned.parameter.requires_grad_(param.requires_grad)
            self._build(replace(self.spec, is_meta=False))

    def spread_over(self, placements: Sequence[BufferPlacement]) -> list[MeshAxis]:
        """Return the axes whose ranks hold different elements of a buffer of this group that is placed so.

        These are the ``Flat`` data-parallel axes, and those along which the parameters were sharded before.
        """
        flat = [axis for axis, placement in zip(self.main_weight.axes, placements, strict=True) if placement == Flat()]
        split = self.owned[0].split
        return flat if split is None else flat + split.sharded_axes

    def set_divisor(self, divisor: float) -> None:
        """Divide summed gradients by ``divisor`` from now on."""
        self.spec = replace(self.spec, divisor=divisor)
        if self.gradients is not None:
            self.gradients.divide_by(divisor)

    def set_reduction(
        self, *, hook: Callable[[torch.Tensor], None] | None = None, function: ReduceFunction | None = None
    ) -> None:
        """Install a hook on reduced gradients, or a replacement of the reduce-scatter; None leaves what is there.

        Raises:
            ConfigError: a replacement where the policy has the engine add up itself.
        """
        if function is not None and self.spec.dtypes.accumulate is not None:
            raise ConfigError(
                f"unit {self.name!r}: a custom reduce-scatter adds up by itself, but the policy says "
                f"accumulate_dtype={self.spec.dtypes.accumulate}; give one of the two"
            )
        self._hook, self._function = hook or self._hook, function or self._function
        if self.gradients is not None:
            self.gradients.reduction.hook, self.gradients.reduction.function = self._hook, self._function

    def forget_originals(self) -> None:
        """Let go of the parameters that the group was built from: their memory is the whole unit's."""
        if not self.is_meta:
            for owned, param in zip(self.owned, self.fsdp_params.sharded_params, strict=True):
                owned.parameter = param
                if owned.extension is not None:
                    owned.extension = owned.extension.emptied()

    def rebuild(self, spec: GroupSpec) -> None:
        """Make other buffers, with undefined content, under the parameters, which stay the same objects."""
        self._build(spec, self.fsdp_params.sharded_params)

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        self.name = name
        self.weights.rename(name)
        if self.gradients is not None:
            self.gradients.rename(name)

    def adopt(self, index: int, value: FlatDTensor) -> None:
        """Make a sharded tensor parameter ``index``: its values, and the object itself, over this group's memory."""
        self.fsdp_params.adopt(index, value)
        param = self.fsdp_params.sharded_params[index]
        if grad_dtype_of(param) == "own":
            set_grad_dtype(param, self.owned[index].grad_dtype)
        self.parameters = self.fsdp_params.by_name()
        self.owned[index].parameter = param
        _GROUPS[param] = weakref.ref(self)
        mark_owned(param, self.name, self.owned[index].name)
        if self.gradients is not None:
            self.gradients.binding.replace(index, param)
        self.freshness.change()

    def refuse_meta(self) -> NoReturn:
        """Refuse to gather weights that are not there.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"unit {self.name!r}: parameters {', '.join(map(repr, self.parameters))} are on the meta device still. "
            "Call materialize(model), or model.to_empty(device=...) and initialise it, or load a checkpoint."
        )
