"""Flat parameters: main weights as plain 1-D parameters, for element-wise optimizers without DTensors' dispatch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import DBuffer
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.optim.adamw_state import local_range
from megatron_fsdp.runtime.grad_binding import GradState
from megatron_fsdp.runtime.parameter_group import ParameterGroup, group_of_parameter

__all__ = ["FlatParameter", "Member", "flat_parameters", "flat_view", "parameters_to_train"]


def flat_parameters(parameters: nn.Module | Iterable[torch.Tensor]) -> list[nn.Parameter]:
    """Return plain 1-D parameters over the memory of sharded ones, for any element-wise optimizer of ``torch.optim``.

    Neighbours in a group's main weights become one: a handful per unit instead of a DTensor per parameter. Each aliases
    this rank's part of ``main_weight``, and its ``.grad`` this rank's part of the final gradients: None while the
    sharded parameters' is None, and setting either to None does the same. The list is alike on all ranks; where a rank
    holds nothing of a parameter, its elements are none. Parameters that are not sharded are returned as they are.

    The optimizer must treat every element alike: one that looks at a parameter's shape or norm (Muon, LAMB, Adafactor)
    needs the parameters themselves. Its state belongs to this number of ranks; ``FlatOptimizer`` makes one that saves
    the state of each parameter. Clip with ``megatron_fsdp.clip_grad_norm_``, which knows the other ranks.

    Args:
        parameters: a sharded model, or some of its parameters, such as those that decay.
    Raises:
        ConfigError: weights are split, or gradients rest in another dtype than main weights.
        StateError: the parameters are on the meta device.

    Example:
        optimizer = torch.optim.RMSprop(flat_parameters(model), lr=1e-3)
        model(batch).square().mean().backward()
        optimizer.step()
    """
    flat = flat_view(parameters_to_train(parameters))
    for parameter in flat:
        if isinstance(parameter, FlatParameter):
            parameter.check_gradient_dtype()
    return flat


def parameters_to_train(parameters: nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a module's trainable parameters, or the given ones."""
    if isinstance(parameters, nn.Module):
        return [parameter for parameter in parameters.parameters() if parameter.requires_grad]
    return list(parameters)


def flat_view(parameters: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    """Return what ``flat_parameters`` does, whatever the gradients' dtype."""
    wanted = {id(parameter) for parameter in parameters}
    found: list[nn.Parameter] = []
    seen: set[int] = set()
    for parameter in parameters:
        group = group_of_parameter(parameter)
        if group is None:
            assert isinstance(parameter, nn.Parameter)
            found.append(parameter)
        elif id(group) not in seen:
            seen.add(id(group))
            _check(group)
            found += (FlatParameter(group, indices) for indices in _runs(group, wanted))
    return found


def _check(group: ParameterGroup) -> None:
    if group.is_meta:
        raise StateError(f"unit {group.name!r} is on the meta device; build its optimizer after materialize(model)")
    if group.weights.remainder is not None:
        raise ConfigError(
            f"unit {group.name!r}: its FP32 weights are split (split_main_params=True), so no memory holds them whole; "
            "use megatron_fsdp.AdamW, or shard that unit with split_main_params=False"
        )


def _runs(group: ParameterGroup, wanted: set[int]) -> Iterator[list[int]]:
    """Yield the positions of wanted parameters that lie side by side, frozen ones apart from others."""
    faces = tuple(group.parameters.values())
    run: list[int] = []
    for index in sorted(range(len(faces)), key=group.plan.offsets.__getitem__):
        if run and (id(faces[index]) not in wanted or faces[index].requires_grad != faces[run[-1]].requires_grad):
            yield run
            run = []
        if id(faces[index]) in wanted:
            run.append(index)
    if run:
        yield run


@dataclass(frozen=True, slots=True)
class Member:
    """One sharded parameter, and where its elements begin and end in a flat one."""

    parameter: nn.Parameter
    name: str
    start: int
    stop: int


class FlatParameter(nn.Parameter):
    """This rank's elements of neighbouring parameters of one group, as a 1-D parameter over ``main_weight``'s memory.

    Attributes:
        members: the sharded parameters, in the order of the plan.
    """

    members: tuple[Member, ...]

    def __new__(cls, group: ParameterGroup, indices: Sequence[int]) -> FlatParameter:
        """Make one of the parameters at some positions of a group, neighbours in its plan."""
        main = group.main_weight
        pieces = [local_range(main, index) for index in indices]
        held = [piece for piece in pieces if piece[0] < piece[1]]
        start, stop = (held[0][0], held[-1][1]) if held else (0, 0)
        # Codes and masks among the parameters are integers, which nobody trains.
        made = super().__new__(cls, main.local_buffer[start:stop], requires_grad=main.dtype.is_floating_point)
        named = tuple(group.parameters.items())
        members = []
        for index, (begin, end) in zip(indices, pieces, strict=True):
            name, face = named[index]
            place = (begin - start, end - start) if begin < end else (0, 0)
            members.append(Member(face, f"unit {group.name!r}: parameter {name!r}", *place))
        made.members = tuple(members)
        made._group = weakref.ref(group)
        made._main = weakref.ref(main)
        made._range = slice(start, stop)
        made._own = []
        made._lent = None
        return made

    _group: weakref.ref[ParameterGroup]
    _main: weakref.ref[DBuffer]
    _range: slice
    # The identities of the objects on the parameters that were found to lie in the group's buffer: it keeps these, and
    # sees by references whether anybody else does.
    _own: list[int]
    _lent: tuple[torch.Tensor | None] | None

    @property
    def group(self) -> ParameterGroup | None:
        """The group whose memory it is, None when the model is gone."""
        return self._group()

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's part of the final gradients, None where there are none.

        A copy where the sharded parameters were given gradients that no backward made.

        Raises:
            StateError: some of the parameters have a gradient and others have not, or one was assigned that does not
                have its parameter's rows.
        """
        return self.final_gradient() if self._lent is None else self._lent[0]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            with torch._C.DisableTorchFunctionSubclass():
                for member in self.members:
                    member.parameter.grad = None
            return
        current = self.final_gradient()
        if current is None or current.shape != value.shape:
            raise StateError(
                f"{self.members[0].name}: a gradient of shape {tuple(value.shape)} was assigned to its flat parameter, "
                f"which has {'none' if current is None else tuple(current.shape)}; run backward first, or assign a "
                "DTensor to the sharded parameter's .grad"
            )
        if value.data_ptr() != current.data_ptr():
            current.copy_(value)

    def final_gradient(self) -> torch.Tensor | None:
        """Return this rank's part of the final gradients in the dtype in which they rest; see ``grad``."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = [member.parameter.grad for member in self.members]
        group = self._group()
        if group is not None and self._main() is not group.main_weight:
            raise StateError(
                f"{self.members[0].name} got other memory (model.to(dtype), materialize) since its flat parameter was "
                "made; build the optimizer again"
            )
        gradients = None if group is None else group.gradients
        is_final = gradients is not None and gradients.binding.state is GradState.FINAL
        # The objects that lay in the group's buffer once still do: nothing has to be looked at again.
        if is_final and self._own and list(map(id, shown)) == self._own:
            assert gradients is not None
            return gradients.binding.slice(self._range.start, self._range.stop)
        return self._look(group, shown)

    def _look(self, group: ParameterGroup | None, shown: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        missing = [member.name for member, gradient in zip(self.members, shown, strict=True) if gradient is None]
        if group is None or len(missing) == len(shown):
            return None
        gradients = group.gradients
        if missing:
            raise StateError(
                f"{missing[0]} has no gradient, but others have that share a flat parameter with it. Give all of them "
                "a gradient or none, leave a parameter that no rank uses out of the optimizer, or use an optimizer "
                "over model.parameters()."
            )
        if gradients is None or gradients.binding.state is not GradState.FINAL:
            return self._packed(shown)
        final = gradients.binding.settled()
        assert final is not None
        place = gradients.binding.slice(self._range.start, self._range.stop)
        with torch._C.DisableTorchFunctionSubclass():
            lies_inside = all(_lies_inside(member, place) for member in self.members)
        self._own = list(map(id, shown)) if lies_inside else []
        return place

    def _packed(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        flat = torch.zeros_like(self).detach()
        for member, gradient in zip(self.members, gradients, strict=True):
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if local is None or local.numel() != member.stop - member.start:
                raise StateError(
                    f"{member.name}: a gradient was assigned that is not laid out like the parameter; assign a DTensor "
                    "such as torch.zeros_like(parameter)"
                )
            flat[member.start : member.stop].copy_(local.reshape(-1))
        return flat

    def check_gradient_dtype(self) -> None:
        """Refuse gradients of another dtype, whose memory cannot be this parameter's gradient.

        Raises:
            ConfigError: they have.
        """
        group = self.group
        if group is not None and group.gradients is not None and group.spec.dtypes.main_grad is not self.dtype:
            raise ConfigError(
                f"unit {group.name!r}: gradients rest in {group.spec.dtypes.main_grad}, main weights in {self.dtype}, "
                "so the one cannot be the .grad of the other; use FlatOptimizer, which casts them in each step, or "
                "leave main_grads_dtype None"
            )

    def lend(self) -> None:
        """Look for the gradient once, cast it to the parameter's dtype, and show that until ``take_back``."""
        gradient = self.final_gradient()
        self._lent = (gradient if gradient is None else gradient.to(self.dtype),)

    def take_back(self) -> None:
        """Show the gradients as they are."""
        self._lent = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("a flat parameter is memory of a sharded model and cannot be pickled; save the model's state")


def _lies_inside(member: Member, place: torch.Tensor) -> bool:
    gradient = member.parameter.grad
    if not isinstance(gradient, DTensor) or gradient.dtype is not place.dtype:
        return False
    return member.start == member.stop or gradient._local_tensor.data_ptr() == place[member.start :].data_ptr()
