"""Strangers: tensors that somebody registered in the place of a sharded parameter, and what becomes of them.

The rule (docs/design/facade.md): what a plain model would compute is computed, or refused by name. A tensor that needs
no gradient is used for the call, as in ``torch.func.functional_call``. One that needs a gradient would get this rank's
alone, and is refused. A sharded parameter assigned before the first forward takes the place for good.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from megatron_fsdp.build.ownership import owner_words
from megatron_fsdp.errors import StateError
from megatron_fsdp.runtime.parameters import Stranger

if TYPE_CHECKING:
    from megatron_fsdp.runtime.parameter_group import ParameterGroup

__all__ = ["admit", "settle"]


def admit(group: ParameterGroup, strangers: Sequence[Stranger]) -> None:
    """Use what is registered in the places of a group's parameters for the forward call that begins, or refuse it.

    Raises:
        StateError: autograd would leave a gradient there that no rank reduces, or nothing is there.
    """
    if group.is_untouched and not _is_functional_call():
        strangers = _adopt(group, strangers)
    for stranger in strangers:
        value, place = stranger.value, _place(group, stranger)
        if value is None:
            raise StateError(
                f"{place} was taken out of its module after fully_shard. Remove parameters before fully_shard, or set "
                "the values to zero in place and freeze them."
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise StateError(
                f"{place} was replaced by a tensor of a torch.func transform (grad, vmap, jvp), whose gradients are "
                "not averaged over ranks. Run such transforms on a model that is not sharded; functional_call with "
                "tensors that require no gradient works."
            )
        if torch.is_grad_enabled() and value.requires_grad:
            raise StateError(_replaced(place, value))
        if group.faces.has_splits:
            raise StateError(
                f"{place} was replaced after fully_shard, and is sharded over further axes besides: copy the values "
                "into the parameter, which is a DTensor, instead."
            )
        group.faces.sites.lend(stranger, _for_compute(group, value))


def settle(group: ParameterGroup) -> None:
    """Let sharded parameters that were assigned take their places, and refuse whatever else is there.

    Raises:
        StateError: something else is registered in the place of a parameter.
    """
    strangers: Sequence[Stranger] = group.faces.sites.strangers()
    if strangers and group.is_untouched:
        strangers = _adopt(group, strangers)
    for stranger in strangers:
        place, value = _place(group, stranger), stranger.value
        raise StateError(f"{place} was taken out of its module" if value is None else _replaced(place, value))


def _place(group: ParameterGroup, stranger: Stranger) -> str:
    return f"unit {group.name!r}: parameter {list(group.parameters)[stranger.index]!r}"


def _replaced(place: str, value: torch.Tensor) -> str:
    other = owner_words(value)
    if other is not None:
        return (
            f"{place} was replaced by {other} after fully_shard: the unit would go on with its own weights, which are "
            "trained apart. Tie parameters before fully_shard, and give both modules to one unit: fully_shard([first, "
            "second]), or leave both to the unit around them."
        )
    what = "another Parameter" if isinstance(value, nn.Parameter) else "a tensor that requires a gradient"
    return (
        f"{place} was replaced by {what} of shape {tuple(value.shape)} after fully_shard; its gradients would not be "
        "averaged over ranks. Copy the values instead (load_state_dict, or parameter.copy_(...) under torch.no_grad(), "
        "with a DTensor), replace it before fully_shard, or call under torch.no_grad()."
    )


def _for_compute(group: ParameterGroup, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as gathered weights are: whole, in the compute dtype, where compute happens."""
    with torch.no_grad():
        whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
    return whole.to(device=group.gathered.device, dtype=group.gathered.dtype)


def _is_functional_call() -> bool:
    """Whether torch.func.functional_call is under way, which puts back what it has replaced."""
    code = stateless._functional_call.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return False


def _adopt(group: ParameterGroup, strangers: Sequence[Stranger]) -> Sequence[Stranger]:
    """Let sharded parameters that users assigned take their places for good; return the strangers that are none."""
    adopted = {
        stranger.index: stranger.value
        for stranger in strangers
        if isinstance(stranger.value, FlatDTensor)
        and isinstance(stranger.value, nn.Parameter)
        and owner_words(stranger.value) is None
        and _fits(group, stranger.index, stranger.value)
    }
    was_meta = group.is_meta
    if was_meta:
        if len(adopted) < len(group.parameters):
            return strangers
        group.materialize()
    for index, value in adopted.items():
        group.adopt(index, value)
    if was_meta:
        # Materialized parameters were registered over the adopted ones, which are all of them.
        group.faces.sites.register()
    return [stranger for stranger in strangers if stranger.index not in adopted]


def _fits(group: ParameterGroup, index: int, value: FlatDTensor) -> bool:
    face = group.faces.sharded[index]
    assert isinstance(face, FlatDTensor)
    return (
        not group.faces.has_splits
        and group.faces.sites.num_places(index) == 1
        and (value.shape, value.dtype, value.device_mesh) == (face.shape, face.dtype, face.device_mesh)
        and not value.is_meta
        and not value._backward_hooks
        and group.weights.remainder is None
    )
