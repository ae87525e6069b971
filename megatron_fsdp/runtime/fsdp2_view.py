"""What FSDP2's private state looks like from outside, for tensor subclasses that read it in their all-gather hooks.

TransformerEngine's MXFP8 weights ask for the state of the module that they are in, by ``_get_fsdp_state()`` of the module
or, for one inside of a unit, by PyTorch's table of module states; then for ``_fsdp_param_group``, and of that for
``_reshard_after_forward`` and ``_training_state``, to know which of their two grids to send.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from megatron_fsdp.runtime.unit import Unit, is_in_backward

__all__ = ["StateView", "show_state"]


class StateView:
    """The state of one unit under FSDP2's names.

    Attributes:
        _fsdp_param_group: this object too, which has the names that are asked of a parameter group.
    """

    __slots__ = ("__weakref__", "_is_released", "_unit")

    def __init__(self, unit: Unit | None, *, is_released: bool = True) -> None:
        self._unit = None if unit is None else unit.reference
        self._is_released = is_released

    @property
    def _fsdp_param_group(self) -> StateView | None:
        unit = self._known()
        return self if unit is None or unit.groups else None

    @property
    def _reshard_after_forward(self) -> bool:
        unit = self._known()
        return self._is_released if unit is None else unit.schedule.reshards_after_forward(unit)

    @property
    def _training_state(self) -> TrainingState:
        if is_in_backward():
            return TrainingState.PRE_BACKWARD
        unit = self._known()
        return TrainingState.IDLE if unit is None or unit.is_sharded else TrainingState.FORWARD


    def _known(self) -> Unit | None:
        return None if self._unit is None else self._unit()


_VIEWS: weakref.WeakKeyDictionary[Unit, StateView] = weakref.WeakKeyDictionary()


def show_state(unit: Unit, modules: Iterable[nn.Module] = ()) -> StateView:
    """Return the view of a unit, and let PyTorch's table have it for these modules."""
    view = _VIEWS.setdefault(unit, StateView(unit))
    for module in modules:
        # Values are weak references; the table holds no model alive.
        _module_state_mapping[module] = weakref.ref(view)  # type: ignore[assignment]
    return view


@contextmanager
def state_to_come(modules: Sequence[nn.Module], *, is_released: bool) -> Iterator[None]:
    """Answer hooks that are asked while a unit of these modules is being made.

    Args:
        is_released: whether the unit's weights will be released after forward.
    """
    view = StateView(None, is_released=is_released)
    for module in modules:
        module._get_fsdp_state = lambda: view  # type: ignore[assignment]
        _module_state_mapping[module] = weakref.ref(view)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in modules:
            del module._get_fsdp_state
            del _module_state_mapping[module]
