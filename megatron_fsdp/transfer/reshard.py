"""``reshard_``: another strategy, or other ranks, for a live model and its optimizer, in place and without disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dbuffer import Granularity, PaddingLimits, Region
from dbuffer.mesh import make_groups, mesh_axes
from megatron_fsdp.build.builder import GroupPlan, GroupSpec, unit_regions
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.checkpoint.model_state import unwrapped
from megatron_fsdp.checks.agreement import mesh_ranks
from megatron_fsdp.checks.attach import attach_root
from megatron_fsdp.checks.rendezvous import meet, report_failure
from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.recovery import settle
from megatron_fsdp.engine.streams import wait_for_host_reads
from megatron_fsdp.engine.unit import Call, Unit, units_below
from megatron_fsdp.engine.weight_buffers import WeightBuffers
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.lifecycle.make_param_group import make_over, make_weights, restore_group
from megatron_fsdp.lifecycle.module import watch_inner_modules
from megatron_fsdp.lifecycle.unit_changes import update_gradient_buffers
from megatron_fsdp.optim.stock.flat_step import optimizers_of
from megatron_fsdp.policy.mesh import sharding_target
from megatron_fsdp.policy.offload import CPUOffloadPolicy, offload_of
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.transfer.delta import forget_weights
from megatron_fsdp.transfer.layouts import Parts, TransferLayout, box_ranges, place_tensors, size_of
from megatron_fsdp.transfer.move import Mover
from megatron_fsdp.transfer.optimizer_move import OptimizerMove
from megatron_fsdp.transfer.transfer_plan import TransferPlan, plan_transfer
from megatron_fsdp.transfer.versions import groups_replaced, is_being_sent
from megatron_fsdp.transfer.weight_layout import held_elements, shards_by_rank
from megatron_fsdp.variants.forward_order import order_of
from megatron_fsdp.variants.memory_slots import reshard_to

__all__ = ["reshard_"]


def reshard_(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    lost_ranks: Collection[int] = (),
    staging_bytes: int = 64 << 20,
) -> TransferPlan:
    """Give all units of a model another strategy, or other ranks, between steps; the parameters stay the same objects.

    Weights and optimizer state keep every bit, and nothing goes to disk. ``plan_transfer`` says what travels; replicas
    share the work. During the call this rank needs memory for the old shards, the new shards and the staging buffers. A
    call that raises leaves model and optimizer unchanged, on all ranks that still run.

    Every rank of the old and of the new mesh calls it. A rank that the new mesh leaves out sends its part; its model
    can train no more afterwards. The others save with ``save_checkpoint(..., process_group=)``.

    Args:
        mesh: data-parallel mesh as in ``fully_shard``, over ranks that the model has now. Default: the current mesh.
        placements: as in ``fully_shard``. By default each unit keeps its strategy if the new mesh has as many axes as
            the old one; otherwise the default of ``fully_shard``.
        optimizer: every optimizer that steps the model: ``torch.optim``'s, or this package's.
        lost_ranks: ranks that have lost their values. A rank that has ended does not call. A rank that was restarted,
            with a model sharded as before and an optimizer without state, calls and gets everything from replicas.
        staging_bytes: of send and receive buffers.
    Returns:
        The plan that was carried out; ``print`` shows bytes by rank.
    Raises:
        StateError: the model has gradients, is in a forward or backward, or is sent by a ``weight_stream``; an
            optimizer that steps it was not given.
        TransferError: only lost ranks held some bytes, which are named.
        ConfigError: units, parameters or state that cannot be moved, which are named.
        AgreementError, MeshError: another rank raised, ended, or called with other arguments.

    Example:
        placements = Placements.optim(0)  # ZeRO-1
        reshard_(model, placements=placements, optimizer=optimizer)
        model(batch).square().mean().backward()
        optimizer.step()
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    lost = frozenset(lost_ranks)
    units = [unit for unit in units_below(unwrapped(model)) if unit.groups]
    if not units:
        raise StateError(f"reshard_: {type(model).__name__} has no sharded parameter. fix: call fully_shard(model)")
    old_ranks = mesh_ranks(units[0].groups[0].spec.mesh)
    new_ranks = old_ranks if mesh is None else mesh_ranks(mesh)
    together = _Together([rank for rank in sorted({*old_ranks, *new_ranks}) if rank not in lost - {*new_ranks}])
    with together:
        _check(model, units, optimizers)
        _check_ranks(units, new_ranks, lost)
        moves = [move for unit in units for move in _relaid(unit, mesh, placements)]
        state = OptimizerMove.of(optimizers, [(each.name, each.param) for each in _places(moves)])
        name = together.meet("plans", _lines(moves, optimizers))
        if lost & {*new_ranks}:
            state.exchange(name, together.ranks, lost)
        plan, table = _plan(moves, state, lost, staging_bytes)
        is_here = not dist.is_initialized() or dist.get_rank() in new_ranks
        prepared = _Prepared(moves, state, plan, table, is_here=is_here)
        together.meet("sends", [f"transfer {plan.fingerprint()}"])
        prepared.run()
        together.meet("takes over")
        prepared.commit(model, units)
    return plan


class _Together:
    """The ranks that call ``reshard_``: they go from one stage to the next together, or all of them raise."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self._stage, self._is_meeting = tuple(ranks), "begins", False

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if error is not None and not self._is_meeting and self._stage != "takes over":
            report_failure(self.ranks, f"{self._stage} reshard_", error)

    def meet(self, stage: str, lines: Sequence[str] = ()) -> str:
        """Wait until all ranks are about to begin a stage; returns a name of the meeting."""
        self._is_meeting = True
        name = meet(
            self.ranks, f"{self._stage} reshard_", lines, "reshard_: the ranks have other units or ask for others",
            "fix: call reshard_ with the same arguments on every rank. Nothing was changed",
        )  # fmt: skip
        self._stage, self._is_meeting = stage, False
        return name


# ---------------------------------------------------------------- checks before a move


def _check(model: nn.Module, units: Sequence[Unit], optimizers: Sequence[Optimizer]) -> None:
    if is_being_sent(model):
        raise StateError(
            "reshard_ while a weight_stream of the model is open. fix: iterate it to its end, or call stream.close()"
        )
    for module in model.modules():
        if isinstance(refusal := vars(module).get("checkpoint_refusal"), str):
            raise ConfigError(refusal)
    for unit in units:
        unit.check_replaced_params()
        if unit.num_holds:
            raise StateError(
                f"reshard_: an unsharded() block keeps the weights of unit {unit.name!r} gathered. fix: call reshard_ "
                "after the block"
            )
        # The call of several modules stays open while one of them has not run.
        if unit.open_call is not None and len(unit.module_ids) == 1:
            raise StateError(
                f"reshard_: unit {unit.name!r} is in a forward. fix: call reshard_ after the forward has "
                "returned; after an interrupted forward call model.reset_iter_state() first"
            )
        settle(unit.root)
        unit.reshard()
        for group in unit.groups:
            _check_group(group, is_awaited=any(call() is not None for call in unit.pending_calls))
    wait_for_host_reads()
    parameters = [param for unit in units for group in unit.groups for param in group.parameters.values()]
    given = set(map(id, optimizers))
    for other in optimizers_of(parameters):
        if id(other) not in given:
            raise StateError(
                f"reshard_: a {type(other).__name__} has state of this model's parameters and was not given, so its "
                "state would have other rows than they. fix: reshard_(model, ..., optimizer=[...]) with every "
                "optimizer that steps the model; del one that is not used any more"
            )


def _check_group(group: ParameterGroup, *, is_awaited: bool) -> None:
    params = group.fsdp_params.sharded_params
    first = next(iter(group.parameters))
    obstacles = {
        "is on the meta device; fix: call materialize(model) first": group.spec.is_meta,
        "has a gradient; fix: call optimizer.step() and model.zero_grad() first": any(
            p.grad is not None for p in params
        )
        or (group.gradient_buffer is not None and group.gradient_buffer.binding.sum is not None),
        "is awaited by a backward of an earlier forward; fix: run it, or delete the outputs": is_awaited,
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise StateError(f"reshard_: unit {group.name!r}: parameter {first!r} {obstacle}")
    if group.owned[0].extension is not None:
        raise ConfigError(
            f"reshard_: unit {group.name!r}: parameter {first!r} has hooks of its own for its gather, whose shards "
            "this package does not know. fix: save_checkpoint, and load_checkpoint into a model of the new layout"
        )


def _check_ranks(units: Sequence[Unit], new_ranks: Sequence[int], lost: Collection[int]) -> None:
    first = units[0].groups[0].spec.mesh
    for unit in units:
        for group in unit.groups:
            if mesh_ranks(group.spec.mesh) != mesh_ranks(first):
                raise ConfigError(
                    f"reshard_: unit {units[0].name!r} is sharded over ranks {mesh_ranks(first)} and unit "
                    f"{group.name!r} over {mesh_ranks(group.spec.mesh)}. fix: call reshard_ on modules whose units "
                    "share a mesh, one after the other"
                )
            if group.owned[0].tensor_parallel is not None and tuple(new_ranks) != mesh_ranks(first):
                raise ConfigError(
                    f"reshard_: unit {group.name!r}: parameter {group.owned[0].name!r} is cut by tensor or expert "
                    "parallelism, so its data-parallel ranks cannot change. fix: keep mesh=None, or save_checkpoint "
                    "and load_checkpoint"
                )
    added = sorted(set(new_ranks) - {*mesh_ranks(first)})
    if added:
        raise ConfigError(
            f"reshard_: ranks {added} of the new mesh hold nothing of the model yet. fix: a mesh of ranks that have "
            "it; to add ranks, save_checkpoint and load_checkpoint, or weight_stream"
        )


# ---------------------------------------------------------------- the new groups of a unit


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The places of one parameter before and after the move.

    Attributes:
        param: the sharded one. old, old_index: its group, and its position there.
        new, new_index: its planned group, and its position there.
    """

    name: str
    owned: OwnedParameter
    param: nn.Parameter
    old: ParameterGroup
    old_index: int
    new: GroupPlan
    new_index: int


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """A new group of a unit.

    Attributes:
        like: an old group whose settings it takes. places: of its parameters, in plan order.
    """

    unit: Unit
    plan: GroupPlan
    like: ParameterGroup
    places: tuple[_Place, ...]


def _places(moves: Iterable[_Move]) -> list[_Place]:
    return [place for move in moves for place in move.places]


def _relaid(unit: Unit, mesh: DeviceMesh | None, placements: Placements | None) -> list[_Move]:
    """Return the groups that ``fully_shard`` would make of a unit's parameters in the new layout."""
    order = {id(param): number for number, param in enumerate(_registered(unit))}
    where = {id(each): (group, index) for group in unit.groups for index, each in enumerate(group.owned)}
    param_of = {
        id(each): param
        for group in unit.groups
        for each, param in zip(group.owned, group.fsdp_params.sharded_params, strict=True)
    }
    alike: dict[tuple[object, ...], list[OwnedParameter]] = {}
    for group in unit.groups:
        for each in group.owned:
            alike.setdefault(_kind(group, each), []).append(each)
    moves = []
    for members in alike.values():
        members.sort(key=lambda each: order.get(id(param_of[id(each)]), len(order)))
        like = where[id(members[0])][0]
        spec = _moved(like.spec, mesh, placements, is_replicated=members[0].is_replicated)
        shapes = [where[id(each)][0].plan.shapes[where[id(each)][1]] for each in members]
        asked = None
        if spec.has_own_granularity:
            asked = [where[id(each)][0].plan.granularities[where[id(each)][1]] for each in members]
        for region in _regions(shapes, spec, asked):
            chosen = [members[index] for index in region.indices]
            plan = GroupPlan(chosen, region.plan, spec)
            places = tuple(
                _Place(f"{unit.name}.{each.name}", each, param_of[id(each)], *where[id(each)], plan, index)
                for index, each in enumerate(chosen)
            )
            moves.append(_Move(unit, plan, like, places))
    return moves


def _regions(shapes: Sequence[Sequence[int]], spec: GroupSpec, asked: Sequence[Granularity] | None) -> Sequence[Region]:
    number = spec.placements.num_shards(spec.mesh.shape)
    if asked is None:
        return unit_regions(shapes, number, spec.dtypes)
    return unit_regions(shapes, number, spec.dtypes, asked, PaddingLimits())


def _registered(unit: Unit) -> list[nn.Parameter]:
    modules = [module for reference in unit.modules if (module := reference()) is not None]
    return [param for module in modules for param in module.parameters()]


def _kind(group: ParameterGroup, owned: OwnedParameter) -> tuple[object, ...]:
    """Return what parameters have in common that share a group."""
    spec = group.spec
    is_alone = getattr(owned.parameter, "fsdp_own_group", False)
    flags = tuple(sorted({param.requires_grad for param in group.parameters.values()}))
    return (
        spec.device, spec.dtypes, spec.divisor, spec.is_offloaded, spec.is_pinned, spec.fuses_weight_gradients,
        spec.keeps_gathered, spec.has_own_granularity, spec.has_own_divisor, spec.placements, owned.is_replicated,
        None if owned.tensor_parallel is None else owned.tensor_parallel.key, flags, id(group.reduce_hook),
        id(group.reduce_function),
        id(group.weights.gather_function), id(owned) if is_alone else None,
    )  # fmt: skip


def _moved(
    spec: GroupSpec, mesh: DeviceMesh | None, placements: Placements | None, *, is_replicated: bool
) -> GroupSpec:
    wanted, there = placements, spec.mesh if mesh is None else mesh
    if placements is None and there.ndim == len(spec.placements.dp_axes):
        wanted = replace(spec.placements, dp_axes=tuple(range(there.ndim)))
    else:
        target = sharding_target(there, placements, None)
        there, wanted = target.mesh, target.placements
    assert wanted is not None
    if spec.is_offloaded and not is_replicated:
        offload_of(CPUOffloadPolicy(pin_memory=spec.is_pinned), wanted)
    if is_replicated:
        wanted = Placements.no_shard(*wanted.dp_axes)
    divisor = spec.divisor
    if not spec.has_own_divisor:
        divisor = spec.divisor / spec.mesh.size() * there.size()
    return replace(spec, mesh=there, placements=wanted, divisor=divisor)


def _lines(moves: Sequence[_Move], optimizers: Sequence[Optimizer]) -> list[str]:
    found = [
        f"{place.name!r} {place.old.plan.shapes[place.old_index]} of {place.old.main_weight.dtype}"
        for place in _places(moves)
    ]
    for move in moves:
        spec = move.plan.spec
        ranks = spec.mesh.mesh.tolist()
        found.append(f"unit {move.unit.name!r}: {move.plan.plan.fingerprint()}, {spec.placements} over ranks {ranks}")
    return found + [f"a {type(each).__name__}" for each in optimizers]


# ---------------------------------------------------------------- the plan


def _plan(
    moves: Sequence[_Move], state: OptimizerMove, lost: frozenset[int], staging_bytes: int
) -> tuple[TransferPlan, int]:
    """Return the plan, and how many tensors of the flat space are weights; the others are optimizer state."""
    places = _places(moves)
    weights = [(each.name, _values_dtype(each.old), each.old.plan.shapes[each.old_index]) for each in places]
    table = place_tensors([*weights, *state.tensors(places)])
    owners = [*places, *(places[item.place] for item in state.items)]
    layouts = []
    for is_new in (False, True):
        ranges: dict[int, list[torch.Tensor]] = {}
        for number, (place, entry) in enumerate(zip(owners, table, strict=True)):
            item = state.items[number - len(places)] if number >= len(places) else None
            spec = (place.new if is_new else place.old).spec
            plan = place.new.plan if is_new else place.old.plan
            index = place.new_index if is_new else place.old_index
            box = [range(size) for size in entry.shape]
            for rank, shard in shards_by_rank(spec.mesh.mesh, spec.placements.optimizer).items():
                held = held_elements(plan, index, shard)
                if item is not None:
                    held = item.elements(held, is_new=is_new)
                ranges.setdefault(rank, []).append(box_ranges(entry, box, held))
        parts = {rank: Parts.of(torch.cat(found)) for rank, found in sorted(ranges.items())}
        layouts.append(TransferLayout(size_of(table), parts, table))
    return plan_transfer(layouts[0].without(lost), layouts[1], staging_bytes=staging_bytes), len(places)


def _values_dtype(group: ParameterGroup) -> torch.dtype:
    return torch.float32 if group.weights.remainder is not None else group.main_weight.dtype


class _Prepared:
    """The memory of the new layout, in addition to the old one, which stays unchanged until ``commit``."""

    def __init__(
        self, moves: Sequence[_Move], state: OptimizerMove, plan: TransferPlan, num_weights: int, *, is_here: bool
    ) -> None:
        self._moves, self._state, self._is_here = moves, state, is_here
        rank = dist.get_rank() if dist.is_initialized() else 0
        device = moves[0].plan.spec.device
        old_values = {
            id(group): group.weights.values() for group in {id(p.old): p.old for p in _places(moves)}.values()
        }
        sources, targets = [], []
        if rank in plan.source.parts:
            for place in _places(moves):
                buffer = old_values[id(place.old)]
                sources.append(buffer.layout.piece(place.old_index, buffer.local_buffer.detach()))
            sources += state.sources()
        self._weights: list[WeightBuffers] = []
        self._values = []
        if is_here:
            for move in moves:
                made = make_weights(move.plan.owned, move.plan.plan, move.plan.spec, move.unit.name)
                # Refuses a part that the new axis cannot be cut into.
                if move.like.weights.post_forward is not None:
                    made.check_part(move.like.weights.post_forward.axis.size)
                self._weights.append(made)
                self._values.append(made.values())
                for place in move.places:
                    layout = self._values[-1].layout
                    targets.append(layout.piece(place.new_index, self._values[-1].local_buffer.detach()))
            layouts = {id(m.plan): w.main.layout for m, w in zip(moves, self._weights, strict=True)}
            targets += state.make_targets([(layouts[id(p.new)], p.new_index) for p in _places(moves)])
            for spec in {id(move.plan.spec.mesh): move.plan.spec for move in moves}.values():
                make_groups(mesh_axes(spec.mesh))
        self._mover = Mover(plan, sources, targets, device)

    def run(self) -> None:
        """Move the bytes; the model is unchanged."""
        try:
            self._mover.run()
        finally:
            self._mover.close()
        for made, values in zip(self._weights, self._values, strict=True):
            made.store(values)

    def commit(self, model: nn.Module, units: Sequence[Unit]) -> None:
        """Install the new groups in the units and the new state in the optimizers. After an error, restore both."""
        if not self._is_here:
            for root in {id(unit.root): unit.root for unit in units}.values():
                root.set_hooks((_Left(),))
            vars(model)["checkpoint_refusal"] = (
                f"rank {dist.get_rank()}: reshard_ moved the model to a mesh without this rank. fix: call this on the "
                "ranks of the mesh alone; save_checkpoint and load_checkpoint take them as process_group="
                "dist.new_group(ranks, use_local_synchronization=True)"
            )
            return
        before = _Before(units)
        try:
            with groups_replaced():
                for unit in units:
                    self._replace_groups(unit)
                _follow(units, before)
                self._state.commit()
        except BaseException:
            before.restore()
            self._state.undo()
            raise
        forget_weights(model)

    def _replace_groups(self, unit: Unit) -> None:
        num_changes, made = unit.count_changes(), []
        for move, weights in zip(self._moves, self._weights, strict=True):
            if move.unit is unit:
                owned, plan, spec = move.plan.owned, move.plan.plan, move.plan.spec
                params = [place.param for place in move.places]
                made.append(make_over(params, owned, plan, spec, move.like, weights))
        unit.set_groups(made)
        # A graph that was kept (retain_graph=True) reads the memory of the old groups: its next backward is refused.
        made[0].freshness.num_changes += num_changes


class _Left(StepHooks[Unit, Call]):
    """Refuses forwards of a model whose weights went to other ranks."""

    def on_root_forward(self, unit: Unit, module: nn.Module) -> None:
        """Refuse the forward: ``StateError``."""
        raise StateError(
            f"unit {unit.name!r}: reshard_ moved this model to a mesh without this rank, so it cannot be used here. "
            "fix: end this process, or build a new model"
        )


class _Before:
    """The state that ``commit`` changes, for restoring it."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.groups = [(unit, unit.groups) for unit in units]
        self.roots = [(root, root.units()) for root in {id(unit.root): unit.root for unit in units}.values()]
        # The same rows in the same memory as the parameters have now.
        self._values = {
            id(group): [param.with_local(param._local_tensor) for param in group.fsdp_params.sharded_params]  # type: ignore[attr-defined]  # they are sharded
            for _, groups in self.groups
            for group in groups
        }

    def restore(self) -> None:
        """Put everything back."""
        for root, members in self.roots:
            root.adopt(members)
        for unit, groups in self.groups:
            unit.set_groups(groups)
            for group in groups:
                restore_group(group, self._values[id(group)])
                group.fsdp_params.module_infos.register()
        _attend([unit for unit, _ in self.groups])


def _follow(units: Sequence[Unit], before: _Before) -> None:
    """Make roots of the new groups, with the settings of the old ones, and everything that knows groups follow."""
    sizes = {
        id(unit): next((g.weights.post_forward.axis.size for g in groups if g.weights.post_forward is not None), None)
        for unit, groups in before.groups
    }
    for unit in units:
        for group in unit.groups:
            group.fsdp_params.module_infos.register()
    for old, members in before.roots:
        outermost = old.outermost()
        if outermost is not None:
            attach_root(outermost, members)
            if old.order is not None:
                outermost.root.order = order_of(outermost.root, old.order.units())
    for unit in units:
        choice = unit.reshard_after_forward
        reshard_to(unit, sizes[id(unit)] if sizes[id(unit)] is not None else choice)
    _attend(units)


def _attend(units: Sequence[Unit]) -> None:
    for unit in units:
        watch_inner_modules([m for reference in unit.modules if (m := reference()) is not None], unit)
        update_gradient_buffers(unit)
