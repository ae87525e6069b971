"""ParameterGroup: the buffers of one unit's parameters of one dtype, and the switch between their two faces.

Between uses a module shows its parameters as DTensors over ``main_weight``; from ``unshard`` to ``reshard`` it shows
plain tensors, views of gathered storage, which the forward and backward compute with. Both sets of objects live as
long as the group: switching is a few dictionary writes, and nothing is built on the hot path.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import BufferPlacement, DBuffer, Flat, FlatDTensor, Plan, SlotPool
from dbuffer.mesh import MeshAxis
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter, mark_owned
from megatron_fsdp.errors import AgreementError, StateError
from megatron_fsdp.policy.offload import hand_back
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.runtime.extension_hooks import ExtensionFaces, ExtensionWeights
from megatron_fsdp.runtime.freshness import num_optimizer_steps, refreshes_itself
from megatron_fsdp.runtime.fused_linear import fuse_linear_layers
from megatron_fsdp.runtime.gradients import GradientBuffer, GradientSpec, ReduceFunction
from megatron_fsdp.runtime.lanes import Ticket, join_lanes, lane
from megatron_fsdp.runtime.memory_slots import BufferPools, SlotChoice
from megatron_fsdp.runtime.packed_weights import PackedWeights
from megatron_fsdp.runtime.parameters import Faces, is_laid_out_like
from megatron_fsdp.runtime.post_forward_shard import PostForwardShard, check_post_forward_size
from megatron_fsdp.runtime.weight_buffers import WeightBuffers

__all__ = ["ParameterGroup", "WeightState", "group_of_parameter", "is_laid_out_like", "refreshes_itself"]

_WEIGHTS = (WeightBuffers, PackedWeights)
_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def group_of_parameter(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group that a sharded parameter belongs to, None for any other tensor."""
    reference = _GROUPS.get(parameter)
    return None if reference is None else reference()


class WeightState(enum.Enum):
    """Where a group's compute weights are: SHARDED -> GATHERING (unshard issued) -> UNSHARDED (usable) -> SHARDED."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class ParameterGroup:
    """Buffers for parameters of one dtype, ``requires_grad`` and strategy, laid out by one plan.

    Attributes:
        name: the unit's name, for messages.
        parameters: the sharded parameters by name within the unit, in plan order.
        plan: where the tensors sit. spec: what else it was built from.
        weights: its weight buffers. gradients: its gradient buffers; None for a frozen group.
        faces: the two sets of parameter objects.
    """

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name = name
        self.plan = plan
        self._owned = tuple(owned)
        self._hook: Callable[[torch.Tensor], None] | None = None
        self._function: ReduceFunction | None = None
        # Before the buffers: their memory goes back to an allocator that knows nothing of lanes.
        weakref.finalize(self, join_lanes).atexit = False
        if spec.fuses_weight_gradients:
            fuse_linear_layers(owned)
        self._build(spec)
        if not spec.is_meta:
            self.weights.fill([parameter.local_tensor for parameter in owned])

    def _build(self, spec: GroupSpec, faces: Sequence[nn.Parameter] = ()) -> None:
        self.spec = spec
        self.weights: WeightBuffers
        self.faces: Faces
        self.weight_state = WeightState.SHARDED
        self._gather_ticket: Ticket | None = None
        self._is_changed = True
        self._is_suspect = False
        self._seen_version = -1
        self._generation = 0
        self._gathered_generation = 0
        if self._owned[0].extension is None:
            self.weights = _WEIGHTS[spec.dtypes.gather is not None](self.plan, spec, self.name)
            self.faces = Faces(self._owned, self.main_weight, self.gathered, self, faces)
        else:
            weights = ExtensionWeights(self._owned[0], self.plan, spec, self.name)
            self.weights, self.faces = weights, ExtensionFaces(self._owned, weights, self)
        self.parameters: dict[str, nn.Parameter] = self.faces.by_name()
        for face in self.faces.sharded:
            _GROUPS[face] = weakref.ref(self)
        if self.weights.remainder is not None:
            self.weights.remainder.watch(self.faces.sharded)
        self.faces.adopt_names(self.name)
        # Whether compute weights are whole on every rank all the time.
        self.rests_whole = self.weights.rests_whole
        if not self.rests_whole:
            self._release()
        self.gradients: GradientBuffer | None = None
        if any(face.requires_grad for face in self.faces.sharded):
            self._make_gradients()
        self.faces.sites.register()

    def _make_gradients(self) -> None:
        spec, dtypes = self.spec, self.spec.dtypes
        rest = (spec.compute_device, spec.is_offloaded, spec.is_pinned, spec.fuses_weight_gradients)
        like = GradientSpec(spec.placements, dtypes.reduce, dtypes.main_grad, spec.divisor, *rest)
        self.gradients = GradientBuffer(self.main_weight, like, self.faces)
        self.gradients.rename(f"unit {self.name!r}")
        self.set_reduction()

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
        return self.gradients is not None and self.gradients.num_trained > 0

    @property
    def is_all_trained(self) -> bool:
        """Whether all of its parameters are trained."""
        return self.gradients is not None and self.gradients.num_trained == len(self.parameters)

    @property
    def is_meta(self) -> bool:
        """Whether nothing is allocated yet: the parameters were on the meta device."""
        return self.spec.is_meta

    def materialize(self) -> None:
        """Allocate the buffers of a group that was built from meta parameters, with zeros; no-op for any other.

        Like ``nn.Module.to_empty`` this makes new parameter objects: build optimizers afterwards.
        """
        if self.is_meta:
            for owned, face in zip(self._owned, self.faces.sharded, strict=True):
                owned.parameter.requires_grad_(face.requires_grad)
            self._build(replace(self.spec, is_meta=False))

    def spread_over(self, placements: Sequence[BufferPlacement]) -> list[MeshAxis]:
        """Return the axes whose ranks hold different elements of a buffer of this group that is placed so.

        These are the ``Flat`` data-parallel axes, and those along which the parameters were sharded before.
        """
        flat = [axis for axis, placement in zip(self.main_weight.axes, placements, strict=True) if placement == Flat()]
        split = self._owned[0].split
        return flat if split is None else flat + split.sharded_axes

    def set_divisor(self, divisor: float) -> None:
        """Divide summed gradients by ``divisor`` from now on."""
        self.spec = replace(self.spec, divisor=divisor)
        if self.gradients is not None:
            self.gradients.divisor = divisor

    def set_reduction(
        self, *, hook: Callable[[torch.Tensor], None] | None = None, function: ReduceFunction | None = None
    ) -> None:
        """Install a hook on reduced gradients, or a replacement of the reduce-scatter; None leaves what is there."""
        self._hook, self._function = hook or self._hook, function or self._function
        if self.gradients is not None:
            self.gradients.reduction.hook, self.gradients.reduction.function = self._hook, self._function

    def use_separate_reduce_group(self, enable: bool) -> None:
        """Reduce on a communicator of its own, or on the one that gathers."""
        for axis in self.main_weight.axes:
            axis.has_separate_reduce_group = enable

    def use_pools(self, pools: BufferPools | None, choice: SlotChoice, weights: SlotChoice | None = None) -> None:
        """Take the memory of gathered weights and packed gradients from slots; None: from the allocator.

        Args:
            choice: of slots for gradients, and for weights unless ``weights`` says otherwise.
        """
        device, axes, placements = self.spec.compute_device, self.main_weight.axes, self.spec.placements

        def pool(use: str, of: SlotChoice, placed: Sequence[BufferPlacement]) -> SlotPool | None:
            return None if pools is None else pools.get(use, of, device, axes, placed)

        if not self.rests_whole:
            self.gathered.storage.use_pool(pool("weights", weights or choice, placements.parameter))
        if self.gradients is not None and not self.gradients.rests_partial:
            self.gradients.packed.storage.use_pool(pool("gradients", choice, placements.gradient))

    def forget_originals(self) -> None:
        """Let go of the parameters that the group was built from: their memory is the whole unit's."""
        if not self.is_meta:
            for owned, face in zip(self._owned, self.faces.sharded, strict=True):
                owned.parameter = face
                if owned.extension is not None:
                    owned.extension = owned.extension.emptied()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Reset the gradients of the sharded parameters."""
        for face in self.faces.sharded:
            gradient = face.grad
            if gradient is not None and not set_to_none:
                gradient.zero_()
            elif gradient is not None:
                face.grad = None

    def follow_requires_grad(self) -> bool:
        """Take notice of parameters that were frozen or unfrozen; tell whether any was.

        Raises:
            StateError: an unfrozen parameter has no main weight of the dtype that the policy wants.
        """
        changed = self.faces.changed_requires_grad()
        for index in changed:
            trained = self.faces.sharded[index].requires_grad
            if trained and self.gradients is None:
                self._check_main_dtype(index)
                self._make_gradients()
            assert self.gradients is not None
            self.faces.set_requires_grad(index, trained)
            self.gradients.set_trained(index, trained)
        return bool(changed)

    def _check_main_dtype(self, index: int) -> None:
        wanted = self._owned[index].trained_main_dtype
        if wanted is not None and wanted is not self.spec.dtypes.main:
            raise StateError(
                f"unit {self.name!r}: parameter {self._owned[index].name!r} was frozen when it was sharded, so it has "
                f"no main weight of {wanted}. Call fully_shard while it is trainable, and freeze it afterwards; or "
                f"leave main_params_dtype None."
            )

    # ------------------------------------------------------------------ unshard, reshard

    def unshard(self) -> None:
        """Gather the weights and show them in the modules. Compute issued afterwards may use them."""
        self.start_gather()
        self.finish_gather()

    def gather_afresh(self) -> None:
        """Issue a gather of the main weights as they are now, unless what is gathered is that and was asked for."""
        if self.weight_state is not WeightState.SHARDED and (self.is_stale() or not self.faces.sites.shows_gathered):
            self.reshard()
        self.suspect_change()
        self.start_gather()

    def start_gather(self, *, check: bool = True) -> None:
        """Issue the gather on its lane; no-op unless SHARDED.

        Args:
            check: look whether main weights changed since the last gather. Backward has no need to: nothing steps
                between.
        """
        if self.weight_state is not WeightState.SHARDED:
            return
        if self.spec.is_meta:
            raise StateError(
                f"unit {self.name!r}: parameters {', '.join(map(repr, self.parameters))} are on the meta device still. "
                "Call materialize(model), or model.to_empty(device=...) and initialise it, or load a checkpoint."
            )
        if check and (self._main_changed() or self._is_suspect):
            self.refresh()
        self._gathered_generation = self._generation
        if not self.rests_whole:
            self.weights.choose_source(self._generation)
            on_host = hand_back if self.spec.is_offloaded else None
            self._gather_ticket = lane("gather", self.spec.device).submit(self.weights.gather, on_host=on_host)
        # Last, so that whatever is raised before (an interrupt, out of memory) leaves nothing that looks gathered.
        self.weight_state = WeightState.GATHERING

    def finish_gather(self) -> None:
        """Make compute wait for the gather and show the gathered weights; no-op unless GATHERING."""
        if self.weight_state is not WeightState.GATHERING:
            return
        if self._gather_ticket is not None:
            try:
                self._gather_ticket.wait()
            except RuntimeError as error:
                AgreementError.raise_for(self.name, "the gather of its weights", error)
            self._gather_ticket = None
        self.weights.gathered_is_used()
        self.weight_state = WeightState.UNSHARDED
        if not self.rests_whole:
            self.faces.brought_back()
        self.faces.sites.show_unsharded()

    def reveal(self) -> None:
        """Show gathered weights that ``conceal`` took away."""
        if self.weight_state is WeightState.UNSHARDED and not self.faces.sites.is_gathered_everywhere():
            self.faces.sites.show_unsharded()

    def conceal(self) -> None:
        """Show the sharded parameters, while gathered weights stay for the backward that follows."""
        self.faces.sites.show_sharded()

    def end_call(self) -> None:
        """Compute has used the weights in a forward call: take back what was lent to it."""
        self.faces.sites.take_back()

    def reshard(self, *, keep_part: bool = False) -> None:
        """Show the sharded parameters and release the gathered weights.

        Args:
            keep_part: of a group with ``reshard_to``, keep a part for the gather of the backward that follows.
        Raises:
            StateError: somebody changed the gathered weights in place.
        """
        if self.weight_state is WeightState.SHARDED:
            return
        self.finish_gather()
        self.faces.sites.show_sharded()
        self.weight_state = WeightState.SHARDED
        # An error that is being handled is what should be seen; the next reshard finds the change as well.
        is_raising = sys.exc_info()[0] is not None
        changed = None if is_raising else self.faces.changed_in_place()
        if changed is not None:
            self._note_change()
        if not self.rests_whole:
            self._release(keep_part=keep_part, is_unchanged=changed is None and not is_raising)
        if changed is not None:
            self.faces.refuse_change(changed)

    def _release(self, *, keep_part: bool = False, is_unchanged: bool = False) -> None:
        self.faces.released(is_unchanged=is_unchanged)
        self.weights.release(keep_generation=self._gathered_generation if keep_part else None)

    def _note_change(self) -> None:
        self._is_suspect = True
        self._generation += 1
        if self.weights.can_restore_gathered:
            self.faces.accept_versions()

    def reshard_to(self, size: int) -> None:
        """Keep, from forward to backward, a part of the weights such that ``size`` neighbours hold them together.

        Args:
            size: of the smaller group; 0 goes back to one shard per rank.
        Raises:
            ConfigError: ``size`` does not divide the axis over which weights are sharded.
        """
        axis = self.check_reshard(size)
        self.weights.post_forward = None
        if axis is not None and size < axis.size:
            self.weights.post_forward = PostForwardShard(self.gathered, axis, size)

    def check_reshard(self, size: int) -> MeshAxis | None:
        """Return the axis that ``reshard_to`` would cut into groups of ``size``; None for none. It raises as that."""
        if not size or self.rests_whole:
            return None
        return check_post_forward_size(size, self.model_weight.axes, self.model_weight.placements)

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
        return self.main_weight.local_buffer._version + num_optimizer_steps() + self.faces.version()

    @property
    def refreshes_locally(self) -> bool:
        """Whether a refresh is a cast of this rank's shard, without communication."""
        return self.weights.refreshes_locally

    def catch_up(self) -> None:
        """Take notice of an optimizer step or a load: gather what rests whole, leave the rest to its next gather."""
        if self.refreshes_locally:
            self._is_changed = True
        else:
            self._main_changed()
            self.refresh()

    def is_stale(self) -> bool:
        """Whether the gathered weights are older than the main weights.

        Raises:
            StateError: somebody changed the gathered weights in place.
        """
        changed = self.faces.changed_in_place() if self.weight_state is WeightState.UNSHARDED else None
        if changed is not None:
            self._note_change()
            self.faces.refuse_change(changed)
        return self._main_changed() or self._gathered_generation != self._generation

    def refresh(self) -> None:
        """Bring ``model_weight`` up to date with ``main_weight``: one cast, and a gather where weights rest whole."""
        self._is_changed = False
        self._is_suspect = False
        self._generation += 1
        if self.weights.refresh():
            # Where both share memory the gather has written the main weights' bytes too, which is no change of theirs.
            self._seen_version = self._version()

    # ------------------------------------------------------------------ faces

    def convert(self, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> None:
        """Hold and use the parameters, which stay the same objects, in the dtypes that belong to another own one."""
        for owned in self._owned:
            owned.trained_main_dtype = policy.dtypes_for(dtype, requires_grad=True).stepped
        dtypes = policy.dtypes_for(dtype, requires_grad=any(face.requires_grad for face in self.faces.sharded))
        weights, values = self.weights, self.main_weight.local_buffer
        self._build(replace(self.spec, dtypes=dtypes), self.faces.sharded)
        self.main_weight.local_buffer.copy_(values)
        self.weights.gather_function = weights.gather_function
        if weights.post_forward is not None:
            self.reshard_to(weights.post_forward.axis.size)

    def overwrite(self, values: torch.Tensor) -> None:
        """Take over other main weights of this rank, laid out as they are."""
        self.main_weight.local_buffer.copy_(values)
        self._is_changed = True

    def hide(self) -> None:
        """Take the parameters out of their modules until ``show``."""
        self.faces.sites.hide()

    def show(self) -> None:
        """Register the sharded parameters again."""
        self.faces.sites.unhide()

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        self.name = name
        self.weights.rename(name)
        if self.gradients is not None:
            self.gradients.rename(f"unit {name!r}")

    def readopt(self) -> None:
        """Copy values back where somebody replaced a parameter (``module.to``, ``assign=True``).

        Raises:
            StateError: the replacement has another shape, dtype or device.
        """
        if self.faces.readopt(self.name):
            self._is_changed = True

    @property
    def is_untouched(self) -> bool:
        """Whether its weights were never used: nothing was gathered, nothing was trained."""
        return self._generation == 0 and self.weight_state is WeightState.SHARDED

    def adopt(self, index: int, value: FlatDTensor) -> None:
        """Make a sharded tensor parameter ``index``: its values, and the object itself, over this group's memory."""
        self.faces.adopt(index, value)
        face = self.faces.sharded[index]
        self.parameters = self.faces.by_name()
        self._owned[index].parameter = face
        _GROUPS[face] = weakref.ref(self)
        mark_owned(face, self.name, self._owned[index].name)
        if self.gradients is not None:
            self.gradients.replace(index, face)
        self._is_changed = True

    def laid_out(self, face: torch.Tensor, value: torch.Tensor) -> DTensor:
        """Return ``value``, whole or a DTensor, laid out like one of the parameters; see ``Faces.laid_out``."""
        return self.faces.laid_out(face, value)

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters, {self.weight_state.value})"
