"""The places in a unit's modules where its parameters are registered, and the switch between their two faces.

Whatever else somebody registers there is left alone: it is a stranger, and the next forward decides what becomes of it
(``strangers.py``).
"""

from __future__ import annotations

import collections
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_fsdp.ownership import OwnedParameter

__all__ = ["Sites", "Stranger"]

_registered: Callable[[dict[str, nn.Parameter | None], str], nn.Parameter | None] = dict.get


@dataclass(frozen=True, slots=True)
class Stranger:
    """Something that is registered where a parameter was.

    Attributes:
        position: of the place. index: of the parameter in the group.
        value: what is there; None for nothing.
    """

    position: int
    index: int
    value: torch.Tensor | None


class Sites:
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
            for site in parameter.sites:
                place = (site.module._parameters, site.attribute, resting, used)
                self._indices.append(index)
                self._places.append(place)
                if type(site.module).__setattr__ is nn.Module.__setattr__:
                    self._plain.append(place)
                else:
                    # Modules with their own __setattr__ (recurrent ones) keep further references to their weights.
                    self._assigned.append((weakref.ref(site.module), site.attribute, resting, used))
        # The columns of the plain places, for passes over all of them that leave Python once.
        self._registries = [registry for registry, *_ in self._plain]
        self._attributes = [attribute for _, attribute, *_ in self._plain]
        self._resting = [resting for *_, resting, _ in self._plain]
        self._used = [used for *_, used in self._plain]
        self._hidden: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        # By position: what is registered for one call, and what was.
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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

    def strangers(self) -> list[Stranger]:
        """Return what somebody else registered."""
        if not self._assigned and self._shows(self._resting):
            return []
        return [
            Stranger(position, self._indices[position], registry.get(attribute))
            for position, (registry, attribute, resting, used) in enumerate(self._places)
            if (found := registry.get(attribute)) is not resting and found is not used
        ]

    def lend(self, stranger: Stranger, value: torch.Tensor) -> None:
        """Let compute use ``value`` in a stranger's place until ``take_back``."""
        assert stranger.value is not None
        self._lent[stranger.position] = (value, stranger.value)
        registry, attribute, *_ = self._places[stranger.position]
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
        self.take_back()
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
        """Register parameters in the plain places of others; strangers stay."""
        if self._shows(found):
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

    def take_back(self) -> None:
        """Register what was there in place of what was lent."""
        if not self._lent:
            return
        for position, (value, original) in self._lent.items():
            registry, attribute, *_ = self._places[position]
            if registry.get(attribute) is value:
                registry[attribute] = original  # type: ignore[assignment]  # what functional_call had put there
        self._lent.clear()

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
