"""FSDPParams: the two sets of parameter objects of a group, and what users did to them.

At rest a module shows DTensors over ``main_weight``; while its weights are gathered it shows plain tensors, views of
that storage. Both sets live as long as the group, so switching is a few dictionary writes."""

from __future__ import annotations

import collections
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from dbuffer.dtensor.placed_tensor import NUM_FLAGS_SET
from dbuffer.events import listeners, tell
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.runtime.step.lanes import turns
from megatron_fsdp.runtime.weights.gathered_weight import GatheredWeight, ReleasedWeight, WeightHandle, refuse_uncounted

if TYPE_CHECKING:
    from megatron_fsdp.runtime.step.parameter_group import ParameterGroup

__all__ = [
    "RELEASED_VERSION",
    "SMALL_NUMEL",
    "FSDPParams",
    "ParamModuleInfos",
    "ReadGuard",
    "ReplacedParam",
    "grads_of",
    "outside",
]

_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad

# Called for all parameters of a group: the attribute of a subclass costs a Python call otherwise, and a switch of the
# subclass's own functions off and on as much again.
_requires_grad = _REQUIRES_GRAD.__get__

_plainly: Any = torch._C._disabled_torch_function_impl

SMALL_NUMEL = 1 << 14
"""Gradients of so few elements are copied together: one copy costs a launch as that of many does."""

RELEASED_VERSION = 1_000_000_000
"""What autograd's message gives as the version of a weight that was released."""


_VERSION: Any = torch._C.TensorBase._version
_version = _VERSION.__get__
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter
_GRAD: Any = torch._C.TensorBase.grad
_get_grad = _GRAD.__get__


class ReadGuard:
    """Allows and forbids the backwards of operators that saved any of some tensors, or views of them.

    Autograd compares the version of a saved tensor with the one that it had when it was saved, and refuses before it
    computes. Released weights get a version that no operator has seen, gathered ones the version that they had before,
    so a backward that reaches them unannounced is an error of autograd's instead of a read of other memory, at the
    price of one call for a unit's parameters (docs/design/order.md).

    Args:
        tensors: as operators see them. Of a DTensor the local part is guarded too.
    """

    __slots__ = ("_owners", "_released", "_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        wrappers = [(index, tensor) for index, tensor in enumerate(tensors) if isinstance(tensor, DTensor)]
        self._owners: list[int] = [*range(len(tensors)), *(index for index, _ in wrappers)]
        self._tensors = (*tensors, *(tensor._local_tensor for _, tensor in wrappers))
        self._released = (RELEASED_VERSION,) * len(self._tensors)
        self._versions = self.current()

    def forbid(self, versions: tuple[int, ...] | None = None) -> None:
        """Make autograd refuse what was saved.

        Args:
            versions: what ``current`` returns now, where that is known.
        """
        self._versions = self.current() if versions is None else versions
        _set_versions(self._tensors, self._released)

    def allow(self) -> None:
        """Let autograd use again what was saved since the tensors were last changed in place."""
        _set_versions(self._tensors, self._versions)

    def current(self) -> tuple[int, ...]:
        """Return how often each tensor was changed in place, and after them the local parts of those that have one."""
        versions: tuple[int, ...] = _plainly(tuple, (), (map(_version, self._tensors),))
        return versions

    def index_of(self, position: int) -> int:
        """Return to which tensor a version in ``current`` belongs."""
        return self._owners[position]


class FSDPParams:
    """The sharded and the gathered parameters of one group, and where they are registered.

    Attributes:
        sharded_params: DTensors over ``main_weight``, in plan order. unsharded_params: views of the gathered weights.
        has_splits: whether parameters were sharded along another axis before.
        counted: the tensors whose versions grow with every in-place change of them that PyTorch counts.

        owned: what they were made from. main_weight: what the sharded ones lie in.
        resting: returns this rank's rows of a parameter, by its index, over ``main_weight``.
        subclass: the name of the class of a parameter that says itself what is gathered; empty for plain ones.
        receiver: of gradients, referred to weakly.
    """

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        main_weight: DBuffer,
        sharded_params: list[nn.Parameter],
        unsharded_params: list[nn.Parameter],
        resting: Callable[[int], DTensor],
        receiver: ParameterGroup,
    ) -> None:
        self.owned = tuple(owned)
        self.main_weight = main_weight
        self.resting = resting
        self.subclass = ""
        self.has_splits = any(parameter.split is not None for parameter in owned)
        self.sharded_params = sharded_params
        self.receiver = weakref.ref(receiver)
        self.unsharded_params = unsharded_params
        for parameter, weight in zip(owned, unsharded_params, strict=True):
            weight._fsdp_handle = WeightHandle(self.receiver, parameter.name)  # type: ignore[attr-defined]
        self._guarded = [param for param in self.unsharded_params if isinstance(param, GatheredWeight)]
        self._guard = ReadGuard(self.unsharded_params)
        self._versions = self._guard.current()
        self.counted: list[torch.Tensor] = []
        self.follow_locals()
        # Whether the backward under way brought gradients, by which hooks of small ones see that nothing is to be done.
        self.begun = [False]
        # Of which parameters autograd has added up all that the backward under way brings.
        self.came = bytearray(len(owned))
        self.waits = bytearray(int(param.numel() <= SMALL_NUMEL) for param in self.unsharded_params)
        self._listening = bytearray(len(owned))
        self._required = [False] * len(owned)
        self._num_flags_set = -1
        for index, parameter in enumerate(owned):
            self.set_requires_grad(index, parameter.parameter.requires_grad)
        self.module_infos = ParamModuleInfos(owned, self.sharded_params, self.unsharded_params)

    # ------------------------------------------------------------------ memory of the gathered ones

    def released(self, *, is_unchanged: bool = False) -> None:
        """Refuse reads of the gathered weights, by name and by autograd: their memory is gone.

        Args:
            is_unchanged: ``changed_in_place`` has just found no change.
        """
        self._guard.forbid(self._versions if is_unchanged else None)
        for weight in self._guarded:
            weight.__class__ = ReleasedWeight

    def brought_back(self) -> None:
        """Allow reads of the gathered weights again."""
        self._guard.allow()
        for weight in self._guarded:
            weight.__class__ = GatheredWeight

    def changed_in_place(self) -> int | None:
        """Return which gathered weight an operator that PyTorch counts has changed, None for none."""
        versions = self._guard.current()
        if versions == self._versions:
            return None
        changed = next(i for i, (new, old) in enumerate(zip(versions, self._versions, strict=True)) if new != old)
        return self._guard.index_of(changed)

    def refuse_change(self, index: int) -> NoReturn:
        """Refuse a change of gathered weights that was found afterwards.

        Raises:
            StateError: always.
        """
        refuse_uncounted(self.unsharded_params[index], WeightHandle(self.receiver, self.owned[index].name))

    def accept_versions(self) -> None:
        """Forget of changes in place: the values will be written again."""
        self._versions = self._guard.current()

    # ------------------------------------------------------------------ requires_grad

    def changed_requires_grad(self) -> list[int]:
        """Return which parameters were frozen or unfrozen since compute last used them, on either object."""
        used, required = self._used_flags(), self._required
        if NUM_FLAGS_SET[0] == self._num_flags_set and used == required:
            return []
        resting, self._num_flags_set = self._resting_flags(), NUM_FLAGS_SET[0]
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

    def frozen_since_used(self) -> list[int]:
        """Return which parameters were trained when compute last used them and are not any more."""
        used = self._used_flags()
        if NUM_FLAGS_SET[0] == self._num_flags_set and used == self._required:
            return []
        flags = zip(self._resting_flags(), used, self._required, strict=True)
        frozen = [index for index, (one, other, required) in enumerate(flags) if required and not (one and other)]
        for index in frozen:
            self.sharded_params[index].requires_grad_(False)
        return frozen

    def _resting_flags(self) -> list[bool]:
        flags: list[bool] = _plainly(list, (), (map(_requires_grad, self.sharded_params),))
        return flags

    def _used_flags(self) -> list[bool]:
        flags: list[bool] = _plainly(list, (), (map(_requires_grad, self.unsharded_params),))
        return flags

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Make the unsharded parameter require a gradient, and hear of it, or not."""
        used = self.unsharded_params[index]
        used.requires_grad_(requires_grad)
        self._required[index] = requires_grad
        if requires_grad and not self._listening[index]:
            self._listening[index] = 1
            # Streams take turns: there each one has to be seen.
            can_wait = self.waits[index] and turns(used.device) is None
            hook = _gradient_hook(self.receiver, index, self.begun if can_wait else [False], self.came)
            torch.Tensor.register_post_accumulate_grad_hook(used, hook)  # type: ignore[no-untyped-call]  # torch's stub

    def name_of(self, index: int) -> str:
        """Return the name of a parameter within its unit."""
        return self.owned[index].name

    def awaits_gradients(self) -> bool:
        """Whether the graph that autograd is going through brings gradients that have not come yet."""
        return any(
            not came and param.requires_grad and _is_in_graph(param)
            for param, came in zip(self.unsharded_params, self.came, strict=True)
        )

    def local_gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the gradient of a gathered parameter, whole along the data-parallel axes."""
        split = self.owned[index].split
        return gradient if split is None else split.local_gradient(gradient)

    def wrap(self, index: int, rows: DTensor) -> DTensor:
        """Return another buffer's DTensor of parameter ``index``, placed like the sharded parameter."""
        split = self.owned[index].split
        return rows if split is None else split.resting(rows)

    def follow_locals(self) -> None:
        """Count changes of the tensors that the sharded parameters lie in now."""
        # Every in-place operator on a sharded parameter changes the version of the rows below it.
        locals_ = [param._local_tensor for param in self.sharded_params if isinstance(param, DTensor)]
        self.counted[:] = [self.main_weight.local_buffer, *locals_]


def _gradient_hook(
    receiver: weakref.ref[ParameterGroup], index: int, begun: list[bool], came: bytearray
) -> Callable[[torch.Tensor], None]:
    def receive(parameter: torch.Tensor) -> None:
        came[index] = 1
        if begun[0] and not listeners:
            return
        owner = receiver()
        gradients = None if owner is None else owner.gradients
        if gradients is not None:
            if listeners:
                tell("gradient", gradients)
            gradients.receive(index, parameter)

    return receive


def _is_in_graph(leaf: torch.Tensor) -> bool:
    # Nothing is computed, so whether the leaf has memory now is nobody's affair.
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # ``torch.autograd.grad`` returns this leaf's gradient and accumulates none.
        return False


_registered: Callable[[dict[str, nn.Parameter | None], str], nn.Parameter | None] = dict.get


@dataclass(frozen=True, slots=True)
class ReplacedParam:
    """Something that is registered where a parameter was.

    Attributes:
        position: of the place. index: of the parameter in the group.
        value: what is there; None for nothing.
    """

    position: int
    index: int
    value: torch.Tensor | None


class ParamModuleInfos:
    """Where the parameters of a group are registered, and the two sets of objects to register there."""

    def __init__(
        self, owned: Sequence[OwnedParameter], sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]
    ) -> None:
        # Dictionaries, not modules: they do not refer back to anything that owns this group.
        self._plain: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self._assigned: list[tuple[weakref.ref[nn.Module], str, nn.Parameter, nn.Parameter]] = []
        # All places, and the parameter of each.
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self._indices: list[int] = []
        for index, (parameter, resting, used) in enumerate(zip(owned, sharded, unsharded, strict=True)):
            for info in parameter.param_module_infos:
                place = (info.module._parameters, info.attribute, resting, used)
                self._indices.append(index)
                self._places.append(place)
                if type(info.module).__setattr__ is nn.Module.__setattr__:
                    self._plain.append(place)
                else:
                    # Modules with their own __setattr__ (recurrent ones) keep further references to their weights.
                    self._assigned.append((weakref.ref(info.module), info.attribute, resting, used))
        # The columns of the plain places, for passes over all of them that leave Python once.
        self._registries = [registry for registry, *_ in self._plain]
        self._attributes = [attribute for _, attribute, *_ in self._plain]
        self._resting = [resting for *_, resting, _ in self._plain]
        self._used = [used for *_, used in self._plain]
        self._hidden: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        # By position: what is registered for one call, and what was.
        self._overridden: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.shows_gathered = False

    def registered(self, index: int) -> torch.Tensor | None:
        """Return what is registered now where parameter ``index`` was first found."""
        registry, attribute, *_ = self._places[self._indices.index(index)]
        return registry.get(attribute)

    def places(self) -> Iterator[tuple[dict[str, nn.Parameter | None], str]]:
        """Yield the places: a module's dictionary, and the name in it."""
        for registry, attribute, *_ in self._places:
            yield registry, attribute

    def num_places(self, index: int) -> int:
        """Return how often parameter ``index`` is registered."""
        return self._indices.count(index)

    def replaced(self) -> list[ReplacedParam]:
        """Return what somebody else registered."""
        if not self._assigned and self._shows(self._resting):
            return []
        return [
            ReplacedParam(position, self._indices[position], registry.get(attribute))
            for position, (registry, attribute, resting, used) in enumerate(self._places)
            if (found := registry.get(attribute)) is not resting and found is not used
        ]

    def override(self, found: ReplacedParam, value: torch.Tensor) -> None:
        """Let compute use ``value`` in the place of a replaced parameter until ``restore``."""
        assert found.value is not None
        self._overridden[found.position] = (value, found.value)
        registry, attribute, *_ = self._places[found.position]
        registry[attribute] = value  # type: ignore[assignment]  # as torch.func.functional_call does

    def register(self) -> None:
        """Register the sharded parameters, whatever was there."""
        for registry, attribute, resting, _ in self._plain:
            registry[attribute] = resting
        for module, attribute, resting, _ in self._assigned:
            setattr(module(), attribute, resting)
        self.shows_gathered = False

    def show_sharded(self) -> None:
        """Register the sharded parameters in the places of the gathered ones."""
        self._switch(self._used, self._resting)
        if self._assigned:
            self._assign(is_gathered=False)
        if self._overridden:
            self.restore()
        self.shows_gathered = False

    def show_unsharded(self) -> None:
        """Register the gathered views in the places of the sharded parameters."""
        self._switch(self._resting, self._used)
        if self._assigned:
            self._assign(is_gathered=True)
        self.shows_gathered = True

    def _shows(self, wanted: Sequence[nn.Parameter]) -> bool:
        """Whether the plain places hold these."""
        return all(map(operator.is_, map(_registered, self._registries, self._attributes), wanted))

    def _switch(self, found: Sequence[nn.Parameter], wanted: Sequence[nn.Parameter]) -> None:
        """Register parameters in the plain places of others; replaced ones stay."""
        if all(map(operator.is_, map(_registered, self._registries, self._attributes), found)):
            collections.deque(map(operator.setitem, self._registries, self._attributes, wanted), maxlen=0)
            return
        for registry, attribute, old, new in zip(self._registries, self._attributes, found, wanted, strict=True):
            if registry.get(attribute) is old:
                registry[attribute] = new

    def is_gathered_everywhere(self) -> bool:
        """Whether no sharded parameter is registered; ``functional_call`` puts back what it found."""
        if not self.shows_gathered:
            return False
        if not self._assigned and self._shows(self._used):
            return True
        for registry, attribute, resting, _ in self._places:  # noqa: SIM110  # asked for in every forward
            if registry.get(attribute) is resting:
                return False
        return True

    def _assign(self, *, is_gathered: bool) -> None:
        for reference, attribute, resting, used in self._assigned:
            module = reference()
            if module is None:
                continue
            found, wanted = (resting, used) if is_gathered else (used, resting)
            if module._parameters.get(attribute) is found:
                setattr(module, attribute, wanted)

    def restore(self) -> None:
        """Register what was there in place of what was lent."""
        if not self._overridden:
            return
        for position, (value, original) in self._overridden.items():
            registry, attribute, *_ = self._places[position]
            if registry.get(attribute) is value:
                registry[attribute] = original  # type: ignore[assignment]  # what functional_call had put there
        self._overridden.clear()

    def hide(self) -> None:
        """Register nothing in the places of the sharded parameters, until ``unhide``."""
        self._hidden = [place for place in self._places if place[0].get(place[1]) is place[2]]
        for registry, attribute, resting, _ in self._plain:
            if registry.get(attribute) is resting:
                registry[attribute] = None
        for reference, attribute, resting, _ in self._assigned:
            module = reference()
            if module is not None and module._parameters.get(attribute) is resting:
                setattr(module, attribute, None)

    def unhide(self) -> None:
        """Register again what ``hide`` took away."""
        for registry, attribute, resting, _ in self._hidden:
            registry[attribute] = resting
        for reference, attribute, resting, _ in self._assigned:
            module = reference()
            if module is not None and module._parameters.get(attribute) is resting:
                setattr(module, attribute, resting)
        self._hidden = []


def grads_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return ``.grad`` of each parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_get_grad, parameters))


def outside(
    gradients: Sequence[torch.Tensor | None], params: Sequence[torch.Tensor], buffer: DBuffer
) -> list[torch.Tensor]:
    """Return this rank's parts of those gradients that are tensors of their own, not the buffer's.

    Args:
        gradients: DTensors, in the order of the buffer's tensors; None for none.
        params: known to be the buffer's, in the same order; none where they were not made yet.
    """
    if params and all(map(operator.is_, gradients, params)):
        return []
    found = []
    for index, gradient in enumerate(gradients):
        local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        if local is not None and local.numel() and local.data_ptr() != buffer.get_local_tensor(index).data_ptr():
            found.append(local)
    return found
