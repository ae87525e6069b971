"""What AdamW and Muon over flat memory have in common: gradients, clipping, whether to step, loading and pickling."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from dbuffer.collectives import all_reduce
from dbuffer.mesh import MeshAxis
from dbuffer_kernels import sum_of_squares
from megatron_fsdp.optim.adamw_state import ABSENT, FlatGradient, GroupState, adopt_together
from megatron_fsdp.optim.adamw_update import PlainParameter
from megatron_fsdp.optim.exact_norm import exact_norm
from megatron_fsdp.optim.grad_norm import by_axes, clip_factor
from megatron_fsdp.optim.loaded_state import hide_state, lay_out_loaded_state, parameters_of, reveal_state
from megatron_fsdp.optim.nonfinite import Reading, check_policy, may_step
from megatron_fsdp.runtime.step.freshness import refreshes_itself
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, group_of_parameter
from megatron_fsdp.runtime.weights.resting_copy import announce_step

__all__ = ["Binding", "FlatBase", "Gradients", "Owned", "owned_groups"]


@dataclass(frozen=True, slots=True)
class Binding:
    """Where the parameters of an optimizer live.

    Attributes:
        parameters, flags: what was bound, in order, and what of the param groups decided how.
        states: of sharded groups. plain: all other parameters.
    """

    parameters: tuple[torch.Tensor, ...]
    flags: tuple[Any, ...]
    states: tuple[GroupState, ...]
    plain: tuple[PlainParameter, ...]

    def fits(self, parameters: Sequence[torch.Tensor], flags: tuple[Any, ...]) -> bool:
        """Whether these are the same parameters, to be stepped in the same way."""
        if self.flags != flags or len(self.parameters) != len(parameters):
            return False
        return all(map(operator.is_, self.parameters, parameters))


class Gradients:
    """What one step reads: the owners of gradients, each with its part on this rank, 1-D."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self.groups: list[tuple[Any, FlatGradient]] = [
            (state, found) for state in binding.states if (found := state.gradient()) is not None
        ]
        self.plain = [(each, rows) for each in binding.plain if (rows := each.gradient()) is not None]

    def norm(self) -> torch.Tensor:
        """Return the norm of all of them over all ranks: 0-d fp32, on the device of the first.

        Every rank calls it with gradients of the same groups. One pass over each gradient, and one all-reduce of a
        scalar for each set of axes over which gradients are spread; those of plain parameters count as they are on this
        rank. With ``MixedPrecisionPolicy(reduction="invariant")`` it is the exact norm.
        """
        pairs: list[tuple[Iterable[MeshAxis], tuple[torch.device, torch.Tensor]]] = []
        pairs += [(group.axes, (group.device, found.flat)) for group, found in self.groups]
        pairs += [((), (rows.device, rows)) for _, rows in self.plain]
        spread = by_axes(pairs)
        if any(group.is_invariant for group, _ in self.groups):
            device = self.groups[0][0].device
            return exact_norm([(axes, [rows for _, rows in same]) for axes, same in spread], 2.0, device)
        totals: list[torch.Tensor] = []
        for axes, same in spread:
            totals.append(_sum_on(same[0][0], [sum_of_squares(rows)[0] for _, rows in same]))
            for axis in axes:
                all_reduce(totals[-1], axis, "sum")
        return _sum_on(totals[0].device, totals).sqrt().float() if totals else torch.zeros(())

    def readings(self) -> list[Reading]:
        """Return the gradient of every parameter of the optimizer, by name."""
        found = [reading for group in self._binding.states for reading in group.readings()]
        for number, each in enumerate(self._binding.plain):
            found.append(Reading(f"plain parameter {number}", each.gradient(), (), each.parameter.device))
        return found


@dataclass(frozen=True, slots=True)
class Owned:
    """A sharded group of which an optimizer has parameters.

    Attributes:
        members: for each parameter in plan order, the number of its param group. positions: its own, in the optimizer.
            ``ABSENT`` for one that the optimizer has not.
    """

    group: ParameterGroup
    members: tuple[int, ...]
    positions: tuple[int, ...]


def owned_groups(param_groups: Sequence[dict[str, Any]]) -> list[Owned]:
    """Return the sharded groups of an optimizer's parameters."""
    places: dict[int, tuple[int, int]] = {}
    owners: dict[int, ParameterGroup] = {}
    for number, group in enumerate(param_groups):
        for parameter in group["params"]:
            places[id(parameter)] = number, len(places)
            owner = group_of_parameter(parameter)
            if owner is not None:
                owners[id(owner)] = owner
    found = []
    for owner in owners.values():
        pairs = [places.get(id(param), (ABSENT, ABSENT)) for param in owner.parameters.values()]
        found.append(Owned(owner, tuple(member for member, _ in pairs), tuple(position for _, position in pairs)))
    return found


class FlatBase(Optimizer):
    """An optimizer that clips within its step, skips or refuses steps without a norm, and keeps state in flat memory.

    Attributes:
        max_norm, nonfinite, moments_dtype: see ``AdamW``. num_skipped: steps that were not taken.
        grad_norm: of the last step, before clipping; None where none was measured.
    """

    steps_split_weights = True
    grad_norm: torch.Tensor | None = None
    _binding: Any = None
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None) -> Any:
        """Take one step; parameters whose ``.grad`` is None are left alone.

        With a maximal norm the gradients' global norm is measured in one pass over them and the factor applied inside
        the update: ``.grad`` keeps its values, and no further pass is made. Every rank calls it then, as the norm is
        reduced, and always where matrices are stepped. ``grad_norm`` is the norm before clipping afterwards, a 0-d fp32
        tensor, equal on all ranks.

        Args:
            closure: computes and returns the loss, with gradients enabled.
            max_norm: as in ``clip_grad_norm_``; ``float("inf")`` only measures. None: the constructor's.
        Returns:
            What the closure returned, else None.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        binding, max_norm = self._bound(), self.max_norm if max_norm is None else max_norm
        gradients, factor = Gradients(binding), None
        if max_norm is not None or self.nonfinite != "ignore":
            self.grad_norm = gradients.norm()
            factor = None if max_norm is None else clip_factor(self.grad_norm, max_norm)
        if self.nonfinite != "ignore":
            assert self.grad_norm is not None
            if not may_step(self.grad_norm, self.nonfinite, gradients.readings):
                self.num_skipped += 1
                return loss
        announce_step([state.group for state in binding.states if state.group is not None])
        self._update(binding, gradients, factor)
        for state, _ in gradients.groups:
            state.settle()
        return loss

    def _update(self, binding: Any, gradients: Gradients, factor: torch.Tensor | None) -> None:
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
        return self._binding

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
        return hide_state(self, state_dict, keys=self._wide_keys, as_they_are=self._exact_keys)

    def _mend_loaded(self) -> None:
        """Make loaded state what this class steps with."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict comes here too, and must not drop the flat buffers.
        reveal_state(state)
        super().__setstate__(state)
        self._step_supports_amp_scaling = False
        refreshes_itself(self)


def _sum_on(device: torch.device, parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of 0-d tensors, of which one per device is copied: a copy from the GPU makes the host wait."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    return torch.stack([torch.stack(same).sum().to(device) for same in by_device.values()]).sum()
