"""Run steps of ``torch.optim``'s Adam, AdamW and SGD on flat memory instead of on each sharded parameter.

The user's optimizer keeps its param groups, state, hooks and state dicts over the sharded parameters. During a step, a
stand-in of the same class runs in its place over plain 1-D tensors. Parameters whose weights and gradients lie side by
side in the unit's buffers share one such tensor (docs/design/facade.md, "Steps on flat memory").
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dbuffer import FlatDTensor
from dbuffer.dtensor.reads import count_step
from dbuffer.mesh import mesh_axes
from megatron_fsdp.checks.agreement import mesh_ranks
from megatron_fsdp.checks.rendezvous import meet
from megatron_fsdp.checks.tensor_names import name_of
from megatron_fsdp.engine.optimizer_steps import ParamsSeen
from megatron_fsdp.engine.param_loops import grads_of
from megatron_fsdp.optim.loaded_state import SEEN, lay_out_loaded_state, refuse_split_weights
from megatron_fsdp.optim.stock.flat_plan import FlatPlan, local_of, spec_of

__all__ = ["attend_optimizers", "forget_memory", "optimizers_of"]

KINDS: frozenset[type[Optimizer]] = frozenset({Adam, AdamW, SGD})
"""Classes that treat every element alike; a subclass of one may not."""

_STAND_INS: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
# The parameters of each optimizer, and the communicators of the ranks that have them.
_COMMUNICATORS: weakref.WeakKeyDictionary[Optimizer, tuple[ParamsSeen, list[dist.ProcessGroup]]]
_COMMUNICATORS = weakref.WeakKeyDictionary()


@functools.cache
def attend_optimizers() -> None:
    """From now on look at sharded parameters before any optimizer steps them, and step them on flat memory."""
    # A compiled step runs the first function uncompiled. The second one is traced and detects that.
    register_optimizer_step_pre_hook(_disable_dynamo(_look_at))
    register_optimizer_step_pre_hook(step_flat)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    """Return the optimizers that have stepped, or loaded state of, any of these sharded parameters."""
    wanted = set(map(id, parameters))
    known = {id(each): each for each in (*_COMMUNICATORS, *SEEN)}
    return [
        each for each in known.values() if any(id(p) in wanted for group in each.param_groups for p in group["params"])
    ]


def forget_memory(optimizer: Optimizer) -> None:
    """Look for parameters and their state anew in the next step: they lie elsewhere now."""
    _STAND_INS.pop(optimizer, None)
    _COMMUNICATORS.pop(optimizer, None)
    forget = getattr(optimizer, "forget_memory", None)
    if callable(forget):
        forget()


def _look_at(optimizer: Optimizer, *_: Any) -> None:
    known = _COMMUNICATORS.get(optimizer)
    if known is None or not known[0].are_those_of(optimizer):
        refuse_split_weights(optimizer)
        if type(optimizer) not in KINDS and not getattr(optimizer, "steps_split_weights", False):
            _agree(optimizer)
        known = _COMMUNICATORS[optimizer] = ParamsSeen(optimizer), _communicators(optimizer)
    count_step(known[1])
    if SEEN.get(optimizer) is not optimizer.state:
        lay_out_loaded_state(optimizer)


def _agree(optimizer: Optimizer) -> None:
    """Wait until all ranks step the same parameters in the same order: this optimizer may communicate for each of them.

    Raises:
        MeshError: on every rank, when any two of them differ.
    """
    said: dict[tuple[int, ...], list[str]] = {}
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if isinstance(parameter, FlatDTensor):
            ranks = mesh_ranks(parameter.device_mesh)
            said.setdefault(ranks, []).append(name_of(parameter) or f"a parameter of shape {tuple(parameter.shape)}")
    kind = type(optimizer).__name__
    for ranks in sorted(said):
        meet(
            ranks,
            f"begins to step sharded parameters with {kind}",
            said[ranks],
            f"the ranks of a mesh give {kind} different parameters, or the same ones in another order",
            "fix: give every rank the parameters in the order of model.named_parameters(), not that of a set",
        )


def _communicators(optimizer: Optimizer) -> list[dist.ProcessGroup]:
    params = (p for group in optimizer.param_groups for p in group["params"])
    meshes = {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, FlatDTensor)}
    return list({axis.gather_group for mesh in meshes.values() for axis in mesh_axes(mesh)})


def step_flat(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the optimizer of a step by a stand-in over flat memory, if that gives the same bits.

    Steps run unchanged for other optimizer classes, with a closure, with ``differentiable=True``, if only some groups
    are fused, and in compiled code.

    Args:
        args, kwargs: those of ``step``; the first one is the optimizer.
    Returns:
        The arguments with the stand-in as the first one; None to run the step unchanged.
    """
    if torch.compiler.is_compiling() or type(optimizer) not in KINDS or args[0] is not optimizer:
        return None
    if any(argument is not None for argument in (*args[1:], *kwargs.values())):
        return None
    groups = optimizer.param_groups
    first = next((p for group in groups for p in group["params"] if type(p) is FlatDTensor), None)
    if first is None or any(group.get("differentiable") for group in groups):
        return None
    if len(groups) > 1 and len({(group.get("capturable"), group.get("fused")) for group in groups}) > 1:
        # The step counters of such groups may be on two devices.
        return None
    if optimizer not in _STAND_INS:
        kind: Any = type(optimizer)
        made: Any = object.__new__(type(kind.__name__, (_StandIn, kind), {}))
        made.__dict__.update(_owner=weakref.ref(optimizer), _plan=None)
        _STAND_INS[optimizer] = made
    return (_STAND_INS[optimizer],), kwargs


class _StandIn(Optimizer):
    """An optimizer over flat tensors that runs during another optimizer's step and shares its other attributes."""

    _owner: weakref.ref[Optimizer]
    _plan: FlatPlan | None

    def __getattr__(self, name: str) -> Any:
        # Such as the scale and the finding that a gradient scaler leaves with a fused optimizer.
        return getattr(self._owner(), name)

    def _accelerator_graph_capture_health_check(self) -> None:
        owner = self._owner()
        assert owner is not None
        owner._accelerator_graph_capture_health_check()

    @property
    def param_groups(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]  # a step goes through them once
        """The groups of the flat tensors, from the gradients that there are now; the last one ends the step."""
        owner = self._owner()
        assert owner is not None
        parameters = list(chain.from_iterable(group["params"] for group in owner.param_groups))
        gradients = grads_of(parameters)
        plan = self._plan
        if plan is None or not _fits(plan, owner, parameters, gradients):
            plan = self._plan = FlatPlan(owner, parameters, gradients)
            plan.seen = _seen(plan, owner)
        plan.is_settled = False
        for run in plan.runs:
            run.weight.grad = local_of(gradients[run.leader.position]).as_strided((run.weight.numel(),), (1,))
        for group, tensors in zip(owner.param_groups, plan.tensors, strict=True):
            yield {**group, "params": tensors}
        _settle(plan, owner)

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        """The state of the flat tensors; that of others is the optimizer's own."""
        assert self._plan is not None
        return self._plan.state


def _fits(
    plan: FlatPlan, owner: Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> bool:
    """Return whether only values have changed, and no step was interrupted."""
    if not plan.is_settled or len(parameters) != len(plan.parameters) or not _same(parameters, plan.parameters):
        return False
    seen = _seen(plan, owner)
    return (
        _sizes(owner) == plan.sizes
        and list(map(operator.is_, gradients, repeat(None))) == plan.absent
        and (plan.is_whole or list(map(id, gradients)) == plan.gradient_ids)
        and len(seen) == len(plan.seen)
        and _same(seen, plan.seen)
        and plan.steps._version == plan.version
        and _fits_gradients(plan, [gradients[position] for position in plan.positions])
    )


def _seen(plan: FlatPlan, owner: Optimizer) -> list[Any]:
    """Return the objects that weights and state are made of."""
    records = list(map(owner.state.get, plan.flat_parameters))
    values = chain.from_iterable(record.values() for record in records if record is not None)
    return [owner.state, *map(local_of, plan.flat_parameters), *records, *values]


def _fits_gradients(plan: FlatPlan, gradients: Sequence[Any]) -> bool:
    # A gradient over part of the flat memory has its own layout, not the parameter's.
    if not _same(map(type, gradients), repeat(FlatDTensor)) or not _same(map(spec_of, gradients), plan.specs):
        return False
    rows = list(map(local_of, gradients))
    if not _same(map(type, rows), repeat(torch.Tensor)):
        return False
    addresses = list(map(torch.Tensor.data_ptr, rows))
    if list(map(operator.sub, addresses, map(addresses.__getitem__, plan.leaders))) != plan.distances:
        return False
    firsts = zip(map(rows.__getitem__, plan.firsts), plan.numels, strict=True)
    return all(row.untyped_storage().nbytes() >= (row.storage_offset() + numel) * row.itemsize for row, numel in firsts)


def _settle(plan: FlatPlan, owner: Optimizer) -> None:
    """Remove the gradients from the flat parameters, and update the visible state."""
    for run in plan.runs:
        run.weight.grad = None
    if plan.steps.numel():
        plan.steps.copy_(plan.steps[plan.leads])
    plan.version = plan.steps._version
    new = [run for run in plan.runs if len(run.state) != len(run.shown) or not _same(run.state.values(), run.shown)]
    for run in new:
        # Nothing is read back: all members of a run get the same value.
        run.show(owner.state)
    if new:
        plan.note(owner)
        plan.seen = _seen(plan, owner)
    plan.is_settled = True


def _same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    """Return whether two lists of equal length have the same objects."""
    return all(map(operator.is_, these, those))


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
