"""The places in a unit's modules where its parameters are registered, and the switch between their two faces."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from megatron_fsdp.ownership import OwnedParameter

__all__ = ["Sites"]


class Sites:
    """Where the parameters of a group are registered, and the two sets of objects to register there."""

    def __init__(
        self, owned: Sequence[OwnedParameter], sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]
    ) -> None:
        # Dictionaries, not modules: they do not refer back to anything that owns this group.
        self._first = [(parameter.sites[0].module._parameters, parameter.sites[0].attribute) for parameter in owned]
        self._plain: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self._assigned: list[tuple[weakref.ref[nn.Module], str, nn.Parameter, nn.Parameter]] = []
        for parameter, resting, used in zip(owned, sharded, unsharded, strict=True):
            for site in parameter.sites:
                if type(site.module).__setattr__ is nn.Module.__setattr__:
                    self._plain.append((site.module._parameters, site.attribute, resting, used))
                else:
                    # Modules with their own __setattr__ (recurrent ones) keep further references to their weights.
                    self._assigned.append((weakref.ref(site.module), site.attribute, resting, used))

    def registered(self, index: int) -> torch.Tensor:
        """Return what is registered now where parameter ``index`` was first found."""
        registry, attribute = self._first[index]
        value = registry[attribute]
        assert value is not None
        return value

    def show_sharded(self) -> None:
        """Register the sharded parameters."""
        for registry, attribute, resting, _ in self._plain:
            registry[attribute] = resting
        for module, attribute, resting, _ in self._assigned:
            setattr(module(), attribute, resting)

    def hide(self) -> None:
        """Register nothing."""
        for registry, attribute, _, _ in self._plain:
            registry[attribute] = None
        for module, attribute, _, _ in self._assigned:
            setattr(module(), attribute, None)

    def show_unsharded(self) -> None:
        """Register the gathered views."""
        for registry, attribute, _, used in self._plain:
            registry[attribute] = used
        for module, attribute, _, used in self._assigned:
            setattr(module(), attribute, used)
