"""Axes of a DeviceMesh: their sizes, this rank's coordinates, and three communicators per axis."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.errors import MeshError
from dbuffer_kernels.switches import is_off

_AXES: dict[int, tuple[MeshAxis, ...]] = {}
# Keyed by gather group, not by mesh: different mesh objects over the same ranks share one entry.
_REDUCE_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_OPERATOR_AXES: weakref.WeakKeyDictionary[dist.ProcessGroup, MeshAxis] = weakref.WeakKeyDictionary()
_FLATTENED: dict[int, DeviceMesh] = {}
_NEIGHBOURS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, MeshAxis]] = weakref.WeakKeyDictionary()
# How many groups ``new_group`` has made of each list of ranks, keyed by the job's group.
_NUM_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class MeshAxis:
    """An axis of a mesh, as seen from this rank.

    Attributes:
        name: the mesh's name for the axis, or ``"axis 0"`` if it has none.
        size: number of ranks along the axis. rank: this rank's position among them.
        gather_group: the mesh's own communicator, used for all-gathers.
        has_separate_reduce_group: whether reductions use a separate communicator.
    """

    name: str
    size: int
    rank: int
    gather_group: dist.ProcessGroup
    has_separate_reduce_group: bool = True

    @functools.cached_property
    def reduce_group(self) -> dist.ProcessGroup:
        """A second communicator over the same ranks, for reductions; created on first use, by all ranks together.

        Reductions wait for gradients, while gathers run ahead. On one communicator a waiting reduction would delay the
        gathers, and every rank would have to interleave the two in the same order.
        """
        if not self.has_separate_reduce_group or is_off("separate-reduce"):
            return self.gather_group
        known: dist.ProcessGroup | None = _REDUCE_GROUPS.get(self.gather_group)
        if known is None:
            ranks = dist.get_process_group_ranks(self.gather_group)
            known = _REDUCE_GROUPS[self.gather_group] = new_group(
                ranks, f"reduce over {self.name}", like=self.gather_group
            )
        return known

    @functools.cached_property
    def of_operators(self) -> MeshAxis:
        """The same ranks with a third communicator, created on first use, by all ranks together.

        Operators that users call on sharded tensors communicate over it. If only one rank calls such an operator, that
        rank waits; its collective cannot pair with another rank's gather or reduction.
        """
        if self.size == 1:
            return self
        known: MeshAxis | None = _OPERATOR_AXES.get(self.gather_group)
        if known is None:
            ranks = dist.get_process_group_ranks(self.gather_group)
            group = new_group(ranks, f"operators over {self.name}", like=self.gather_group, connects_later=True)
            known = MeshAxis(self.name, self.size, self.rank, group, has_separate_reduce_group=False)
            _OPERATOR_AXES[self.gather_group] = known
        return known

    def separate_reductions(self, enable: bool) -> None:
        """Set ``has_separate_reduce_group``, from the next reduction on."""
        self.has_separate_reduce_group = enable
        for made in ("reduce_group", "reduces_by_gloo"):
            self.__dict__.pop(made, None)

    @functools.cached_property
    def gathers_by_gloo(self) -> bool:
        """True if gloo serves CPU tensors on the communicator for gathers."""
        return _is_gloo(self.gather_group)

    @functools.cached_property
    def reduces_by_gloo(self) -> bool:
        """True if gloo serves CPU tensors on the communicator for reductions."""
        return _is_gloo(self.reduce_group)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return any(name in ("gloo", "cpu:gloo") for name in dist.get_backend_config(group).split(","))


def cannot_send_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether a group has backends but none for CPU tensors. Groups written in Python list no backends."""
    known = group._device_types
    return bool(known) and torch.device("cpu") not in known


def make_groups(axes: Iterable[MeshAxis]) -> None:
    """Create the communicators for reductions and operators now, at a point that all ranks reach."""
    for axis in axes:
        if axis.size > 1:
            # Reading the properties creates them.
            _ = axis.reduce_group, axis.of_operators


def new_group(
    ranks: list[int],
    description: str,
    *,
    backend: str | None = None,
    like: dist.ProcessGroup | None = None,
    connects_later: bool = False,
) -> dist.ProcessGroup:
    """Make a communicator over ``ranks``, with the timeout of the job's own group. All of ``ranks`` must call this.

    With NCCL, the communicator takes buffers on each GPU. It gets the options (stream priority, ``ncclConfig_t``) of
    ``like``, or of the job's group if ``like`` is None.

    Other ranks need not call this. The name under which the ranks find each other must therefore follow from what all
    of them know: the list of ranks, and how many groups of exactly these ranks were made before. ``dist.new_group``
    instead counts all groups of the process (or, without ``use_local_synchronization``, all groups ever made). That
    count differs between ranks once some of them have made another group, and each would wait for a different name.

    Args:
        connects_later: connect at the first collective instead of now, for backends whose communicators take device
            memory (NCCL).
    """
    world: Any = dist.group.WORLD
    timeout = job_timeout()
    if callable(getattr(world, "new_group", None)):
        # A process group class written in Python makes groups in its own way.
        made: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=description
        )
        return made
    c10d: Any = dist.distributed_c10d
    kind, store = c10d._world.pg_map[world]
    backend = dist.Backend(backend or kind)
    group: dist.ProcessGroup
    timeout = timeout or c10d._get_default_timeout(backend)
    options = None if backend == "gloo" else _nccl_options(world if like is None else like, timeout)
    with _without_splitting(world, 0 if connects_later else len(ranks)) as device:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            backend,
            store,
            _unique_name(world, ranks),
            backend_options=options,
            timeout=timeout,
            device_id=None if connects_later else device,
            group_desc=description,
        )
    c10d._world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
    return group


def _nccl_options(group: dist.ProcessGroup, timeout: datetime.timedelta) -> Any:
    """Return a copy of the options that the user gave a group's NCCL communicator; None if it has none."""
    for device in group._device_types:
        found: Any = getattr(group._get_backend(device), "options", None)
        if type(found).__qualname__.startswith("ProcessGroupNCCL."):
            options: Any = type(found)(is_high_priority_stream=found.is_high_priority_stream)
            options.config = found.config
            # PyTorch warns if this timeout differs from the group's.
            options._timeout = timeout
            return options
    return None


def _unique_name(world: dist.ProcessGroup, ranks: list[int]) -> str:
    made = _NUM_MADE.setdefault(world, Counter())
    made[tuple(ranks)] += 1
    # Hashed, because the name is part of every key in the job's store, and there may be thousands of ranks.
    listed = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    # Group names are global to the process, and a virtual world may exist next to the job's.
    return f"dbuffer {getattr(world, 'prefix', '')}{listed} {made[tuple(ranks)]}"


@contextlib.contextmanager
def _without_splitting(world: Any, num_ranks: int) -> Iterator[torch.device | None]:
    """Keep PyTorch from splitting the job's communicator for a new group of only some of its ranks.

    PyTorch splits a default group that is bound to a device (``init_process_group(device_id=...)``) to make each new
    group. All ranks of the job would have to take part in the split, including those outside the new group.
    """
    device: torch.device | None = world.bound_device_id
    if device is not None and num_ranks < world.size():
        world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device


def job_timeout() -> datetime.timedelta | None:
    """Return the timeout of collectives of the job's own group; None if it is unknown."""
    return None if dist.group.WORLD is None else _timeout_of(dist.group.WORLD)


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    for device in group._device_types:
        # PyTorch has no public name for the timeout, and the fake backend has no timeout.
        options = getattr(group._get_backend(device), "options", None)
        timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def mesh_axes(mesh: DeviceMesh) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh. The same objects are returned as long as the mesh's process groups live.

    Raises:
        MeshError: this rank is not part of the mesh, the mesh orders ranks differently from its process groups, or the
            process groups were destroyed.
    """
    key = id(mesh)
    known = _AXES.get(key)
    if known is not None and all(is_alive(axis.gather_group) for axis in known):
        return known
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(f"rank {dist.get_rank()} is not part of {mesh}. fix: call this only on the ranks of the mesh")
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    axes = tuple(
        MeshAxis(names[axis], mesh.size(axis), coordinate[axis], _group_of(mesh, axis)) for axis in range(mesh.ndim)
    )
    for axis in axes:
        _check_order(axis, mesh)
    if key not in _AXES:
        weakref.finalize(mesh, _AXES.pop, key, None)
    _AXES[key] = axes
    return axes


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a process group still exists."""
    world: Any = dist.distributed_c10d._world
    return group in world.pg_map


def _group_of(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    try:
        group = mesh.get_group(axis)
    except (KeyError, RuntimeError) as error:
        raise MeshError(
            f"{mesh}: its process groups were destroyed ({error}). fix: after init_process_group, call "
            "init_device_mesh again, and shard the model over the new mesh"
        ) from error
    _inherit_timeout(group)
    return group


def _inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a group that ``init_device_mesh`` made the job's timeout.

    ``init_device_mesh`` uses the backend's default, 30 minutes for gloo, and ignores the timeout given to
    ``init_process_group``.
    """
    wanted, found = job_timeout(), _timeout_of(group)
    if wanted is None or found == wanted or not group.group_desc.startswith("mesh_"):
        return
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if found == dist.distributed_c10d._get_default_timeout(backend.name()):
            backend._set_default_timeout(wanted)


def _check_order(axis: MeshAxis, mesh: DeviceMesh) -> None:
    ranks = dist.get_process_group_ranks(axis.gather_group)
    if len(ranks) == axis.size and ranks[axis.rank] != dist.get_rank():
        raise MeshError(
            f"{mesh}: along axis {axis.name!r} this rank, {dist.get_rank()}, has place {axis.rank}, but its process "
            f"group counts {ranks}, so shards would be mixed up. fix: list the ranks of the mesh in ascending order. "
            "If this came from torch.load: a sharded tensor that torch.save wrote on one rank holds that rank's "
            "rows alone, so no other rank can load it. fix: save_checkpoint(...) on every rank, or torch.save of "
            "full_state_dict(model) on rank 0"
        )


def flattened_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh over all ranks of a mesh, outermost axis slowest. All ranks make it together, once.

    Raises:
        MeshError: the ranks of the mesh are not in ascending order.
    """
    if mesh.ndim == 1:
        return mesh
    key = id(mesh)
    known = _FLATTENED.get(key)
    if known is None or not is_alive(known.get_group()):
        ranks: list[int] = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise MeshError(
                f"{mesh}: sharding one buffer over several axes needs ranks in ascending order, found {ranks}. "
                "fix: list the ranks of the mesh in ascending order"
            )
        group = new_group(ranks, "flattened mesh")
        if known is None:
            weakref.finalize(mesh, _FLATTENED.pop, key, None)
        _FLATTENED[key] = DeviceMesh.from_group(group, mesh.device_type)
    return _FLATTENED[key]


def neighbours(axis: MeshAxis, size: int) -> MeshAxis:
    """Return this rank's part of an axis that is cut into consecutive runs of ``size`` ranks.

    All ranks of the axis make the communicators together, once per group and size.

    Raises:
        MeshError: ``size`` does not divide the size of the axis.
    """
    if size < 1 or axis.size % size:
        raise MeshError(
            f"axis {axis.name!r} of {axis.size} ranks cannot be cut into runs of {size}. fix: use a size that divides "
            f"{axis.size}"
        )
    if size == axis.size:
        return axis
    made = _NEIGHBOURS.setdefault(axis.gather_group, {})
    if size not in made:
        first = axis.rank // size * size
        ranks = dist.get_process_group_ranks(axis.gather_group)[first : first + size]
        name = f"{axis.name}, runs of {size}"
        group = new_group(ranks, name, like=axis.gather_group)
        made[size] = MeshAxis(name, size, axis.rank - first, group)
    return made[size]


def axis_index(mesh: DeviceMesh, axis: int | str) -> int:
    """Return the position of an axis given by name or number; negative numbers count from the last axis.

    Raises:
        MeshError: the mesh has no such axis.
    """
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str):
        if axis in names:
            return names.index(axis)
        raise MeshError(
            f"the mesh has no axis {axis!r}. fix: use one of "
            f"{tuple(names) or 'its numbers, because its axes have no names'}"
        )
    if -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise MeshError(f"axis {axis} is outside the mesh, which has {mesh.ndim} axes. fix: 0 to {mesh.ndim - 1}")
