"""The state that an optimizer has before its first step, shown so that a checkpoint can be read into it.

``torch.optim`` makes state in the first step: the ``state_dict()`` of a new optimizer is empty, and
``torch.distributed.checkpoint.load`` fills what is there and nothing else. Megatron-FSDP steps once beforehand, which
counts a step. Here the missing state is shown as zeros, which live in the returned dictionary alone: the optimizer gets
them when they were read into, and stays new when they were not (docs/design/checkpoint.md).
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.optim.flat_state import local_of
from megatron_fsdp.optim.loaded_state import parameters_by_index, state_dtype

__all__ = ["show_fresh_state", "without_fresh_state"]

_log = logging.getLogger(__name__)
_State = dict[str, Any]
# Sizes of the twin's dimensions: state that is not of its parameter's shape cannot pass for it.
_SIZES = (2, 3, 5, 7, 11, 13)


def show_fresh_state(optimizer: Optimizer) -> None:
    """Let ``state_dict()`` show zeros for parameters without state, where stepping from them is as stepping anew."""
    shown = _Shown()
    optimizer.register_state_dict_post_hook(shown.add)
    optimizer.register_load_state_dict_pre_hook(shown.take_away, prepend=True)


def without_fresh_state(optimizer: Optimizer, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of the optimizer with the state that it has, and nothing that is only shown."""
    named = parameters_by_index(optimizer, document)
    shown = {index for index, parameter in named.items() if not optimizer.state.get(parameter)}
    return {**document, "state": {key: values for key, values in document["state"].items() if key not in shown}}


class _Shown:
    """What an optimizer's last state dict showed beyond the state that there is."""

    def __init__(self) -> None:
        # By index and key: the tensor, and the version that it had.
        self._tensors: dict[Any, dict[str, tuple[weakref.ref[torch.Tensor], int]]] = {}
        self._empty: Any = None

    def add(self, optimizer: Optimizer, document: dict[str, Any]) -> dict[str, Any]:
        self._tensors, self._empty = {}, None
        if getattr(optimizer, "moments", None) is not None:
            # Zeros of whole moments would take more memory than the codes that training keeps.
            return document
        missing = [
            (index, p)
            for index, p in parameters_by_index(optimizer, document).items()
            if p.requires_grad and not optimizer.state.get(p)
        ]
        if not missing:
            return document
        patterns: dict[Any, _State | None] = {}
        state = dict(document["state"])
        for index, parameter in missing:
            group = next(group for group in document["param_groups"] if index in group["params"])
            key = (id(group), parameter.ndim, state_dtype(optimizer, parameter))
            if key not in patterns:
                patterns[key] = _pattern(optimizer, group, parameter.ndim, state_dtype(optimizer, parameter))
            pattern = patterns[key]
            if pattern:
                state[index] = self._like(pattern, optimizer, index, parameter)
        self._empty = None if state else state
        return {**document, "state": state}

    def _like(self, pattern: _State, optimizer: Optimizer, index: Any, parameter: torch.Tensor) -> _State:
        made: _State = {}
        chosen = getattr(optimizer, "moments_dtype", None)
        for key, value in pattern.items():
            if isinstance(value, torch.Tensor):
                dtype = chosen if chosen is not None and value.ndim else value.dtype
                value = torch.zeros_like(parameter.detach(), dtype=dtype) if value.ndim else torch.zeros_like(value)
                self._tensors.setdefault(index, {})[key] = weakref.ref(value), local_of(value)._version
            made[key] = value
        return made

    def take_away(self, optimizer: Optimizer, document: dict[str, Any]) -> dict[str, Any]:
        state = document["state"]
        if self._empty is not None and state is self._empty:
            _log.warning(
                "%s: the state dict of an optimizer that has not stepped came back, with no state in it. If a "
                "checkpoint was to be read into it, none was: use megatron_fsdp.load_checkpoint, or step once before",
                type(optimizer).__name__,
            )
        was_read = {index: self._was_read(optimizer, index, state.get(index) or {}) for index in self._tensors}
        # Of a parameter of which this rank holds nothing, nothing is read here; the others tell.
        default = any(was_read.values())
        kept = {
            index: values
            for index, values in state.items()
            if was_read.get(index, True) or (was_read[index] is None and default)
        }
        return {**document, "state": kept}

    def _was_read(self, optimizer: Optimizer, index: Any, values: Mapping[str, Any]) -> bool | None:
        """Whether something was read into what was shown of a parameter; None where that cannot be told."""
        found = {key: pair for key, pair in self._tensors[index].items() if pair[0]() is values.get(key) is not None}
        if not found:
            # Another state dict than the one that was shown.
            return True
        written = {
            key: local_of(values[key])._version != pair[1]
            for key, pair in found.items()
            if local_of(values[key]).numel()
        }
        if len(set(written.values())) > 1:
            unread = ", ".join(key for key, is_written in written.items() if not is_written)
            raise CheckpointError(
                f"{type(optimizer).__name__}: of the state of parameter {index!r} only a part was read from the "
                f"checkpoint, not {unread}; it was saved by another kind of optimizer"
            )
        return any(written.values()) if written else None


def _pattern(optimizer: Optimizer, group: Mapping[str, Any], num_dims: int, dtype: torch.dtype) -> _State | None:
    """Return the state of a small parameter after a step; None where zeros of its shape would not be as none at all."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            fresh, parameter = _twin(optimizer, group, num_dims, dtype)
            first = _step(fresh, parameter)
            pattern = {key: value for key, value in fresh.state[parameter].items() if value is not None}
            is_alike = all(
                isinstance(value, torch.Tensor) and (not value.ndim or value.shape == parameter.shape)
                for value in pattern.values()
            )
            if not is_alike or not num_dims:
                return None
            zeroed, parameter = _twin(optimizer, group, num_dims, dtype)
            zeroed.state[parameter] = {key: torch.zeros_like(value) for key, value in pattern.items()}
            second = _step(zeroed, parameter)
            found = zeroed.state[parameter]
            is_exact = torch.equal(first, second) and all(torch.equal(found[key], pattern[key]) for key in pattern)
            return pattern if is_exact else None
    except Exception as error:
        _log.debug("%s cannot be tried on a small parameter: %s", type(optimizer).__name__, error)
        return None


def _twin(
    optimizer: Optimizer, group: Mapping[str, Any], num_dims: int, dtype: torch.dtype
) -> tuple[Optimizer, torch.Tensor]:
    """Return an optimizer of the same kind and hyperparameters, over one small parameter with a gradient."""
    # This project's AdamW is PyTorch's over flat buffers, which a small parameter has not.
    cls = getattr(optimizer, "plain_kind", type(optimizer))
    generator = torch.Generator().manual_seed(0)
    parameter = torch.randn(_SIZES[:num_dims], generator=generator, dtype=torch.float32).to(dtype).requires_grad_()
    parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(dtype)
    plain = {"capturable": False, "fused": None, "foreach": False}
    options = {key: plain.get(key, value) for key, value in group.items() if key != "param_names"}
    made: Optimizer = object.__new__(cls)
    own = {key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad")}
    hooks = [name for name in own if name.startswith("_optimizer_") and name.endswith("_hooks")]
    made.__dict__.update(own | {name: OrderedDict() for name in hooks})
    made.state = defaultdict(dict)
    made.param_groups = [{**options, "params": [parameter]}]
    return made, parameter


def _step(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    step: Callable[..., Any] = type(optimizer).step
    # Past the hooks that all optimizers have in common, which need not hear of this one.
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    torch.manual_seed(0)
    step(optimizer)
    return parameter.detach()
