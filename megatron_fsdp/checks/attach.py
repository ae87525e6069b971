"""Attach checks and step variants to every root."""

from __future__ import annotations

from collections.abc import Iterable

from dbuffer.dtensor.autograd import ASKED_CHECKS
from dbuffer.dtensor.reads import NAMERS
from megatron_fsdp.checks import refusals, tensor_names
from megatron_fsdp.checks.added_params import AddedParams
from megatron_fsdp.checks.agreement import FirstUse
from megatron_fsdp.checks.hidden_outputs import HiddenOutputs
from megatron_fsdp.checks.missing_gradients import MissingGradients
from megatron_fsdp.engine.optimizer_steps import register_step_hooks
from megatron_fsdp.engine.param_group import announce_step_of
from megatron_fsdp.engine.unit import Root, Unit
from megatron_fsdp.lifecycle.param_changes import ParamChanges
from megatron_fsdp.lifecycle.profiler_ranges import ProfilerRanges
from megatron_fsdp.variants.memory_slots import BufferPools

__all__ = ["attach_root"]

ASKED_CHECKS.append(refusals.refuse_sharded)
NAMERS.append(tensor_names.name_of)


def attach_root(outermost: Unit, units: Iterable[Unit]) -> None:
    """Make ``outermost`` the root of these units; ``settle`` has ended what backwards of earlier roots have left."""
    register_step_hooks(refusals.refuse_stale, announce_step_of)
    units = list(units)
    # Without the outermost unit, unless it has a root already: ``fully_shard`` has just made it.
    earlier = {id(root): root for unit in units if (root := vars(unit).get("root")) is not None}
    root = Root(outermost, units)
    for each in earlier.values():
        root.take_over(each)
    first_use = FirstUse()
    root.set_hooks(
        (
            first_use,
            AddedParams(),
            ParamChanges(),
            ProfilerRanges(),
            HiddenOutputs(),
            refusals.Refusals(),
            MissingGradients(first_use.tokens),
            BufferPools(),
        )
    )
