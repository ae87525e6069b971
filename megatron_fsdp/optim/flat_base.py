"""What AdamW and Muon over flat memory have in common: gradients, clipping, whether to step, loading and pickling."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.optim import Optimizer

from megatron_fsdp.optim.adamw_state import FlatGradient, GroupGradients
from megatron_fsdp.optim.adamw_update import PlainParameter
from megatron_fsdp.optim.global_norm import global_norm
from megatron_fsdp.optim.grad_norm import clip_factor
from megatron_fsdp.optim.loaded_state import hide_state, lay_out_loaded_state, reveal_state
from megatron_fsdp.optim.nonfinite import Reading, check_policy, may_step
from megatron_fsdp.runtime.freshness import refreshes_itself

__all__ = ["FlatBase", "Gradients", "Home", "loss_of"]

AnyGroup = TypeVar("AnyGroup", bound=GroupGradients)


@dataclass(frozen=True, slots=True)
class Home:
    """Where the parameters of an optimizer live.

    Attributes:
        parameters, flags: what was bound, in order, and what of the param groups decided how.
    """

    parameters: tuple[torch.Tensor, ...]
    flags: tuple[Any, ...]

    def fits(self, parameters: Sequence[torch.Tensor], flags: tuple[Any, ...]) -> bool:
        """Whether these are the same parameters, to be stepped in the same way."""
        if self.flags != flags or len(self.parameters) != len(parameters):
            return False
        return all(map(operator.is_, self.parameters, parameters))


class Gradients(Generic[AnyGroup]):
    """What one step reads: the owners of gradients, each with its part on this rank, 1-D.

    Args:
        groups: sharded ones. plain: all other parameters.
    """

    def __init__(self, groups: Sequence[AnyGroup], plain: Sequence[PlainParameter]) -> None:
        self._owners = groups, plain
        self.groups: list[tuple[AnyGroup, FlatGradient]] = [
            (group, found) for group in groups if (found := group.gradient()) is not None
        ]
        self.plain = [(each, rows) for each in plain if (rows := each.gradient()) is not None]

    def flat(self) -> Iterator[tuple[GroupGradients | PlainParameter, torch.Tensor]]:
        """Yield all of them."""
        yield from ((group, found.flat) for group, found in self.groups)
        yield from self.plain

    def readings(self) -> list[Reading]:
        """Return the gradient of every parameter of the optimizer, by name."""
        groups, plain = self._owners
        found = [reading for group in groups for reading in group.readings()]
        for number, each in enumerate(plain):
            found.append(Reading(f"plain parameter {number}", each.gradient(), (), each.parameter.device))
        return found


class FlatBase(Optimizer):
    """An optimizer that clips within its step, skips or refuses steps without a norm, and keeps state in flat memory.

    Attributes:
        max_norm, nonfinite, moments_dtype: see ``AdamW``. num_skipped: steps that were not taken.
        grad_norm: of the last step, before clipping; None where none was measured.
    """

    steps_split_weights = True
    grad_norm: torch.Tensor | None = None
    # What is pickled beside param groups and state.
    _kept: ClassVar[tuple[str, ...]] = ("moments_dtype", "max_norm", "nonfinite", "num_skipped")
    # State that is loaded in the dtypes that it has here, and in its own.
    _wide_keys: ClassVar[tuple[str, ...]] = ()
    _exact_keys: ClassVar[tuple[str, ...]] = ()

    def _set_up(self, max_norm: float | None, nonfinite: str, moments_dtype: torch.dtype | None) -> None:
        check_policy(type(self).__name__, nonfinite)
        self.max_norm = max_norm
        self.nonfinite = nonfinite
        self.moments_dtype = moments_dtype
        self.num_skipped = 0

    def _clip_factor(self, gradients: Gradients[Any], max_norm: float | None) -> torch.Tensor | None:
        """Measure the norm where anybody wants it, and return what gradients are multiplied by; None for one."""
        max_norm = self.max_norm if max_norm is None else max_norm
        if max_norm is None and self.nonfinite == "ignore":
            return None
        self.grad_norm = global_norm(gradients.flat())
        return None if max_norm is None else clip_factor(self.grad_norm, max_norm)

    def _may_step(self, gradients: Gradients[Any]) -> bool:
        if self.nonfinite == "ignore":
            return True
        assert self.grad_norm is not None
        is_finite = may_step(self.grad_norm, self.nonfinite, gradients.readings)
        self.num_skipped += not is_finite
        return is_finite

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state in the dtypes that it has here, in the parameters' rows; all ranks call it."""
        # After the user's hooks, which may replace the state, and before torch casts it to the parameters' dtypes.
        hide = functools.partial(hide_state, keys=self._wide_keys, as_they_are=self._exact_keys)
        handle = self.register_load_state_dict_pre_hook(hide)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        lay_out_loaded_state(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict comes here too, and must not drop the flat buffers.
        reveal_state(state)
        super().__setstate__(state)
        self._step_supports_amp_scaling = False
        refreshes_itself(self)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what a step's closure returns, with gradients enabled; None for none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
