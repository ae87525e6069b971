"""Agreement: check that all ranks of a mesh make the same units; all-gathers would silently mix up tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.whereabouts import ALARMS, job_store, raise_difference, refuse_after_difference
from megatron_fsdp.checks.rendezvous import meet, report_failure
from megatron_fsdp.engine.hooks import StepHooks
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import Call, Root, Unit, alive
from megatron_fsdp.lifecycle.unit_changes import apply_grad_dtypes

__all__ = ["FirstUse", "Wrapping", "mesh_ranks"]


class Wrapping:
    """One ``fully_shard`` call on all ranks of a mesh: it succeeds on all ranks or on none.

    As a context manager it reports an exception of this rank to the other ranks, which would wait for it otherwise.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._ranks = None if mesh is None else mesh_ranks(mesh)
        self._action, self._is_agreeing = "calls fully_shard", False

    def __enter__(self) -> Wrapping:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        # The exception came from another rank or from a difference, so the other ranks know it.
        if error is None or self._is_agreeing:
            return
        if self._ranks is None:
            self._ranks = tuple(range(dist.get_world_size())) if dist.is_initialized() else ()
        report_failure(self._ranks, self._action, error)

    def begin(self, unit: str, mesh: DeviceMesh) -> None:
        """Set the unit and its ranks, for messages."""
        self._action, self._ranks = f"calls fully_shard on unit {unit!r}", mesh_ranks(mesh)

    def agree(self, unit: str, groups: Sequence[ParameterGroup], reshard_after_forward: object) -> None:
        """Wait until all ranks are here with the same layout.

        Raises:
            MeshError: on every rank, when any two of them differ.
            AgreementError: another rank raised, or did not come.
        """
        assert self._ranks is not None
        self._is_agreeing = True
        meet(
            self._ranks,
            self._action,
            [*_layout(groups), f"reshard_after_forward={reshard_after_forward}"],
            f"unit {unit!r}: the ranks of its mesh lay it out differently",
            "Nothing was sharded by this call. fix: give all ranks the same names, shapes, dtypes, requires_grad, "
            "placements and granularity",
        )
        self._is_agreeing = False


_NUM_COMPARED = 2
"""The last backward in which the order of units is compared; so it is in the forward that follows."""
_MOST_COMPARED = 1 << 12


class FirstUse(StepHooks[Unit, Call]):
    """Compare the units of all ranks until the third backward of a root.

    Before the first collective the ranks agree on the list of units. After that each rank writes the unit of each
    collective to the job's store before it issues it. After the third backward this check detaches itself.

    Not the first forward: where weights rest whole, one rank may run the model alone.

    Attributes:
        tokens: a name of the agreement of each set of ranks, which nothing else has in the job's store; empty where
            this process is the only one.
    """

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, ...], str] = {}
        self._has_agreed = False
        # How many collectives of each kind were compared so far, on each set of ranks.
        self._counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        # The sets of ranks that each unit communicates with.
        self._known_ranks: weakref.WeakKeyDictionary[Unit, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()

    def before_gather(self, unit: Unit) -> None:
        """A unit is about to be gathered; raises as ``agree`` and ``_compare`` do."""
        if not self._has_agreed:
            apply_grad_dtypes(unit)
        if not all(group.weights.rests_whole for group in unit.groups):
            self.agree(unit.root)
            self._compare("gather", unit)

    def before_reduce(self, unit: Unit) -> None:
        """Gradients of a unit are about to be reduced, or kept; raises as ``agree`` and ``_compare`` do."""
        if unit.requires_gradient_sync:
            self.agree(unit.root)
            self._compare("reduction", unit)

    def _compare(self, kind: str, unit: Unit) -> None:
        """Compare the unit of the next collective with that of the first rank, through the job's store.

        Takes one request to compare and one to look for a verdict, without waiting. A rank that differs does not issue
        the collective: the other ranks wait for it and find its verdict (``dbuffer.whereabouts``).

        Raises:
            MeshError: another rank issued a collective of another unit in this place, or has raised this.
        """
        if unit.root.backward.number > _NUM_COMPARED:
            self._end(unit.root)
            return
        store: Any = job_store()
        for ranks, token in self.tokens.items():
            if not token or ranks not in self._ranks_of(unit):
                continue
            self._counts[kind, ranks] += 1
            number = self._counts[kind, ranks]
            me, alarm = dist.get_rank(), _alarm_of(token)
            if store.check([alarm]):
                raise_difference(store.get(alarm).decode())
            first = store.compare_set(f"{token} {kind} {number}", "", f"{me} {unit.name}").decode()
            rank, _, name = first.partition(" ")
            if name != unit.name:
                words = _other_order(f"{kind} number {number}", (rank, name), (str(me), unit.name))
                store.set(alarm, words)
                raise_difference(words)
            if number >= _MOST_COMPARED:
                # A model that runs no backward.
                self._end(unit.root)

    def _ranks_of(self, unit: Unit) -> set[tuple[int, ...]]:
        known = self._known_ranks.get(unit)
        if known is None:
            known = self._known_ranks[unit] = {mesh_ranks(group.spec.mesh) for group in unit.groups}
        return known

    def _end(self, root: Root) -> None:
        root.set_hooks(hook for hook in root.hooks if hook is not self)
        ALARMS.difference_update(map(_alarm_of, self.tokens.values()))
        store: Any = job_store()
        for ranks, token in self.tokens.items():
            # The last rank deletes the compared keys, which no rank reads any more.
            if token and store.add(f"{token} compared", 1) == len(ranks):
                for kind in ("gather", "reduction"):
                    for number in range(1, self._counts[kind, ranks] + 1):
                        store.delete_key(f"{token} {kind} {number}")
                store.delete_key(f"{token} compared")

    def agree(self, root: Root) -> None:
        """Wait until all ranks are about to use the same units, with the same settings.

        Raises:
            MeshError: on every rank, when any two of them differ.
            AgreementError: another rank did not come.
        """
        if self._has_agreed:
            return
        refuse_after_difference()
        outermost, units = root.outermost(), root.units()
        for unit in units:
            apply_grad_dtypes(unit)
        name = (units[0] if outermost is None else outermost).name
        # Sorted, so that ranks which are in several of them do not wait for each other in a circle.
        for ranks in sorted({mesh_ranks(group.spec.mesh) for unit in units for group in unit.groups}):
            self.tokens[ranks] = meet(
                ranks,
                f"runs the model {name!r}",
                [line for unit in units for line in _settings(unit, ranks)],
                f"model {name!r}: the ranks of a mesh have other units, or units with other settings",
                "fix: give all ranks the same units with the same settings",
            )
        self._has_agreed = True
        ALARMS.update(_alarm_of(token) for token in self.tokens.values() if token)
        if not any(self.tokens.values()):
            self._end(root)


def _alarm_of(token: str) -> str:
    return f"{token} differs"


def _other_order(place: str, first: tuple[str, str], second: tuple[str, str]) -> str:
    sides = " and ".join(f"of {name!r} on rank {rank}" for rank, name in sorted((first, second)))
    return (
        f"the ranks of a mesh run other units, or in another order: {place} is {sides}. Their weights would be "
        "mixed up. fix: root.set_forward_order() where a rank's own data does not need a unit (an expert without "
        "tokens, an image tower without images, a dropped layer); `with megatron_fsdp.unsharded(model):` around "
        "evaluation or generation of different lengths; `with megatron_fsdp.join(model, batches) as joined:` for "
        "different numbers of batches. Otherwise run the same units in the same order on all ranks"
    )


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a mesh in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _layout(groups: Sequence[ParameterGroup]) -> Iterator[str]:
    if not groups:
        yield "no parameters of its own"
    for group in groups:
        use = "trained" if group.requires_grad else "frozen"
        for name, param in group.parameters.items():
            yield f"{name!r} {tuple(param.shape)} of {param.dtype}, {use}"
    for group in groups:
        yield from group.weights.agreed()
        yield f"the plan {group.plan.fingerprint()} with {group.spec.placements} in {group.spec.dtypes}"


def _settings(unit: Unit, ranks: tuple[int, ...]) -> Iterator[str]:
    plans = []
    for group in unit.groups:
        if mesh_ranks(group.spec.mesh) == ranks:
            part, dtypes = group.weights.post_forward, group.spec.dtypes
            kept = 0 if part is None else part.axis.size
            which = str(dtypes.reduce), str(dtypes.main_grad)
            frozen = [name for name, each in group.parameters.items() if not each.requires_grad]
            plans.append(
                f"plan {group.plan.fingerprint()}, {f'frozen: {frozen}' if frozen else 'all trained'}, reduced in "
                f"{which[0]}, gradients in {which[1]}" + (f", parts of {kept} ranks kept" if kept else "")
            )
    order = unit.root.order
    place = "" if order is None else f"place {order.place_of(unit)} in the forward order; "
    if plans:
        yield (
            f"unit {unit.name!r} ({place}{'; '.join(plans)}; reshard_after_forward {unit.reshard_after_forward}, "
            f"reshard_after_backward {unit.reshard_after_backward}, unshard_in_backward {unit.unshards_in_backward}, "
            f"forward prefetch {[other.name for other in alive(unit.forward_prefetch)]}, "
            f"backward prefetch {[other.name for other in alive(unit.backward_prefetch)]})"
        )
