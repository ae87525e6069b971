"""FlatOptimizer: any element-wise optimizer of ``torch.optim``, stepped over flat memory, with state per parameter."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.flat_parameters import FlatParameter, Member, flat_view, parameters_to_train
from megatron_fsdp.optim.loaded_state import lay_out_loaded_state
from megatron_fsdp.runtime.parameter_group import (
    ParameterGroup,
    catch_up_together,
    expect_step,
    group_of_parameter,
    refreshes_itself,
)

__all__ = ["FlatOptimizer"]

_NAMES = ("params", "param_names")


class FlatOptimizer(Optimizer):
    """An optimizer of some class over a sharded model that works on flat memory and shows state for each parameter.

    Weights, ``param_groups``, ``state`` and state dicts are those of ``kind(params, **options)`` over the sharded
    parameters, so that schedulers, checkpoints and other numbers of ranks need to know nothing; a step handles a few
    1-D tensors per unit instead of a DTensor per parameter (``flat_parameters``). Includes what
    ``fully_shard_optimizer`` does.

    Args:
        kind: such as ``torch.optim.SGD``; it must treat every element alike and keep state of the parameter's shape, or
            one number. Not Muon, LAMB, Adafactor or LBFGS, which look at shapes, norms or all parameters at once.
        params: a sharded model, its parameters, or param groups of them.
        options: of ``kind``. ``foreach`` is True on CUDA unless they say otherwise.
    Raises:
        ConfigError: weights are split. StateError: they are on the meta device.

    Example:
        optimizer = FlatOptimizer(torch.optim.RMSprop, model.parameters(), lr=1e-3)
        model(batch).square().mean().backward()
        optimizer.step()
    """

    def __init__(self, kind: type[Optimizer], params: Any, **options: Any) -> None:
        self.inner: Optimizer | None = None
        self.kind_name = kind.__name__
        super().__init__(parameters_to_train(params) if isinstance(params, nn.Module) else params, {})
        is_on_cuda = all(parameter.is_cuda for group in self.param_groups for parameter in group["params"])
        if is_on_cuda and not options.get("fused") and "foreach" in inspect.signature(kind).parameters:
            options.setdefault("foreach", True)
        self.inner = kind([_inner_group(group) for group in self.param_groups], **options)
        self.defaults = self.inner.defaults
        self._fill_defaults()
        self._shown: dict[int, tuple[Any, ...]] = {}
        self._find_parameters()
        refreshes_itself(self)
        refreshes_itself(self.inner)
        self._publish()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add sharded parameters with hyperparameters of their own; as in ``torch.optim``."""
        super().add_param_group(param_group)
        if self.inner is not None:
            self.inner.add_param_group(_inner_group(self.param_groups[-1]))
            self._fill_defaults()
            self._find_parameters()

    def _fill_defaults(self) -> None:
        assert self.inner is not None
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for name, value in inner.items():
                mine.setdefault(name, value)

    def _find_parameters(self) -> None:
        assert self.inner is not None
        self._flat = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        groups: dict[int, weakref.ref[ParameterGroup]] = {}
        for group in (group_of_parameter(p) for mine in self.param_groups for p in mine["params"]):
            if group is not None:
                groups[id(group)] = weakref.ref(group)
        self._owners = list(groups.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step over all parameters that have gradients.

        Args:
            closure: computes and returns the loss, with gradients enabled.
        Returns:
            What the closure returned, else None.
        Raises:
            StateError: neighbours of one flat parameter, some with and some without a gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self.inner is not None
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in mine.items() if name not in _NAMES})
        flat = [parameter for parameter in self._flat if isinstance(parameter, FlatParameter)]
        owners = [group for reference in self._owners if (group := reference()) is not None]
        expect_step(owners)
        try:
            for parameter in flat:
                parameter.lend()
            self.inner.step()
        finally:
            for parameter in flat:
                parameter.take_back()
        self._publish()
        catch_up_together(owners)
        return loss

    # ------------------------------------------------------------------ state

    def _publish(self) -> None:
        """Show the state of each parameter, where the flat state is not the one that is shown."""
        assert self.inner is not None
        for flat in self._flat:
            values = self.inner.state.get(flat)
            if not values:
                continue
            if not isinstance(flat, FlatParameter):
                self.state[flat] = values
                continue
            shown = self._shown.get(id(flat), ())
            if len(shown) == len(values) and all(map(operator.is_, shown, values.values())):
                continue
            self._shown[id(flat)] = tuple(values.values())
            for member in flat.members:
                self.state[member.parameter] = {
                    key: self._part(key, value, flat, member) for key, value in values.items()
                }

    def _part(self, key: str, value: Any, flat: FlatParameter, member: Member) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if value.shape != flat.shape:
            raise ConfigError(
                f"{self.kind_name}: its state {key!r} has shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(flat.shape)}, so it does not treat every element alike; use it over model.parameters()"
            )
        template = member.parameter
        assert isinstance(template, FlatDTensor)
        local = value[member.start : member.stop].view(template.to_local().shape)
        return FlatDTensor.from_local(
            local,
            template.device_mesh,
            template.placements,
            run_check=False,
            shape=template.shape,
            stride=template.stride(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what ``kind`` over the sharded parameters would; numbers that neighbours share are copies for each."""
        document: dict[str, Any] = super().state_dict()
        state = {
            index: {key: _own_number(value) for key, value in values.items()}
            for index, values in document["state"].items()
        }
        return {**document, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of ``kind`` over the same parameters, sharded or whole; all ranks call it.

        Raises:
            ConfigError: parameters that share flat memory differ in what is one number for all of it, or only some of
                them have state.
        """
        super().load_state_dict(state_dict)
        lay_out_loaded_state(self)
        assert self.inner is not None
        for flat in self._flat:
            values = self._joined(flat) if isinstance(flat, FlatParameter) else dict(self.state.get(flat, {}))
            if values:
                self.inner.state[flat] = values
            else:
                self.inner.state.pop(flat, None)
        self._shown.clear()
        self._publish()

    def _joined(self, flat: FlatParameter) -> dict[str, Any]:
        """Return the state of a flat parameter, put together from that of its members."""
        found = [self.state.get(member.parameter, {}) for member in flat.members]
        keys = list(found[0])
        for member, values in zip(flat.members, found, strict=True):
            if values.keys() != found[0].keys():
                raise ConfigError(
                    f"{member.name} has the optimizer state {sorted(values)} and {flat.members[0].name}, which shares "
                    f"flat memory with it, {sorted(keys)}; load them into an optimizer over model.parameters()"
                )
        return {key: _join(key, [values[key] for values in found], flat) for key in keys}

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("FlatOptimizer cannot be pickled: it steps memory of a sharded model. Save its state_dict().")

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Only load_state_dict comes here.
        super().__setstate__(state)
        refreshes_itself(self)


def _inner_group(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name not in _NAMES}
    return {"params": flat_view(group["params"]), **options}


def _own_number(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and not value.ndim else value


def _join(key: str, values: Sequence[Any], flat: FlatParameter) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim:
        joined = torch.zeros_like(flat, dtype=first.dtype).detach()
        for member, local in zip(flat.members, _locals(values), strict=True):
            joined[member.start : member.stop].copy_(local)
        return joined
    for member, value in zip(flat.members, values, strict=True):
        if not _is_same(value, first):
            raise ConfigError(
                f"{member.name} has {key} = {value} in its optimizer state and {flat.members[0].name}, which shares "
                f"flat memory with it, {first}; load them into an optimizer over model.parameters()"
            )
    return first.clone() if isinstance(first, torch.Tensor) else first


def _locals(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        yield (value.to_local() if isinstance(value, FlatDTensor) else value).reshape(-1)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return bool(value == other)
