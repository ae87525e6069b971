"""Refuse backwards that record a graph, that use weights changed since forward, or that name parameters.

The graph contains gathered weights, not sharded parameters. So ``torch.autograd.grad`` and ``backward(inputs=...)``
would find no gradient of a sharded parameter, and of a gathered weight only the one of this rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from dbuffer import FlatDTensor
from dbuffer.whereabouts import publish
from megatron_fsdp.build.ownership import owned_name
from megatron_fsdp.engine.graph_queries import is_run
from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.params import handle_of
from megatron_fsdp.engine.unit import Call, Unit
from megatron_fsdp.errors import StateError

__all__ = ["Refusals", "refuse_sharded", "refuse_stale"]


class Refusals(StepHooks[Unit, Call]):
    """Refuses backwards of one root."""

    _has_published = False

    def on_recorded_backward(self, unit: Unit) -> None:
        """Refuse a backward that records a graph: ``StateError``."""
        raise StateError(
            f"unit {unit.name!r}: backward with create_graph=True is not supported, because the recorded graph would "
            "use released weights. fix: keep the module whose second derivatives are wanted unsharded "
            "(ignored_params of fully_shard)"
        )

    def on_changed_weights(self, unit: Unit) -> None:
        """Refuse a backward whose main weights have changed since forward: ``StateError``."""
        names = ", ".join(repr(name) for group in unit.groups for name in group.parameters)
        error = StateError(
            f"unit {unit.name!r}: its main weights (some of {names}) were changed between a forward and the backward "
            "through it: by an optimizer's step, in place, or at the end of unsharded(writeback=True). The gradients "
            "would be of the old activations and the new weights. fix: call backward() before the change, or run "
            "forward again after it"
        )
        # A rank whose rows did not change goes on, and waits for this one.
        publish(f"raised StateError: {error}")
        self._has_published = True
        raise error

    def on_root_forward(self, unit: Unit, module: nn.Module) -> None:
        """Refuse a forward that torch.jit traces: ``StateError``. Take back what this rank published with an error."""
        if torch._C._is_tracing():
            raise StateError(
                f"unit {unit.name!r} is sharded, and torch.jit cannot trace the hooks that gather its weights "
                "(fvcore's FlopCountAnalysis traces). fix: count or trace before fully_shard, or count with "
                "torch.utils.flop_counter.FlopCounterMode"
            )
        if self._has_published:
            publish("")
            self._has_published = False

    def on_stale_hold(self, unit: Unit) -> None:
        """Refuse a forward inside ``unsharded()`` whose main weights changed in the block: ``StateError``."""
        _refuse_held_change(unit)

    def on_no_gradients(self, units: Sequence[Unit]) -> None:
        """Raise ``StateError`` if the backward was asked for gradients of gathered weights."""
        _refuse_gathered([group for unit in units for group in unit.groups])


def _refuse_held_change(unit: Unit) -> None:
    """Refuse a forward inside ``unsharded()`` whose gathered weights are older than the main weights.

    Weights that were changed in place are judged where the block ends.

    Raises:
        StateError: the main weights changed inside the block.
    """
    if unit.count_changes() != unit.num_changes_held:
        names = ", ".join(repr(name) for group in unit.groups for name in group.parameters)
        raise StateError(
            f"unit {unit.name!r}: the main weights of {names} changed inside unsharded(), whose gathered weights are "
            "the old ones. fix: step optimizers and load weights outside of the block; or change the gathered weights "
            "in unsharded(model, writeback=True)"
        )


def refuse_sharded(roots: Sequence[torch.Tensor], asked: Iterable[torch.Tensor]) -> None:
    """Raise if autograd is asked for gradients of sharded parameters whose gathered weights are in the graph.

    Raises:
        StateError: they are.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in asked:
        group = group_of_parameter(tensor)
        params = None if group is None else group.fsdp_params
        pairs = zip(params.sharded_params, params.unsharded_params, strict=True) if params is not None else ()
        found |= {id(leaf): leaf for param, leaf in pairs if param is tensor}
    nodes: list[Any] = [root.grad_fn for root in roots] if found else []
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            leaf = found.get(id(getattr(node, "variable", None)))
            if leaf is not None:
                _refuse(leaf)


def _refuse_gathered(groups: Sequence[ParameterGroup]) -> None:
    """Raise, at the end of a backward, if it was asked for gradients of gathered weights.

    Raises:
        StateError: it was: these are this rank's alone. Or the backward is the first half of one that a pipeline
            schedule splits: its second half asks for the parameters by name, and finds none of them in the graph.
    """
    if _is_split_by_pipeline():
        group = next((group for group in groups if group.requires_grad), groups[0])
        raise StateError(
            f"unit {group.name!r}: parameter {next(iter(group.parameters))!r} would get no gradient: this schedule of "
            "torch.distributed.pipelining takes the gradients of inputs and of weights in two "
            "backwards (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV). The second asks "
            "autograd for parameters by name, where forward used gathered weights. fix: use ScheduleGPipe, "
            "Schedule1F1B or ScheduleInterleaved1F1B"
        )
    for group in groups:
        if math.prod(axis.size for axis in group.main_weight.axes) > 1:
            for leaf in group.fsdp_params.unsharded_params:
                if leaf.requires_grad and is_run(leaf) is None:
                    _refuse(leaf)


def _is_split_by_pipeline() -> bool:
    """Return whether a thread runs the first half of a split backward; on GPUs it is a thread of autograd."""
    for innermost in sys._current_frames().values():
        frame: Any = innermost
        while frame is not None:
            if frame.f_code.co_name == "stage_backward_input" and "pipelining" in frame.f_globals.get("__name__", ""):
                return True
            frame = frame.f_back
    return False


def _refuse(leaf: torch.Tensor) -> NoReturn:
    raise StateError(
        f"{handle_of(leaf).words}: torch.autograd.grad or backward(inputs=...) was asked for its gradient, of which "
        "forward used gathered values: autograd has this rank's alone. fix: call backward() and read .grad, or keep "
        "the module unsharded"
    )


def refuse_stale(optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds gathered weights or parameters that sharded ones have replaced, and SparseAdam.

    Raises:
        StateError: it names the first of them.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        handle, name = parameter.__dict__.get("_fsdp_handle"), owned_name(parameter)
        if handle is not None and handle.parameter:
            raise StateError(
                f"{type(optimizer).__name__} holds the gathered weights of parameter {handle.parameter!r} instead of "
                "its shard: model.parameters() was called between a forward and its backward. fix: build the optimizer "
                "before the first forward, or call model.reset_iter_state() first after a forward without a backward"
            )
        if name is None:
            continue
        group = group_of_parameter(parameter)
        # A sharded parameter without a group belongs to a deleted model.
        is_current = isinstance(parameter, FlatDTensor) if group is None else parameter is group.parameters.get(name)
        if not is_current:
            raise StateError(
                f"{type(optimizer).__name__} holds parameter {name!r} as it was before fully_shard, to_empty or an "
                "assignment, which is used no more. fix: build the optimizer afterwards, or give both to "
                "fully_shard_model_and_optimizer"
            )
        if group is not None and isinstance(optimizer, torch.optim.SparseAdam):
            raise StateError(
                f"SparseAdam holds parameter {name!r} of unit {group.name!r}. A sharded parameter has a dense "
                "gradient, also of an embedding with sparse=True, and SparseAdam takes sparse ones only. fix: use "
                "torch.optim.Adam(model.parameters()), or name the embedding's parameters in "
                "fully_shard(ignored_params=...), which keeps them whole, and average their gradients yourself."
            )
