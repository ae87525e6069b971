"""The common base of AdamW and Muon over flat memory: gradients, clipping, NaN checks, loading and pickling."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from megatron_fsdp.engine.optimizer_steps import skip_announcing
from megatron_fsdp.engine.param_group import ParameterGroup, announce_step
from megatron_fsdp.optim.adamw.flat_state import FlatState, adopt_together
from megatron_fsdp.optim.adamw.param_memory import ABSENT, FlatGradient, PlainMemory
from megatron_fsdp.optim.grad_norm import agreed_norm, are_beside_plain, by_axes, clip_factor, total_norm
from megatron_fsdp.optim.loaded_state import lay_out_loaded_state, parameters_of
from megatron_fsdp.optim.local_parts import axes_of, local_of
from megatron_fsdp.optim.nonfinite import Reading, check_policy, may_step

__all__ = ["Binding", "FlatBase", "Found"]

Found = Sequence[tuple[Any, FlatGradient]]
"""The states that have gradients in a step, each with its own."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The flat memory of an optimizer's parameters.

    Attributes:
        parameters, flags: the parameters in order, and the entries of param groups that decided the layout.
        states: of sharded groups, then of other parameters.
    """

    parameters: tuple[torch.Tensor, ...]
    flags: tuple[Any, ...]
    states: tuple[FlatState, ...]

    def fits(self, parameters: Sequence[torch.Tensor], flags: tuple[Any, ...]) -> bool:
        """Return whether parameters and flags are the same as when the memory was bound."""
        if self.flags != flags or len(self.parameters) != len(parameters):
            return False
        return all(map(operator.is_, self.parameters, parameters))

    def readings(self) -> list[Reading]:
        """Return this rank's gradient of every parameter of the optimizer, by name."""
        groups, found = self.groups(), []
        for state in self.states:
            memory = state.memory
            axes, device = memory.axes, memory.compute_device
            if isinstance(memory, PlainMemory) and groups:
                # Its gradients may differ between ranks.
                axes, device = axes_of(groups), groups[0].spec.compute_device
            for param, name, member in zip(memory.params, memory.names, state.members, strict=True):
                if member != ABSENT:
                    found.append(Reading(name, local_of(param.grad), axes, device))
        return found

    def groups(self) -> list[ParameterGroup]:
        """Return the parameter groups whose model lives."""
        owners = [state.memory.owner for state in self.states]
        return [owner for owner in owners if isinstance(owner, ParameterGroup)]

    def is_beside_plain(self) -> bool:
        """Return whether the optimizer or the model has parameters that are not sharded."""
        return any(isinstance(state.memory, PlainMemory) for state in self.states) or are_beside_plain(self.groups())


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A tensor of a state dict, hidden from ``torch.optim`` so that it is not cast."""

    tensor: torch.Tensor


class FlatBase(Optimizer):
    """An optimizer with state in flat memory, whose step clips gradients and handles NaN and infinite norms.

    Attributes:
        max_norm, nonfinite, moments_dtype: see ``AdamW``. num_skipped: steps that were not taken.
        grad_norm: the norm of the last step's gradients, before clipping; None if it was not measured.
    """

    steps_split_weights = True
    grad_norm: torch.Tensor | None = None
    _binding: Any = None
    _is_beside_plain = False
    # Attributes that are pickled in addition to param groups and state.
    _kept: ClassVar[tuple[str, ...]] = ("moments_dtype", "max_norm", "nonfinite", "num_skipped")

    def _set_up(self, max_norm: float | None, nonfinite: str, moments_dtype: torch.dtype | None) -> None:
        check_policy(type(self).__name__, nonfinite)
        self.max_norm = max_norm
        self.nonfinite = nonfinite
        self.moments_dtype = moments_dtype
        self.num_skipped = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None) -> Any:
        """Take one step. Parameters whose ``.grad`` is None do not change.

        With ``max_norm`` one pass over the gradients measures their global norm, and the update applies the factor.
        ``.grad`` keeps its values. All ranks must call ``step`` then, because the norm is reduced. They always must
        for Muon. Afterwards ``grad_norm`` is the norm before clipping, a 0-d FP32 tensor that is equal on all ranks.

        Args:
            closure: computes and returns the loss, with gradients enabled.
            max_norm: as in ``clip_grad_norm_``; ``float("inf")`` only measures. None: the constructor's value.
        Returns:
            The closure's result, or None without a closure.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        binding, max_norm, factor = self._bound(), self.max_norm if max_norm is None else max_norm, None
        pairs = [(state, state.memory.gradient(state.members)) for state in binding.states]
        found = [(state, gradient) for state, gradient in pairs if gradient is not None]
        if max_norm is not None or self.nonfinite != "ignore":
            devices = [state.memory.compute_device for state, _ in found] or [torch.device("cpu")]
            spread = by_axes((state.memory.axes, gradient.flat) for state, gradient in found)
            is_invariant = any(state.memory.is_invariant for state, _ in found)
            self.grad_norm = total_norm(spread, 2.0, devices[0], is_invariant=is_invariant).float()
            if self._is_beside_plain:
                self.grad_norm = agreed_norm(self.grad_norm, binding.groups())
            factor = None if max_norm is None else clip_factor(self.grad_norm, max_norm)
        if self.nonfinite != "ignore":
            assert self.grad_norm is not None
            if not may_step(self.grad_norm, self.nonfinite, binding.readings):
                self.num_skipped += 1
                return loss
        announce_step(binding.groups())
        self._update(binding, found, factor)
        for state, _ in found:
            state.memory.settle()
        return loss

    def _update(self, binding: Any, found: Found, factor: torch.Tensor | None) -> None:
        """Change weights and state by these gradients times ``factor``."""
        raise NotImplementedError

    def _flags_of(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """Return what of a param group decides the binding."""
        raise NotImplementedError

    def _bind(self, parameters: tuple[torch.Tensor, ...], flags: tuple[Any, ...]) -> Any:
        """Return where these parameters live, and how they are stepped."""
        raise NotImplementedError

    def _bound(self) -> Any:
        """Return where the parameters live, found anew when param groups have changed."""
        parameters = tuple(parameters_of(self))
        flags = tuple((len(group["params"]), *self._flags_of(group)) for group in self.param_groups)
        if self._binding is None or not self._binding.fits(parameters, flags):
            self._binding = self._bind(parameters, flags)
            self._is_beside_plain = self._binding.is_beside_plain()
        return self._binding

    def forget_memory(self) -> None:
        """Look for parameters and their state anew in the next step: they lie elsewhere now."""
        self._binding = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state in the dtypes that it has here, in the parameters' rows; all ranks call it."""
        # After the user's hooks, which may replace the state, and before torch casts it to the parameters' dtypes.
        handle = self.register_load_state_dict_pre_hook(lambda _, document: self._before_loading(document))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        lay_out_loaded_state(self)
        self._mend_loaded()
        adopt_together([(state, state.held(self.state)) for state in self._bound().states], self.state)

    def _before_loading(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hide tensors from ``torch.optim``: the parameters' dtypes, to which it casts, may be narrower than the state.

        A DTensor that it casts may forget its rows, too (docs/design/facade.md, "Limits").
        """
        state = {
            index: {key: _Hidden(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
            for index, values in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def _mend_loaded(self) -> None:
        """Convert loaded state to the form that this class steps."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict comes here too, and must not drop the flat memory.
        for values in state.get("state", {}).values():
            values.update({key: value.tensor for key, value in values.items() if isinstance(value, _Hidden)})
        super().__setstate__(state)
        self._step_supports_amp_scaling = False
        skip_announcing(self)
