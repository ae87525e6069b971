"""ParameterGroup: the buffers of one unit's parameters of one dtype, and the switch between their two faces.

Between uses a module shows its parameters as DTensors over ``main_weight``; from ``unshard`` to ``reshard`` it shows
plain tensors, views of gathered storage, which the forward and backward compute with. Both sets of objects live as
long as the group: switching is a few dictionary writes, and nothing is built on the hot path.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer import BufferPlacement, DBuffer, Flat, FlatDTensor, Plan
from dbuffer.collectives import gather_together
from dbuffer.events import listeners, tell
from dbuffer.mesh import MeshAxis
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter, mark_owned
from megatron_fsdp.errors import AgreementError, ConfigError, StateError
from megatron_fsdp.policy.offload import hand_back
from megatron_fsdp.runtime.extension_hooks import ExtensionFaces, ExtensionWeights
from megatron_fsdp.runtime.freshness import Freshness, refreshes_itself
from megatron_fsdp.runtime.fused_linear import fuse_linear_layers
from megatron_fsdp.runtime.gradients import GradientBuffer
from megatron_fsdp.runtime.lanes import Ticket, join_lanes, lane
from megatron_fsdp.runtime.packed_weights import PackedWeights
from megatron_fsdp.runtime.parameters import Faces, is_laid_out_like
from megatron_fsdp.runtime.reduction import GradientSpec, ReduceFunction
from megatron_fsdp.runtime.weight_buffers import WeightBuffers

__all__ = [
    "ParameterGroup",
    "WeightState",
    "catch_up_together",
    "group_of_parameter",
    "is_laid_out_like",
    "refresh_together",
    "refreshes_itself",
    "start_gathers",
]

_WEIGHTS = (WeightBuffers, PackedWeights)
_GROUPS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def group_of_parameter(parameter: torch.Tensor) -> ParameterGroup | None:
    """Return the group that a sharded parameter belongs to, None for any other tensor."""
    reference = _GROUPS.get(parameter)
    return None if reference is None else reference()


def start_gathers(groups: Iterable[ParameterGroup], *, check: bool, owner: int = 0) -> None:
    """Issue the gathers of those groups of one unit that are SHARDED, together, on their lane.

    Args:
        check: look whether main weights changed since the last gather. Backward has no need to: nothing steps between.
        owner: as in ``Lane.submit``.
    """
    sharded = [group for group in groups if group.weight_state is WeightState.SHARDED]
    for group in sharded:
        if group.spec.is_meta:
            group.refuse_meta()
    stale = [group for group in sharded if group.freshness.wants_refresh()] if check else None
    if stale:
        refresh_together(stale)
    weights = [group.weights for group in sharded if group.choose_source()]
    ticket = None
    if weights:

        def gather(works: list[dist.Work] | None) -> None:
            gather_together([part for each in weights for part in each.gather(works)], works)

        on_host = hand_back if any(group.spec.is_offloaded for group in sharded) else None
        ticket = lane("gather", sharded[0].spec.device).submit(gather, on_host=on_host, owner=owner)
    # Last, so that whatever is raised before (an interrupt, out of memory) leaves nothing that looks gathered.
    for group in sharded:
        group.gather_ticket = None if group.rests_whole else ticket
        group._become(WeightState.GATHERING)


def refresh_together(groups: Sequence[ParameterGroup]) -> None:
    """Bring ``model_weight`` of groups of one unit up to date: casts, and one gather where weights rest whole."""
    for group in groups:
        group.freshness.refreshing()
        if listeners:
            tell("refresh", group)
    parts = [part for group in groups for part in group.weights.start_refresh()]
    if parts:
        gather_together(parts)
    for group in groups:
        if group.weights.end_refresh():
            # Where both share memory the gather has written the main weights' bytes too.
            group.freshness.look_again()
        if listeners:
            tell("refreshed", group)


def catch_up_together(groups: Iterable[ParameterGroup]) -> None:
    """Take notice of an optimizer step or a load: gather what rests whole, leave the rest to its next gather."""
    by_unit: dict[int, list[ParameterGroup]] = {}
    for group in groups:
        if group.refreshes_locally:
            group.freshness.change()
        else:
            group.freshness.is_changed()
            by_unit.setdefault(group.unit, []).append(group)
    for found in by_unit.values():
        refresh_together(found)


class WeightState(enum.Enum):
    """Where a group's compute weights are: at rest alone; on their way, as a gather was issued; usable."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_CHANGES = (
    (WeightState.SHARDED, WeightState.GATHERING),
    (WeightState.GATHERING, WeightState.UNSHARDED),
    (WeightState.UNSHARDED, WeightState.SHARDED),
)


class ParameterGroup:
    """Buffers for parameters of one dtype, ``requires_grad`` and strategy, laid out by one plan.

    Attributes:
        name: the unit's name, for messages. unit: its identity.
        owned: what it was built from. parameters: the sharded ones by name within the unit, in plan order.
        plan: where the tensors sit. spec: what else it was built from.
        weights: its weight buffers. gradients: its gradient buffers; None for a frozen group.
        faces: the two sets of parameter objects.
        weight_state: changed by ``_become`` alone. freshness: how old the compute weights are.
        gather_ticket: of the gather under way, None where weights rest whole.
        rests_whole: whether compute weights are whole on every rank all the time.
    """

    def __init__(self, owned: Sequence[OwnedParameter], plan: Plan, spec: GroupSpec, name: str) -> None:
        self.name = name
        self.unit = 0
        self.plan = plan
        self.owned = tuple(owned)
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
        self.gather_ticket: Ticket | None = None
        if self.owned[0].extension is None:
            self.weights = _WEIGHTS[spec.dtypes.gather is not None](self.plan, spec, self.name)
            self.faces = Faces(self.owned, self.main_weight, self.gathered, self, faces)
        else:
            weights = ExtensionWeights(self.owned[0], self.plan, spec, self.name)
            self.weights, self.faces = weights, ExtensionFaces(self.owned, weights, self)
        main, of = self.main_weight, self.faces
        self.freshness = Freshness(lambda: main.local_buffer._version + of.version())
        self.parameters: dict[str, nn.Parameter] = self.faces.by_name()
        for face in self.faces.sharded:
            _GROUPS[face] = weakref.ref(self)
        if self.weights.remainder is not None:
            self.weights.remainder.watch(self.faces.sharded)
        self.faces.adopt_names(self.name)
        self.rests_whole = self.weights.rests_whole
        if not self.rests_whole:
            self._release()
        self.gradients: GradientBuffer | None = None
        if any(face.requires_grad for face in self.faces.sharded):
            self._make_gradients()
        self.faces.sites.register()

    def _make_gradients(self) -> None:
        spec, dtypes = self.spec, self.spec.dtypes
        rest = (
            spec.compute_device, spec.is_offloaded, spec.is_pinned, spec.fuses_weight_gradients, dtypes.accumulate
        )  # fmt: skip
        like = GradientSpec(spec.placements, dtypes.reduce, dtypes.main_grad, spec.divisor, *rest)
        self.gradients = GradientBuffer(self.main_weight, like, self.faces)
        self.gradients.rename(self.name)
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
            for owned, face in zip(self.owned, self.faces.sharded, strict=True):
                owned.parameter.requires_grad_(face.requires_grad)
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
            self.gradients.divisor = divisor

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
            for owned, face in zip(self.owned, self.faces.sharded, strict=True):
                owned.parameter = face
                if owned.extension is not None:
                    owned.extension = owned.extension.emptied()

    def follow_requires_grad(self) -> bool:
        """Take notice of parameters that were frozen or unfrozen; tell whether any was.

        Raises:
            StateError: an unfrozen parameter has no main weight of the dtype that the policy wants.
        """
        is_renewed = self._leave_gradients()
        changed = self.faces.changed_requires_grad()
        for index in changed:
            trained = self.faces.sharded[index].requires_grad
            if trained and self.gradients is None:
                self._check_main_dtype(index)
                self._make_gradients()
            assert self.gradients is not None
            self.faces.set_requires_grad(index, trained)
            self.gradients.binding.trained[index] = trained
        return bool(changed) or is_renewed

    def _leave_gradients(self) -> bool:
        """Let whoever took gradients before ``zero_grad`` have their memory; return whether somebody did."""
        if self.gradients is None or not self.gradients.binding.is_taken:
            return False
        self.gradients.binding.dropped()
        if self.gradients.binding.is_taken:
            self._make_gradients()
            return True
        return False

    def _check_main_dtype(self, index: int) -> None:
        wanted = self.owned[index].trained_main_dtype
        if wanted is not None and wanted is not self.spec.dtypes.main:
            raise StateError(
                f"unit {self.name!r}: parameter {self.owned[index].name!r} was frozen when it was sharded, so it has "
                f"no main weight of {wanted}. Call fully_shard while it is trainable, and freeze it afterwards; or "
                f"leave main_params_dtype None."
            )

    # ------------------------------------------------------------------ unshard, reshard

    def refuse_meta(self) -> NoReturn:
        """Refuse to gather weights that are not there.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"unit {self.name!r}: parameters {', '.join(map(repr, self.parameters))} are on the meta device still. "
            "Call materialize(model), or model.to_empty(device=...) and initialise it, or load a checkpoint."
        )

    def choose_source(self) -> bool:
        """Choose what the gather that comes next starts from; return whether there is anything to gather."""
        self.freshness.gathered = self.freshness.generation
        if not self.rests_whole:
            self.weights.choose_source(self.freshness.generation)
        return not self.rests_whole

    def finish_gather(self) -> None:
        """Make compute wait for the gather and show the gathered weights; no-op unless GATHERING."""
        if self.weight_state is not WeightState.GATHERING:
            return
        if self.gather_ticket is not None:
            try:
                self.gather_ticket.wait()
            except RuntimeError as error:
                AgreementError.raise_for(self.name, "the gather of its weights", error)
            self.gather_ticket = None
        self.weights.gathered_is_used()
        self._become(WeightState.UNSHARDED)
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
        self._become(WeightState.SHARDED)
        # An error that is being handled is what should be seen; the next reshard finds the change as well.
        is_raising = sys.exc_info()[0] is not None
        changed = None if is_raising else self.faces.changed_in_place()
        if changed is not None:
            self._lose()
        if not self.rests_whole:
            self._release(keep_part=keep_part, is_unchanged=changed is None and not is_raising)
        if changed is not None:
            self.faces.refuse_change(changed)

    def _release(self, *, keep_part: bool = False, is_unchanged: bool = False) -> None:
        self.faces.released(is_unchanged=is_unchanged)
        self.weights.release(keep_generation=self.freshness.gathered if keep_part else None)

    def _become(self, state: WeightState) -> None:
        if (self.weight_state, state) not in _CHANGES:
            raise StateError(
                f"unit {self.name!r}: weights are {self.weight_state.value} and cannot become {state.value}. This is "
                "an error of the engine or of code that calls its methods; please report it."
            )
        self.weight_state = state

    def _lose(self) -> None:
        """Gathered weights were changed in place: write them again before anybody uses them."""
        self.freshness.lose()
        if self.weights.can_restore_gathered:
            self.faces.accept_versions()

    # ------------------------------------------------------------------ main weight to model weight

    @property
    def refreshes_locally(self) -> bool:
        """Whether a refresh is a cast of this rank's shard, without communication."""
        return self.weights.refreshes_locally

    def catch_up(self) -> None:
        """Take notice of an optimizer step or a load; see ``catch_up_together``."""
        catch_up_together([self])

    def is_stale(self) -> bool:
        """Whether the gathered weights are older than the main weights.

        Raises:
            StateError: somebody changed the gathered weights in place.
        """
        changed = self.faces.changed_in_place() if self.weight_state is WeightState.UNSHARDED else None
        if changed is not None:
            self._lose()
            self.faces.refuse_change(changed)
        return self.freshness.is_stale()

    def is_outdated(self) -> bool:
        """Whether what is gathered is not what was asked for by ``model.unshard()``; raises as ``is_stale``."""
        return self.weight_state is not WeightState.SHARDED and (self.is_stale() or not self.faces.sites.shows_gathered)

    def refresh(self) -> None:
        """Bring ``model_weight`` up to date with ``main_weight``: one cast, and a gather where weights rest whole."""
        refresh_together([self])

    # ------------------------------------------------------------------ faces

    def rebuild(self, spec: GroupSpec) -> None:
        """Make other buffers, with undefined content, under the parameters, which stay the same objects."""
        self._build(spec, self.faces.sharded)

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        self.name = name
        self.weights.rename(name)
        if self.gradients is not None:
            self.gradients.rename(name)

    @property
    def is_untouched(self) -> bool:
        """Whether its weights were never used: nothing was gathered, nothing was trained."""
        return self.freshness.generation == 0 and self.weight_state is WeightState.SHARDED

    def adopt(self, index: int, value: FlatDTensor) -> None:
        """Make a sharded tensor parameter ``index``: its values, and the object itself, over this group's memory."""
        self.faces.adopt(index, value)
        face = self.faces.sharded[index]
        self.parameters = self.faces.by_name()
        self.owned[index].parameter = face
        _GROUPS[face] = weakref.ref(self)
        mark_owned(face, self.name, self.owned[index].name)
        if self.gradients is not None:
            self.gradients.binding.replace(index, face)
        self.freshness.change()

    def __repr__(self) -> str:
        return f"ParameterGroup({self.name!r}, {len(self.parameters)} parameters, {self.weight_state.value})"
