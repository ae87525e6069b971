"""What FSDP2's private state looks like from outside, for tensor subclasses that read it in their all-gather hooks.

TransformerEngine's MXFP8 weights ask for the state of the module that they are in, by ``_get_fsdp_state()`` of the
module or, for one inside of a unit, by PyTorch's table of module states; then for ``_fsdp_param_group``, and of that
for ``_reshard_after_forward`` and ``_training_state``, to know which of their two grids to send.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from megatron_fsdp.runtime.step.unit import Unit, WeightState

__all__ = ["show_state", "state_to_come"]


class _ParamGroupNames:
    """FSDP2's private names of a state's parameter group.

    Args:
        unit: None for one that is being made. is_released: whether its weights will be released after forward.
    """

    def __init__(self, unit: Unit | None, *, is_released: bool = True) -> None:
        self._unit = None if unit is None else unit.reference
        self._is_released = is_released
        self._fsdp_param_group = self

    @property
    def _reshard_after_forward(self) -> bool:
        unit = None if self._unit is None else self._unit()
        return self._is_released if unit is None else unit.schedule.reshards_after_forward(unit)

    @property
    def _training_state(self) -> TrainingState:
        unit = None if self._unit is None else self._unit()
        if unit is not None and torch._C._current_graph_task_id() != -1:
            return TrainingState.PRE_BACKWARD
        is_idle = unit is None or unit.weight_state is WeightState.SHARDED
        return TrainingState.IDLE if is_idle else TrainingState.FORWARD


def show_state(unit: Unit, modules: Iterable[nn.Module], *, in_table: bool) -> None:
    """Give a unit FSDP2's private names, and let PyTorch's table of states, which holds nothing alive, have it, too."""
    unit._fsdp_param_group = _ParamGroupNames(unit) if unit.groups else None
    for module in modules if in_table else ():
        _module_state_mapping[module] = weakref.ref(unit)  # type: ignore[arg-type]


@contextmanager
def state_to_come(modules: Sequence[nn.Module], *, is_released: bool) -> Iterator[None]:
    """Answer hooks that are asked while a unit of these modules is being made.

    Args:
        is_released: whether the unit's weights will be released after forward.
    """
    state = _ParamGroupNames(None, is_released=is_released)
    for module in modules:
        # Past nn.Module's own setter: it is no part of the module.
        module.__dict__["_get_fsdp_state"] = lambda: state
        _module_state_mapping[module] = weakref.ref(state)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["_get_fsdp_state"]
            del _module_state_mapping[module]
