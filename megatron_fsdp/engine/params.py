"""FSDPParams: the sharded and the unsharded parameters of a group, where they are registered, and their versions.

A resharded module has the sharded parameters, DTensors over ``main_weight``. An unsharded module has the unsharded
parameters, views of the gathered weights. Both sets live as long as the group, so switching is a few dictionary writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from dbuffer.dtensor.flat_dtensor import FlatDTensor
from dbuffer.dtensor.placed_tensor import REQUIRES_GRAD_WRITES
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.engine.param_loops import requires_grad_of, set_classes, set_versions, version_of, versions_of
from megatron_fsdp.engine.streams import LastTurn
from megatron_fsdp.errors import StateError

__all__ = [
    "NEVER",
    "NO_BUFFER",
    "SMALL_NUMEL",
    "FSDPParams",
    "Flag",
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
"""Gradients of at most this many elements are copied in one call, because each copy costs a kernel launch."""

RELEASED_VERSION = 1_000_000_000
"""The version counter of a released weight; autograd's error message shows it."""


# A version that no tensor has.
_MARK = 2 * RELEASED_VERSION


class Flag:
    """A flag that the gradient buffer sets and gradient hooks read, without a call."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False


NEVER = Flag()
"""The flag of hooks whose gradient never waits in ``.grad``; nothing sets it."""


class FSDPParams:
    """The sharded and the unsharded parameters of one group.

    Unsharded parameters are in one of two states: gathered, and released. Autograd compares the version of a saved
    tensor with the version when it was saved, and raises if they differ. ``forbid_reads`` sets a version that no
    operator has seen, and ``allow_reads`` restores the one before. So a backward that needs a released weight raises
    autograd's error instead of reading other memory. Weights that are views of one tensor share its version
    (docs/design/order.md).

    Args:
        sharded_params: DTensors over ``main_weight``, in plan order. unsharded_params: views of the gathered weights.
        owned: the descriptions that both were made from. main_weight: the buffer of the sharded parameters.
        kinds: the classes of a gathered and of a released unsharded parameter (``unsharded_param.KINDS``).

    Attributes:
        has_tensor_parallel: some parameters are sharded over tensor-parallel axes too.
        counted: tensors whose versions grow with every in-place change of sharded parameters that PyTorch counts.
        module_infos: where the parameters are registered.
        subclass: the name of a parameter class with all-gather hooks; empty for plain parameters.
        came: one byte per parameter, 1 if autograd has accumulated its gradient in this backward.
        is_small: one byte per parameter, 1 if it has at most ``SMALL_NUMEL`` elements.
        last_requires_grad: per parameter, ``requires_grad`` at compute's last use.

    Attributes that the gradient buffer sets and gradient hooks read, so that a hook with nothing to do makes no call:
        begun: set while a backward packs gradients of the group; then hooks of small gradients return at once.
        begun_on_lane: the same for hooks of larger gradients, if a ``LanePacker`` packs them.
        last_turn: the stream that had the last turn at the packed buffer (``streams.Turns``).
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
        self.has_tensor_parallel = any(parameter.tensor_parallel is not None for parameter in owned)
        self.sharded_params, self.unsharded_params = sharded_params, unsharded_params
        self._kinds = kinds
        self._guarded = [param for param in unsharded_params if isinstance(param, kinds[0])]
        wrappers = [param for param in unsharded_params if isinstance(param, DTensor)]
        # If the classes of all parameters count writes of requires_grad, no flag has to be read.
        self._counts_requires_grad_writes = len(self._guarded) == len(unsharded_params)
        # The version of a DTensor's local part is guarded too.
        self._versioned, self._counters = _counters_of(
            (*unsharded_params, *(param._local_tensor for param in wrappers))
        )
        self._weights = (*unsharded_params, *wrappers)
        self._released = (RELEASED_VERSION,) * len(self._versioned)
        self._versions = self._kept_versions = versions_of(self._versioned)
        self.counted: list[torch.Tensor] = []
        self.begun, self.begun_on_lane = Flag(), Flag()
        self.last_turn = LastTurn()
        self.came = bytearray(len(owned))
        self.is_small = bytearray(int(param.numel() <= SMALL_NUMEL) for param in unsharded_params)
        self.last_requires_grad = [False] * len(owned)
        self._num_requires_grad_writes = -1

    # ------------------------------------------------------------------ memory of unsharded parameters

    def forbid_reads(self, *, is_unchanged: bool = False) -> None:
        """Make reads of unsharded parameters raise, in Python and in autograd, because their memory is released.

        Args:
            is_unchanged: ``changed_in_place`` has just found no change.
        """
        self._kept_versions = self._versions if is_unchanged else versions_of(self._versioned)
        set_versions(self._versioned, self._released)
        set_classes(self._guarded, self._kinds[1])

    def allow_reads(self) -> None:
        """Allow reads of unsharded parameters again, and backwards that saved them since their last change."""
        set_versions(self._versioned, self._kept_versions)
        set_classes(self._guarded, self._kinds[0])

    def changed_in_place(self) -> Sequence[torch.Tensor]:
        """Return weights of which PyTorch counted an in-place change; nothing if there was no change.

        All weights that share a changed version counter are returned.
        """
        versions = versions_of(self._versioned)
        if versions == self._versions:
            return ()
        before = self._versions
        counters = zip(self._weights, self._counters, strict=True)
        return [weight for weight, counter in counters if versions[counter] != before[counter]]

    def accept_versions(self) -> None:
        """Accept in-place changes that the next gather overwrites."""
        self._versions = versions_of(self._versioned)

    # ------------------------------------------------------------------ requires_grad

    def changed_requires_grad(self) -> list[int]:
        """Return the indices of parameters that were frozen or unfrozen since compute's last use, on either object."""
        if REQUIRES_GRAD_WRITES.number == self._num_requires_grad_writes and self._counts_requires_grad_writes:
            return []
        last = self.last_requires_grad
        used, shown = requires_grad_of(self.unsharded_params), requires_grad_of(self.sharded_params)
        self._num_requires_grad_writes = REQUIRES_GRAD_WRITES.number
        if shown == last == used:
            return []
        changed = []
        for index, flag in enumerate(last):
            wanted = used[index] if used[index] is not flag else shown[index]
            self.sharded_params[index].requires_grad_(wanted)
            self.unsharded_params[index].requires_grad_(flag)
            if wanted is not flag:
                changed.append(index)
        return changed

    def freeze(self) -> list[int]:
        """Freeze both objects of each parameter that the user has frozen on one since compute's last use.

        Returns:
            The indices of these parameters.
        """
        changed = self.changed_requires_grad()
        if changed:
            # Unfrozen parameters count from the next forward on, which looks again.
            self._num_requires_grad_writes = -1
        frozen = [index for index in changed if self.last_requires_grad[index]]
        for index in frozen:
            self.unsharded_params[index].requires_grad_(False)
            self.last_requires_grad[index] = False
        return frozen

    def wrap(self, index: int, rows: DTensor) -> DTensor:
        """Return another buffer's DTensor of parameter ``index``, placed like the sharded parameter."""
        tensor_parallel = self.owned[index].tensor_parallel
        return rows if tensor_parallel is None else tensor_parallel.as_sharded(rows)


def _counters_of(tensors: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], list[int]]:
    """Return one tensor per version counter, and for each tensor the index of its counter."""
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
    receiver: weakref.ref[Any], index: int, begun: Flag, came: bytearray
) -> Callable[[torch.Tensor], None]:
    """Return the hook on an unsharded parameter that hands its gradient to the gradient buffer of its group.

    Args:
        receiver: the group. came: ``FSDPParams.came``.
        begun: ``FSDPParams.begun`` for a gradient that waits in ``.grad``; ``NEVER`` for one that is packed at once.
    """

    def receive(parameter: torch.Tensor) -> None:
        came[index] = 1
        if begun.is_set:
            return
        owner = receiver()
        gradients = None if owner is None else owner.gradient_buffer
        if gradients is not None:
            gradients.receive(index, parameter)

    return receive


def gradient_hook_on_streams(
    receiver: weakref.ref[Any],
    index: int,
    begun: Flag,
    came: bytearray,
    last_turn: LastTurn,
    current: Callable[[], int],
) -> Callable[[torch.Tensor], None]:
    """Return ``gradient_hook`` for a device with streams, where a gradient may wait if its stream has the turn.

    The check in the hook itself saves two thirds of the host's time for a gradient that waits.

    Args:
        last_turn: see ``FSDPParams``. current: returns the number of the current stream.
    """
    receive_first = gradient_hook(receiver, index, NEVER, came)

    def receive(parameter: torch.Tensor) -> None:
        if begun.is_set and last_turn.stream == current():
            came[index] = 1
        else:
            receive_first(parameter)

    return receive


Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]
"""A module's dictionary of parameters, a name in it, and the sharded and the unsharded parameter for that name."""


class ParamModuleInfos:
    """The places in modules where the parameters of a group are registered; ``show`` switches them.

    Args:
        places: dictionaries and names. Dictionaries instead of modules, because a module refers to the group.
        indices: for each place, the index of its parameter.
        modules: module and name of places in modules that keep further references to their weights, as recurrent
            modules do in ``__setattr__``.

    Attributes:
        shows_gathered: the unsharded parameters are registered.
    """

    def __init__(
        self, places: Sequence[Place], indices: Sequence[int], modules: Sequence[tuple[weakref.ref[nn.Module], str]]
    ) -> None:
        self.places, self.indices, self._modules = tuple(places), tuple(indices), tuple(modules)
        # The columns of places.
        self._registries = [registry for registry, *_ in places]
        self._attributes = [attribute for _, attribute, *_ in places]
        self._sharded = [sharded for *_, sharded, _ in places]
        self._used = [used for *_, used in places]
        self.shows_gathered = False

    def is_replaced(self) -> bool:
        """Return True if a place holds anything else than its sharded parameter."""
        for registry, attribute, sharded in zip(self._registries, self._attributes, self._sharded, strict=True):
            if attribute not in registry or registry[attribute] is not sharded:
                return True
        return False

    def show(self, *, is_gathered: bool) -> None:
        """Register the unsharded (True) or the sharded parameters; leave places whose parameter the user replaced."""
        found, wanted = (self._sharded, self._used) if is_gathered else (self._used, self._sharded)
        for registry, attribute, old, new in zip(self._registries, self._attributes, found, wanted, strict=True):
            if attribute in registry and registry[attribute] is old:
                registry[attribute] = new
        if self._modules:
            self.tell_modules()
        self.shows_gathered = is_gathered

    def register(self) -> None:
        """Register the sharded parameters in all places, also where the user replaced a parameter."""
        for registry, attribute, sharded, _ in self.places:
            registry[attribute] = sharded
        self.tell_modules()
        self.shows_gathered = False

    def tell_modules(self) -> None:
        """Set the registered parameters on modules that keep further references to their weights."""
        for reference, attribute in self._modules:
            module = reference()
            shown = None if module is None else module._parameters.get(attribute)
            if shown is not None:
                setattr(module, attribute, shown)


_NOTHING: weakref.ref[Any] = weakref.ref(set())
NO_BUFFER = _NOTHING
"""``WeightHandle.gradient_buffer`` of a weight without a gradient buffer that takes products."""


class WeightHandle:
    """Weak references from an unsharded parameter to its group and its gradient buffer.

    Attributes:
        group: its ``ParameterGroup``. parameter: its name within the unit.
        gradient_buffer: the ``GradientBuffer`` that backward multiplies its gradient into; ``NO_BUFFER`` for autograd's
            way.
        index: the parameter's index in that buffer.
    """

    __slots__ = ("gradient_buffer", "group", "index", "parameter")

    def __init__(self, group: weakref.ref[Any] = _NOTHING, parameter: str = "") -> None:
        self.group, self.parameter = group, parameter
        self.gradient_buffer = NO_BUFFER
        self.index = 0

    @property
    def words(self) -> str:
        """The names of the unit and of the parameter, for messages."""
        group = self.group()
        return f"unit {'(deleted)' if group is None else group.name!r}: parameter {self.parameter!r}"


def handle_of(weight: torch.Tensor) -> WeightHandle:
    """Return the handle of an unsharded parameter; make one if it has none."""
    handle: WeightHandle | None = getattr(weight, "_fsdp_handle", None)
    if handle is None:
        handle = weight._fsdp_handle = WeightHandle()  # type: ignore[attr-defined]  # an attribute of its own
    return handle


# ---------------------------------------------------------------- tensors from users


def laid_out(params: FSDPParams, param: torch.Tensor, value: torch.Tensor) -> DTensor:
    """Return ``value``, a whole tensor or a DTensor of any placement, as a DTensor laid out like a parameter.

    All ranks of the mesh must call it, because it gathers a DTensor.
    """
    index = next(position for position, other in enumerate(params.sharded_params) if other is param)
    template, tensor_parallel = params.sharded_params[index], params.owned[index].tensor_parallel
    assert isinstance(template, FlatDTensor)
    local = torch.empty_like(template.to_local(), dtype=value.dtype)
    held = params.main_weight.layout.held(index)
    whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    part = (whole if tensor_parallel is None else tensor_parallel.local_part(whole)).reshape(-1)
    local.view(-1).copy_(part[held.start : held.stop])
    return FlatDTensor.from_local(
        local, template.device_mesh, template.placements, run_check=False, shape=template.shape,
        stride=template.stride(),
    )  # fmt: skip


def own_rows(params: FSDPParams, index: int, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a ``.grad`` that autograd or the user set on a sharded parameter.

    Raises:
        StateError: the gradient is a plain tensor.
    """
    if not isinstance(gradient, DTensor):
        raise StateError(
            f"{params.main_weight.name}: .grad of parameter {params.owned[index].name!r} was replaced by a plain "
            "tensor. fix: assign a DTensor laid out like the parameter, or change the gradient in place"
        )
    if not is_laid_out_like(gradient, params.sharded_params[index]):
        gradient = laid_out(params, params.sharded_params[index], gradient)
    return gradient.to_local()


def is_laid_out_like(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Return True if ``value`` is a DTensor with the same rows on each rank as a sharded parameter."""
    if not isinstance(value, DTensor) or not isinstance(param, DTensor):
        return False
    return value.to_local().numel() == param.to_local().numel() and _placed(value) == _placed(param)


def _placed(value: DTensor) -> list[str]:
    # repr shows the rows of each rank, which comparing placements ignores.
    return [repr(placement) for placement in value.placements]
