"""What drives the units of one root, as its units, their buffers and the rooms above see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import nn

__all__ = ["Backwards", "Forwards", "InnerOutputs", "Observer"]


class InnerOutputs(Protocol):
    """Watches what modules inside of a unit return: ``guards/inner_outputs.py``."""

    def arm(self) -> bool:
        """Hook the modules, if they are not; tell whether there are any."""

    def disarm(self) -> bool:
        """Unhook the modules, if it was seen that this may be done; tell whether they are not hooked now."""

    def attributed(self, module: nn.Module) -> list[nn.Module]:
        """Return a module of the unit, and those in it, not PyTorch's own, that have weights and may keep tensors."""


class Forwards(Protocol):
    """Gathers and releases units, and follows forward passes: ``schedule.py``. Units are ``Unit``s.

    Attributes:
        step_event: recorded after an optimizer step, awaited by the next forward; None for none.
        root_ref: the outermost unit, weakly. pools: of memory slots (``memory_slots.py``). guards: ``Guards``.
    """

    step_event: Any
    root_ref: weakref.ref[Any]
    pools: Any
    guards: Any

    def units(self) -> list[Any]:
        """Return the units served, in the order in which the root's modules are registered."""

    def reshards_after_forward(self, unit: Any) -> bool:
        """Whether a unit gives its gathered weights back between forward and backward."""

    def settle_replaced_params(self, unit: Any) -> None:
        """Let sharded parameters that were assigned take their places for good, and refuse whatever else is there."""

    def start_gather(self, unit: Any, *, check: bool) -> None:
        """Issue the gather of a unit's weights, unless they are there or on their way."""

    def finish_gather(self, unit: Any) -> None:
        """Make compute wait for a gather that was started, and show the weights."""

    def reshard(self, unit: Any, *, keep_part: bool = False) -> None:
        """Release a unit's gathered weights."""

    def before_forward(self, unit: Any, module: nn.Module, given: Any) -> None:
        """Gather the unit for its forward, and start the gather of the unit that followed it last time."""

    def after_forward(self, unit: Any, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Watch what forward left behind for backward, and reshard."""

    def watch(self, unit: Any, output: Any) -> None:
        """Gather the unit before backward goes through ``output``, which a module inside of it has just made."""


class Backwards(Protocol):
    """Takes backwards through the units: ``backward.py``. Units are ``Unit``s, calls ``Call``s.

    Attributes:
        is_last: whether the next backward ends an optimizer step's gradient accumulation.
        number: how many backwards there were so far. is_under_way: whether the last one of them has not ended.
        max_packed_buffers: how many units' packed gradients may live at once.
        is_manual: whether a backward leaves it to a ``finish`` outside of it to complete the gradients.
        is_unfinished: whether that is still to come. awaited: refuses what may not come before; None for nothing.
    """

    is_last: bool
    number: int
    is_under_way: bool
    max_packed_buffers: int
    is_manual: bool
    is_unfinished: bool
    awaited: Callable[[str], NoReturn] | None

    def begin_gradients(self, unit: Any, *, packs: bool, has_come: bool) -> None:
        """Take notice that gradients of a unit begin to come, or that zeros are about to stand for them."""

    def before_backward(self, call: Any) -> None:
        """Gather the unit of a call again for its backward."""

    def before_reading(self, unit: Any, call: Any) -> None:
        """Gather a unit again, if need be, for the backward of an operator that reads its weights."""

    def after_call(self, call: Any) -> None:
        """Leave what a call made, as backward has reached what the call was given."""

    def recover(self) -> None:
        """Forget a backward that raised."""

    def reset(self) -> None:
        """Forget a forward or backward that raised, and the gradients that are incomplete or not finished."""

    def share_reductions(self, other: Any) -> None:
        """Count packed gradient buffers together with another root's."""

    def start_reductions(self) -> None:
        """Issue, outside of a backward, the reductions that ``finish`` completes."""

    def finish(self) -> None:
        """Complete the reductions and hand the gradients to the parameters."""


class Observer(Protocol):
    """The unit that a buffer belongs to."""

    @property
    def backward(self) -> Backwards:
        """What takes backwards through it."""

    def count_gradients(self) -> None:
        """Take notice of parameters of a buffer that were frozen."""
