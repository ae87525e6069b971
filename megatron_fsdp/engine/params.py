"""FSDPParams: the two sets of parameter objects of a group, and what users did to them.

At rest a module shows DTensors over ``main_weight``; while its weights are gathered it shows plain tensors, views of
that storage. Both sets live as long as the group, so switching is a few dictionary writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from dbuffer.dtensor.flat_dtensor import FlatDTensor
from dbuffer.dtensor.placed_tensor import NUM_FLAGS_SET
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.engine.passes import flags_of, set_classes, set_versions, version_of, versions_of
from megatron_fsdp.errors import StateError

__all__ = [
    "NO_BUFFER",
    "SMALL_NUMEL",
    "FSDPParams",
    "ParamModuleInfos",
    "Place",
    "WeightHandle",
    "gradient_hook",
    "gradient_hook_on_streams",
    "handle_of",
    "is_laid_out_like",
    "laid_out",
    "own_rows",
]


SMALL_NUMEL = 1 << 14
"""Gradients of so few elements are copied together: one copy costs a launch as that of many does."""

RELEASED_VERSION = 1_000_000_000
"""What autograd's message gives as the version of a weight that was released."""


# A version that no tensor has.
_MARK = 2 * RELEASED_VERSION


class FSDPParams:
    """The sharded and the gathered parameters of one group.

    Autograd compares the version of a saved tensor with the one that it had when it was saved, and refuses before it
    computes. Released weights get a version that no operator has seen, gathered ones the version that they had before,
    so a backward that reaches them unannounced is an error of autograd's instead of a read of other memory. Weights
    that are views of one tensor share its version (docs/design/order.md).

    Args:
        sharded_params: DTensors over ``main_weight``, in plan order. unsharded_params: views of the gathered weights.
        owned: what they were made from. main_weight: what the sharded ones lie in.
        kinds: the classes of an unsharded parameter that says itself whether its memory is there: while it is, and not.

    Attributes:
        has_splits: whether parameters were sharded along another axis before.
        counted: tensors whose versions grow with every in-place change of the sharded ones that PyTorch counts.
        module_infos: where the parameters are registered.
        subclass: the name of the class of a parameter that says itself what is gathered; empty for plain ones.
        begun: whether the backward under way brought gradients, by which hooks of small ones see that nothing is to be
            done. begun_all: the same for hooks of all others, where all wait (``LanePacker``). turn: the number of
            the stream that had the last turn at the packed buffer (``streams.Turns``).
        came: of which parameters autograd has added up all that it brings. waits: which are small.
        required: which of the unsharded ones require a gradient, as compute last used them.
    """

    module_infos: ParamModuleInfos
    subclass = ""

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        main_weight: DBuffer,
        sharded_params: list[nn.Parameter],
        unsharded_params: list[nn.Parameter],
        kinds: tuple[type[nn.Parameter], ...],
    ) -> None:
        self.owned = tuple(owned)
        self.main_weight = main_weight
        self.has_splits = any(parameter.split is not None for parameter in owned)
        self.sharded_params, self.unsharded_params = sharded_params, unsharded_params
        self._kinds = kinds
        self._guarded = [param for param in unsharded_params if isinstance(param, kinds[0])]
        wrappers = [param for param in unsharded_params if isinstance(param, DTensor)]
        # Where all of them say when they are frozen, none has to be asked.
        self._says_flags = len(self._guarded) == len(unsharded_params)
        # Of a DTensor the local part is guarded too.
        self._versioned, self._counters = _counters_of(
            (*unsharded_params, *(param._local_tensor for param in wrappers))
        )
        self._weights = (*unsharded_params, *wrappers)
        self._released = (RELEASED_VERSION,) * len(self._versioned)
        self._versions = self._kept_versions = versions_of(self._versioned)
        self.counted: list[torch.Tensor] = []
        self.begun, self.begun_all = [False], [False]
        self.turn: list[int | None] = [None]
        self.came = bytearray(len(owned))
        self.waits = bytearray(int(param.numel() <= SMALL_NUMEL) for param in unsharded_params)
        self.required = [False] * len(owned)
        self._num_flags_set = -1

    # ------------------------------------------------------------------ memory of the gathered ones

    def released(self, *, is_unchanged: bool = False) -> None:
        """Refuse reads of the gathered weights, by name and by autograd: their memory is gone.

        Args:
            is_unchanged: ``changed_in_place`` has just found no change.
        """
        self._kept_versions = self._versions if is_unchanged else versions_of(self._versioned)
        set_versions(self._versioned, self._released)
        set_classes(self._guarded, self._kinds[1])

    def brought_back(self) -> None:
        """Allow reads of the gathered weights again, and backwards of what saved them since their last change."""
        set_versions(self._versioned, self._kept_versions)
        set_classes(self._guarded, self._kinds[0])

    def changed_in_place(self) -> Sequence[torch.Tensor]:
        """Return gathered weights of which an operator that PyTorch counts has changed one; none where none was."""
        versions = versions_of(self._versioned)
        if versions == self._versions:
            return ()
        before = self._versions
        counters = zip(self._weights, self._counters, strict=True)
        return [weight for weight, counter in counters if versions[counter] != before[counter]]

    def accept_versions(self) -> None:
        """Forget of changes in place: the values will be written again."""
        self._versions = versions_of(self._versioned)

    # ------------------------------------------------------------------ requires_grad

    def changed_requires_grad(self) -> list[int]:
        """Return which parameters were frozen or unfrozen since compute last used them, on either object."""
        if NUM_FLAGS_SET[0] == self._num_flags_set and self._says_flags:
            return []
        required = self.required
        used, resting = flags_of(self.unsharded_params), flags_of(self.sharded_params)
        self._num_flags_set = NUM_FLAGS_SET[0]
        if resting == required == used:
            return []
        changed = []
        for index, flag in enumerate(required):
            wanted = used[index] if used[index] is not flag else resting[index]
            self.sharded_params[index].requires_grad_(wanted)
            self.unsharded_params[index].requires_grad_(flag)
            if wanted is not flag:
                changed.append(index)
        return changed

    def freeze(self) -> list[int]:
        """Freeze, on both objects, the parameters that were frozen on either since compute last used them.

        Returns:
            Which these are.
        """
        changed = self.changed_requires_grad()
        if changed:
            # What was unfrozen counts from the next forward on.
            self._num_flags_set = -1
        frozen = [index for index in changed if self.required[index]]
        for index in frozen:
            self.unsharded_params[index].requires_grad_(False)
            self.required[index] = False
        return frozen

    def wrap(self, index: int, rows: DTensor) -> DTensor:
        """Return another buffer's DTensor of parameter ``index``, placed like the sharded parameter."""
        split = self.owned[index].split
        return rows if split is None else split.resting(rows)


def _counters_of(tensors: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], list[int]]:
    """Return one tensor of each version counter that tensors share, and, for each tensor, which counter it has."""
    found: list[torch.Tensor] = []
    before: list[int] = []
    counters = []
    for tensor in tensors:
        version = version_of(tensor)
        if not _MARK <= version < _MARK + len(found):
            before.append(version)
            version = _MARK + len(found)
            set_versions((tensor,), (version,))
            found.append(tensor)
        counters.append(version - _MARK)
    set_versions(tuple(found), tuple(before))
    return tuple(found), counters


def gradient_hook(
    receiver: weakref.ref[Any], index: int, begun: list[bool], came: bytearray
) -> Callable[[torch.Tensor], None]:
    """Return the hook on a gathered parameter that hands its gradient to the gradient buffer of its group.

    Args:
        receiver: the group. begun: of its parameters; or a list of False, for a gradient that may not wait.
    """

    def receive(parameter: torch.Tensor) -> None:
        came[index] = 1
        if begun[0]:
            return
        owner = receiver()
        gradients = None if owner is None else owner.gradients
        if gradients is not None:
            gradients.receive(index, parameter)

    return receive


def gradient_hook_on_streams(
    receiver: weakref.ref[Any],
    index: int,
    begun: list[bool],
    came: bytearray,
    turn: list[int | None],
    current: Callable[[], int],
) -> Callable[[torch.Tensor], None]:
    """Return ``gradient_hook`` for a device with streams, where a gradient may wait if its stream has the turn.

    Looking here, before anything is called, takes a third of the host's time for a gradient that waits.

    Args:
        turn: see ``FSDPParams``. current: returns the number of the current stream.
    """
    receive_first = gradient_hook(receiver, index, [False], came)

    def receive(parameter: torch.Tensor) -> None:
        if begun[0] and turn[0] == current():
            came[index] = 1
        else:
            receive_first(parameter)

    return receive


Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]
"""A module's dictionary of parameters, a name in it, and what is registered there at rest, and in use."""


class ParamModuleInfos:
    """Where the parameters of a group are registered, and the two sets of objects to register there.

    Args:
        places: all of them. Dictionaries, not modules: they do not refer back to anything that owns this group.
        indices: the parameter of each.
        modules: of places in modules with a ``__setattr__`` of their own, as recurrent ones have, which keep further
            references to their weights: module and name.

    Attributes:
        shows_gathered: whether compute's are registered.
    """

    def __init__(
        self, places: Sequence[Place], indices: Sequence[int], modules: Sequence[tuple[weakref.ref[nn.Module], str]]
    ) -> None:
        self.places, self.indices, self._modules = tuple(places), tuple(indices), tuple(modules)
        # The columns of places.
        self._registries = [registry for registry, *_ in places]
        self._attributes = [attribute for _, attribute, *_ in places]
        self._resting = [resting for *_, resting, _ in places]
        self._used = [used for *_, used in places]
        self.shows_gathered = False

    def is_replaced(self) -> bool:
        """Whether another tensor may be registered somewhere than those that rest."""
        for registry, attribute, resting in zip(self._registries, self._attributes, self._resting, strict=True):
            if attribute not in registry or registry[attribute] is not resting:
                return True
        return False

    def show(self, *, is_gathered: bool) -> None:
        """Register one set of parameters in the places of the other; replaced ones stay."""
        found, wanted = (self._resting, self._used) if is_gathered else (self._used, self._resting)
        for registry, attribute, old, new in zip(self._registries, self._attributes, found, wanted, strict=True):
            if attribute in registry and registry[attribute] is old:
                registry[attribute] = new
        if self._modules:
            self.tell_modules()
        self.shows_gathered = is_gathered

    def register(self) -> None:
        """Register the sharded parameters, whatever was there."""
        for registry, attribute, resting, _ in self.places:
            registry[attribute] = resting
        self.tell_modules()
        self.shows_gathered = False

    def tell_modules(self) -> None:
        """Let modules that keep further references to their weights have those that are registered."""
        for reference, attribute in self._modules:
            module = reference()
            shown = None if module is None else module._parameters.get(attribute)
            if shown is not None:
                setattr(module, attribute, shown)


_NOTHING: weakref.ref[Any] = weakref.ref(set())
NO_BUFFER = _NOTHING
"""``WeightHandle.gradients`` where no buffer takes products."""


class WeightHandle:
    """What a gathered weight belongs to; it keeps nothing alive.

    Attributes:
        group: its ``ParameterGroup``. parameter: its name within the unit.
        gradients: the ``GradientBuffer`` into which backward may multiply its gradient; nothing where it may not.
        index: of the parameter there.
    """

    __slots__ = ("gradients", "group", "index", "parameter")

    def __init__(self, group: weakref.ref[Any] = _NOTHING, parameter: str = "") -> None:
        self.group, self.parameter = group, parameter
        self.gradients = NO_BUFFER
        self.index = 0

    @property
    def words(self) -> str:
        """The unit and the parameter."""
        group = self.group()
        return f"unit {'(deleted)' if group is None else group.name!r}: parameter {self.parameter!r}"


def handle_of(weight: torch.Tensor) -> WeightHandle:
    """Return the handle of a gathered weight, which gets one if it has none."""
    handle: WeightHandle | None = getattr(weight, "_fsdp_handle", None)
    if handle is None:
        handle = weight._fsdp_handle = WeightHandle()  # type: ignore[attr-defined]  # an attribute of its own
    return handle


# ---------------------------------------------------------------- tensors that users give


def laid_out(params: FSDPParams, param: torch.Tensor, value: torch.Tensor) -> DTensor:
    """Return ``value``, a whole tensor or a DTensor of any placement, as a DTensor laid out like a parameter.

    Every rank of the mesh calls it. One whole tensor exists at a time.
    """
    index = next(position for position, other in enumerate(params.sharded_params) if other is param)
    template, split = params.sharded_params[index], params.owned[index].split
    assert isinstance(template, FlatDTensor)
    local = torch.empty_like(template.to_local(), dtype=value.dtype)
    held = params.main_weight.layout.held(index)
    whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    part = (whole if split is None else split.local_part(whole)).reshape(-1)
    local.view(-1).copy_(part[held.start : held.stop])
    return FlatDTensor.from_local(
        local, template.device_mesh, template.placements, run_check=False, shape=template.shape,
        stride=template.stride(),
    )  # fmt: skip


def own_rows(params: FSDPParams, index: int, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a gradient that autograd or the user gave a sharded parameter.

    Raises:
        StateError: it is a plain tensor.
    """
    if not isinstance(gradient, DTensor):
        raise StateError(
            f"{params.main_weight.name}: .grad of parameter {params.owned[index].name!r} was replaced by a plain "
            "tensor; assign a DTensor laid out like the parameter, or change the gradient in place"
        )
    if not is_laid_out_like(gradient, params.sharded_params[index]):
        gradient = laid_out(params, params.sharded_params[index], gradient)
    return gradient.to_local()


def is_laid_out_like(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether ``value`` may stand beside a sharded parameter as it is: a DTensor with the very rows of its ranks."""
    if not isinstance(value, DTensor) or not isinstance(param, DTensor):
        return False
    return value.to_local().numel() == param.to_local().numel() and _placed(value) == _placed(param)


def _placed(value: DTensor) -> list[str]:
    # With the rows of each rank, which take no part in the comparison of placements.
    return [repr(placement) for placement in value.placements]
