"""AdamW over flat buffers: one launch per parameter group, with the state and state dicts of ``torch.optim.AdamW``."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_fsdp.engine.optimizer_steps import skip_announcing
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.adamw.flat_base import Binding, FlatBase, Found
from megatron_fsdp.optim.adamw.flat_state import KEYS, Moments, adopt_together, state_values
from megatron_fsdp.optim.adamw.int8_moments import CODED_KEYS, Int8State, decoded_state
from megatron_fsdp.optim.adamw.param_memory import ABSENT, find_owned
from megatron_fsdp.optim.adamw.update import Rows
from megatron_fsdp.optim.loaded_state import parameters_by_index, parameters_of, state_dtype

__all__ = ["AdamW"]


class AdamW(FlatBase, torch.optim.AdamW):
    """``torch.optim.AdamW`` that steps each parameter group of a sharded model in one pass over its flat buffers.

    The formula, the arguments, the param groups and the state dicts are those of ``torch.optim.AdamW``. Either class
    loads the state dict of the other. One kernel reads a group's gradients in the dtype in which they are accumulated,
    updates main weights and moments, and writes the compute weights. It computes in FP32 and rounds once per tensor.
    ``state`` shows the moments of each parameter as DTensors over the flat moments. A parameter that is not sharded
    takes one launch of the same kernel. ``fully_shard_optimizer`` is not needed.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``; all may differ between param
            groups, and change between steps.
        amsgrad: only False.
        foreach, fused: accepted and kept in the param groups; there is one implementation.
        capturable: keep step counters on the device of the weights and decide nothing on the host, so that a CUDA
            graph can capture a step. Each parameter then has its own row of hyperparameters.
        differentiable: only False.
        moments_dtype: dtype of both moments. None: the dtype of each main weight, or FP32 for split weights. bf16
            halves their memory and rounds them to nearest.
        moments: "int8" keeps them as 8-bit codes of dynamic maps, with a scale for each 256 elements of a flattened
            parameter: 2.03 bytes per parameter for both. Parameters of less than 4096 elements keep FP32 ones. State,
            weights and losses are the same for any sharding (docs/low_precision.md); ``fully_shard`` is to be given
            ``MixedPrecisionPolicy(moments="int8")``.
        max_norm: clip gradients to this global norm, unless ``step`` gets another one; None does not clip.
        nonfinite: what a step does if the gradient norm is NaN or infinite. "skip": it changes nothing on any rank,
            logs a warning that names the first such parameter, and adds to ``num_skipped``. "raise": it raises
            ``NonfiniteGradientError``. Both read the norm on the host in every step. "ignore": it does not check,
            and takes the step with unclipped gradients.
    Raises:
        ConfigError: another value of ``nonfinite``, ``amsgrad`` or ``differentiable``; a dtype that is not a
            floating-point one; or both ``moments`` and ``moments_dtype``.

    Example:
        optimizer = AdamW(model.parameters(), lr=3e-4, max_norm=1.0, nonfinite="skip")
        model(batch).square().mean().backward()
        optimizer.step()
    """

    _kept = (*FlatBase._kept, "moments")
    _entries: tuple[dict[str, Any], ...] = ()

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moments_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        nonfinite: str = "ignore",
        moments: str | None = None,
    ) -> None:
        self._set_up(max_norm, nonfinite, moments_dtype)
        _check_moments(moments, moments_dtype)
        if moments_dtype is not None and not moments_dtype.is_floating_point:
            raise ConfigError(f"AdamW(moments_dtype={moments_dtype}). fix: give a floating-point dtype or None")
        self.moments = moments
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        # The base class claims for fused=True that step() unscales gradients itself; GradScaler does it here.
        self._step_supports_amp_scaling = False
        skip_announcing(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group with its own hyperparameters, as in ``torch.optim``.

        Raises:
            ConfigError: the group asks for ``amsgrad`` or ``differentiable``, or for decay that is not decoupled.
        """
        _refuse_options([{**self.defaults, **param_group}])
        super().add_param_group(param_group)

    def _update(self, binding: Binding, found: Found, factor: torch.Tensor | None) -> None:
        rows, known = Rows(self.param_groups), self._entries
        is_known = len(known) == len(self.state) and all(map(operator.is_, known, self.state.values()))
        changed = [(state, gradient.present) for state, gradient in found if not (is_known and state.is_shown())]
        if changed:
            adopt_together(changed, self.state)
        for update in [update for state, gradient in found for update in state.updates(gradient, rows)]:
            update.run(rows, factor)
        self._entries = tuple(self.state.values())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of ``torch.optim.AdamW`` over the same parameters, sharded or whole.

        Every rank calls it: state that PyTorch cut in other places is brought into the parameters' rows.

        Raises:
            ConfigError: it was saved with ``amsgrad``, or by another kind of optimizer.
        """
        # torch.optim.AdamW takes no notice of how torch.optim.Adam decayed.
        _refuse_options([{**group, "decoupled_weight_decay": True} for group in state_dict["param_groups"]])
        for key, values in state_dict["state"].items():
            if CODED_KEYS[0] not in values:
                state_values(values, f"parameter {key!r} in the state dict")
        super().load_state_dict(state_dict)

    def _mend_loaded(self) -> None:
        for parameter in parameters_of(self) if self.moments != "int8" else ():
            if CODED_KEYS[0] in self.state.get(parameter, ()):
                found = self.state[parameter]
                self.state[parameter] = decoded_state(parameter, found, state_dtype(self, parameter))

    def dequantized_state_dict(self) -> dict[str, Any]:
        """Return the state dict with FP32 moments of the parameters' shapes in place of codes, as
        ``torch.optim.AdamW`` has them. Every rank calls it; it takes 8 bytes for each element of this rank's part.

        With ``moments="int8"``, ``state_dict()`` itself has ``exp_avg_codes``, ``exp_avg_scales``, ``exp_avg_sq_codes``
        and ``exp_avg_sq_scales``, without a loss.
        """
        document = self.state_dict()
        named, state = parameters_by_index(self, document), document["state"]
        decoded = {index: decoded_state(named[index], state[index], torch.float32) for index in state}
        return {**document, "state": decoded}

    def fresh_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of the zeros that a new optimizer's ``state_dict()`` shows (``show_fresh_state``).

        None for codes, because zeros for full moments would take more memory than the codes.
        """
        return KEYS if self.moments is None else ()

    def _flags_of(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return (bool(group["capturable"]), *(group.get(name, supported) for name, supported in _FIXED.items()))

    def _bind(self, parameters: tuple[torch.Tensor, ...], flags: tuple[Any, ...]) -> Binding:
        # Options may be set in the groups at any time.
        _refuse_options(self.param_groups)
        # The values of an older state that does not fit are taken over from the dictionaries that show them.
        known = {} if self._binding is None else {id(state.memory.owner): state for state in self._binding.states}
        states = []
        for owned in find_owned(self.param_groups):
            memory, members = owned.memory, owned.members
            is_capturable = any(self.param_groups[member]["capturable"] for member in members if member != ABSENT)
            state = known.get(id(memory.owner))
            if state is None or (state.members, state.is_capturable) != (members, is_capturable):
                if self.moments == "int8":
                    state = Int8State(memory, members, is_capturable=is_capturable)
                else:
                    state = Moments(memory, members, self.moments_dtype, is_capturable=is_capturable)
            states.append(state)
        return Binding(parameters, flags, tuple(states))


def _check_moments(moments: str | None, dtype: torch.dtype | None) -> None:
    if moments not in (None, "int8"):
        raise ConfigError(f"AdamW(moments={moments!r}) is unknown. fix: give 'int8', or None for floating-point ones")
    if moments is not None and dtype is not None:
        raise ConfigError(
            f"AdamW(moments={moments!r}, moments_dtype={dtype}) are two dtypes of one thing. fix: give one of them"
        )


_FIXED = {"amsgrad": False, "differentiable": False, "decoupled_weight_decay": True}
"""Options of ``torch.optim.AdamW``'s param groups that have one value here."""


def _refuse_options(param_groups: Iterable[dict[str, Any]]) -> None:
    for (name, supported), group in itertools.product(_FIXED.items(), param_groups):
        found = group.get(name, supported)
        if bool(found) is not supported:
            raise ConfigError(
                f"AdamW({name}={found}) is not supported: found it in the options of a param group. fix: use "
                f"torch.optim.AdamW with fully_shard_optimizer, or leave {name} {supported}."
            )
