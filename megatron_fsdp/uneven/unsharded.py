"""unsharded: keep the weights of a model gathered for a while, so that ranks may run different numbers of forwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dbuffer_kernels import checksum
from megatron_fsdp.build.ownership import owned_name
from megatron_fsdp.checks.agreement import mesh_ranks
from megatron_fsdp.checks.rendezvous import meet, report_failure
from megatron_fsdp.engine.optimizer_steps import STEP_CHECKS
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter
from megatron_fsdp.engine.streams import wait_for_host_reads
from megatron_fsdp.engine.unit import Unit, WeightState, is_in_backward, units_below
from megatron_fsdp.engine.unsharded_param import refuse_change
from megatron_fsdp.errors import StateError
from megatron_fsdp.lifecycle.module import gather_afresh, unit_of

__all__ = ["unsharded"]


@dataclass(eq=False)
class _Block:
    """An open block: the units that it keeps gathered, and whether it keeps changes."""

    units: Sequence[Unit]
    writeback: bool


_BLOCKS: list[_Block] = []
"""Outermost first."""


@contextmanager
def unsharded(model: nn.Module, units: Iterable[nn.Module] | None = None, writeback: bool = False) -> Iterator[None]:
    """Keep the weights of a model gathered inside the block: forwards there need no collective.

    Each rank may run any number of forwards of any units in any order: ``generate()`` that stops earlier on one rank,
    or validation sets of different lengths. All ranks of the mesh enter and leave the block together. The weights of
    all units are gathered once, at the beginning, and released at the end. ``explain(model)`` gives the bytes that this
    takes (``all_gathered_bytes``).

    Inside, ``model.parameters()`` are plain whole tensors. A backward reduces gradients as usual, so ranks have to run
    the same backwards.

    Args:
        units: modules below ``model`` that were given to ``fully_shard``: gather only these. Forwards of the other
            units gather as usual, so that all ranks have to run them. By default, gather all units.
        writeback: keep changes of the weights that are equal on all ranks. Unchanged elements keep the precision of
            their main weights. False: a change is an error when the block ends.
    Raises:
        StateError: ``model`` holds no sharded module; a backward is under way; weights were changed without
            ``writeback``; an optimizer steps these weights, or a method would release them, inside the block.
        MeshError: ranks gather different units, or changed weights differently. The changes are dropped.
        AgreementError: another rank raised at the beginning or end (out of memory, for instance), or did not arrive.

    Example:
        model.eval()
        with torch.no_grad(), unsharded(model):
            losses = [model(part).square().mean() for part in batches]
    """
    chosen = list(units_below(model)) if units is None else [unit_of(module) for module in units]
    chosen = list({id(unit): unit for unit in chosen if unit.groups}.values())
    _check(model, chosen, writeback)
    # Changes of units that an outer block holds are left to that block.
    owned = [unit for unit in chosen if writeback and not unit.num_holds]
    action = f"enters unsharded({type(model).__name__}, writeback={writeback})"
    kept = _gather(chosen, action)
    block, before, is_alone = _Block(chosen, writeback), dict[int, _Before](), True
    try:
        before = _before(owned)
        _hold(block)
        yield
        _let_go(block)
        is_alone = False
        _write_back(owned, before, action)
    except BaseException as error:
        for ranks in _ranks_of(owned) if is_alone else ():
            # The other ranks wait for this one at the end of the block.
            report_failure(ranks, f"leaves the block that it {action}", error)
        _let_go(block)
        _drop_changes(owned, before)
        _release(chosen, kept, is_raising=True)
        raise
    _release(chosen, kept)


def _check(model: nn.Module, chosen: Sequence[Unit], writeback: bool) -> None:
    if not chosen:
        raise StateError(
            f"unsharded: {type(model).__name__} holds no sharded parameters. fix: call fully_shard on it first"
        )
    if is_in_backward():
        raise StateError(
            f"unsharded: unit {chosen[0].name!r} was entered in a backward, whose gathers follow an order of their "
            "own. fix: enter the block after backward() has returned"
        )
    if writeback and any(not block.writeback and set(block.units) & set(chosen) for block in _BLOCKS):
        raise StateError(
            "unsharded(writeback=True) inside unsharded(writeback=False), which keeps no change. fix: give the outer "
            "block writeback=True"
        )
    if writeback:
        for group in (group for unit in chosen for group in unit.groups):
            if group.fsdp_params.subclass or any(owned.tensor_parallel is not None for owned in group.owned):
                raise StateError(
                    f"unsharded(writeback=True): unit {group.name!r} has parameters "
                    f"{', '.join(map(repr, group.parameters))} whose gathered values do not map back to main weights "
                    "(tensor subclasses, tensor parallelism). fix: change the sharded parameters outside of "
                    "the block, under torch.no_grad()"
                )


def _gather(chosen: Sequence[Unit], action: str) -> set[int]:
    """Gather units after all ranks have allocated memory; return the identities of units that stay gathered."""
    ranks = _ranks_of(chosen)
    kept: set[int] = set()
    allocated: list[tuple[Unit, ParameterGroup]] = []
    try:
        for unit in chosen:
            unit.check_replaced_params()
            shown = all(group.fsdp_params.module_infos.shows_gathered for group in unit.groups)
            if unit.num_holds or unit.open_call is not None or (unit.weight_state is WeightState.UNSHARDED and shown):
                kept.add(id(unit))
            for group in unit.groups:
                # Allocate before any collective, so that a rank without memory does not block other ranks in one.
                if not group.weights.rests_whole and not group.gathered.storage.is_allocated:
                    allocated.append((unit, group))
                    group.gathered.storage.reallocate()
    except BaseException as error:
        _free(allocated)
        for each in ranks:
            report_failure(each, action, error)
        raise
    try:
        for each in ranks:
            meet(
                each,
                action,
                [f"unit {unit.name!r}" for unit in chosen],
                "unsharded(): the ranks of a mesh gather other units",
                "fix: give the same units on every rank",
            )
        for unit in chosen:
            gather_afresh(unit)
            unit.wait_for_unshard()
    except BaseException:
        _release(chosen, kept, is_raising=True)
        _free(allocated)
        raise
    return kept


def _ranks_of(units: Iterable[Unit]) -> list[tuple[int, ...]]:
    """Return the ranks of each mesh of some units."""
    return sorted({mesh_ranks(group.spec.mesh) for unit in units for group in unit.groups})


def _free(allocated: Iterable[tuple[Unit, ParameterGroup]]) -> None:
    """Release memory of weights that were allocated but not gathered."""
    for unit, group in allocated:
        if unit.weight_state is WeightState.SHARDED and not group.weights.keeps_gathered:
            group.gathered.storage.release()


def _hold(block: _Block) -> None:
    for unit in block.units:
        if not unit.num_holds:
            unit.num_changes_held = unit.count_changes()
    _BLOCKS.append(block)
    _follow_blocks(block.units)


def _let_go(block: _Block) -> None:
    """Close a block, even if it was only partly opened."""
    if block in _BLOCKS:
        _BLOCKS.remove(block)
    _follow_blocks(block.units)


def _follow_blocks(units: Sequence[Unit]) -> None:
    """Tell units and optimizers' steps which blocks are open."""
    for unit in units:
        around = [block for block in _BLOCKS if unit in block.units]
        unit.num_holds = len(around)
        for group in unit.groups:
            group.is_writable = any(block.writeback for block in around)
    if bool(_BLOCKS) is not (_refuse_step in STEP_CHECKS):
        (STEP_CHECKS.append if _BLOCKS else STEP_CHECKS.remove)(_refuse_step)


def _release(chosen: Sequence[Unit], kept: set[int], *, is_raising: bool = False) -> None:
    """Release all units that no other block keeps gathered; then refuse changes where they are not allowed.

    Args:
        is_raising: another error is being raised, which must reach the caller.
    """
    changed: Sequence[torch.Tensor] = ()
    for unit in chosen:
        if unit.num_holds:
            continue
        for group in unit.groups if unit.weight_state is WeightState.UNSHARDED else ():
            found = group.fsdp_params.changed_in_place()
            if found:
                changed = changed or found
                _forget_changes(group)
        if id(unit) not in kept:
            unit.reshard()
    wait_for_host_reads()
    if changed and not is_raising:
        refuse_change(changed)


def _forget_changes(group: ParameterGroup) -> None:
    """Mark the gathered weights to be written again before their next use."""
    group.freshness.mark_gathered_changed()
    if group.weights.can_restore_gathered:
        group.fsdp_params.accept_versions()


def _refuse_step(optimizer: Optimizer) -> None:
    held = {id(group) for block in _BLOCKS for unit in block.units for group in unit.groups}
    for parameter in (parameter for each in optimizer.param_groups for parameter in each["params"]):
        group = group_of_parameter(parameter)
        if group is not None and id(group) in held:
            raise StateError(
                f"unit {group.name!r}: {type(optimizer).__name__}.step() of {owned_name(parameter)} inside "
                "unsharded(), whose gathered weights would be older than the main weights. fix: step after the block"
            )


# ---------------------------------------------------------------- changes that are kept


class _Before(NamedTuple):
    """A group as the block begins: this rank's main weights in the compute dtype, and checksums of whole weights."""

    shard: torch.Tensor
    checksums: list[int]


def _before(chosen: Sequence[Unit]) -> dict[int, _Before]:
    """Return the state of each group as the block begins, by the identity of the group."""
    return {
        id(group): _Before(_own_shard(group).clone(), _checksums(group)) for unit in chosen for group in unit.groups
    }


def _own_shard(group: ParameterGroup) -> torch.Tensor:
    """Return the part of the gathered weights at the place of this rank's main weights."""
    return group.gathered.slice_view(group.main_weight.placements).local_buffer.detach()


@torch.no_grad()
def _write_back(chosen: Sequence[Unit], before: dict[int, _Before], action: str) -> None:
    """Copy changed elements of the gathered weights to main weights, if all ranks changed them equally."""
    after = {id(group): _checksums(group) for unit in chosen for group in unit.groups}
    for ranks in _ranks_of(chosen):
        lines = [
            f"parameter {name!r} of unit {unit.name!r} with checksum {found:x}"
            for unit in chosen
            for group in unit.groups
            if mesh_ranks(group.spec.mesh) == ranks
            for name, found in zip(group.parameters, after[id(group)], strict=True)
        ]
        meet(
            ranks,
            f"leaves the block that it {action}",
            lines,
            "unsharded(writeback=True): the ranks changed weights differently",
            "All changes in the block were dropped. fix: make the same change on every rank, or broadcast it",
        )
    for group in (group for unit in chosen for group in unit.groups):
        # Unchanged main weights keep their version, so that a backward of an earlier forward is not refused. Checksums
        # of whole weights say so alike on all ranks.
        if after[id(group)] != before[id(group)].checksums:
            now, then = _own_shard(group), before[id(group)].shard
            values = group.weights.values()
            target = values.local_buffer.detach()
            # Compare bits, because a NaN differs from itself.
            is_changed = (now != then) & ~(now.isnan() & then.isnan())
            target.copy_(torch.where(is_changed.to(target.device), now.to(target), target))
            group.weights.store(values)
        _are_new(group)


def _checksums(group: ParameterGroup) -> list[int]:
    """Return a checksum of each whole weight."""
    weights = (used.detach().contiguous() for used in group.fsdp_params.unsharded_params)
    return [int(checksum(weight, key=1)) for weight in weights]


def _drop_changes(chosen: Sequence[Unit], before: dict[int, _Before]) -> None:
    """Restore main weights that share memory with gathered weights to their values before the block."""
    for group in (group for unit in chosen for group in unit.groups):
        found = before.get(id(group))
        if found is not None and group.fsdp_params.changed_in_place():
            if not group.weights.can_restore_gathered:
                _own_shard(group).copy_(found.shard)
            _are_new(group)


def _are_new(group: ParameterGroup) -> None:
    """Mark the gathered weights as stale, so that they are made again from the main weights."""
    group.freshness.mark_gathered_changed()
    group.freshness.has_changed = True
    group.fsdp_params.accept_versions()
