"""What the engine needs to know of a DeviceMesh: sizes, this rank's coordinate, and two communicators per axis."""

from __future__ import annotations

import datetime
import weakref
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.errors import MeshError

__all__ = ["MeshAxis", "axis_index", "flattened_mesh", "mesh_axes", "neighbours", "new_group"]

_AXES: dict[int, tuple[MeshAxis, ...]] = {}
# By gather group, not by mesh: meshes over the same ranks (slices of one, or made twice) share it.
_REDUCE_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_FLATTENED: dict[int, DeviceMesh] = {}
_NEIGHBOURS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, MeshAxis]] = weakref.WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class MeshAxis:
    """One direction of a mesh, as seen from this rank.

    Attributes:
        name: the mesh's name for the axis, or ``"axis 0"`` where it has none.
        size: number of ranks along it. rank: this rank's place among them.
        gather_group: the communicator of the mesh, used by all-gathers.
        has_separate_reduce_group: whether reductions run on a communicator of their own.
    """

    name: str
    size: int
    rank: int
    gather_group: dist.ProcessGroup
    has_separate_reduce_group: bool = True

    @property
    def reduce_group(self) -> dist.ProcessGroup:
        """A second communicator over the same ranks, created on first use (by all of them together).

        Reductions wait for gradients, gathers run ahead of them; on one communicator the slower queue would hold up
        the other, and both queues would have to interleave alike on every rank.
        """
        if not self.has_separate_reduce_group:
            return self.gather_group
        known: dist.ProcessGroup | None = _REDUCE_GROUPS.get(self.gather_group)
        if known is None:
            ranks = dist.get_process_group_ranks(self.gather_group)
            known = _REDUCE_GROUPS[self.gather_group] = new_group(ranks, f"reduce over {self.name}")
        return known


def new_group(ranks: list[int], description: str, *, backend: str | None = None) -> dist.ProcessGroup:
    """Make a communicator over some ranks, all of which call it; it gives up when the job's own group would.

    ``dist.new_group`` would take the backend's default timeout instead, 30 minutes for gloo.
    """
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=_job_timeout(), backend=backend, use_local_synchronization=True, group_desc=description
    )
    return group


def _job_timeout() -> datetime.timedelta | None:
    group = dist.group.WORLD
    if group is None:
        return None
    for device in group._device_types:
        # PyTorch has no public name for it, and the fake backend has none at all.
        options = getattr(group._get_backend(device), "options", None)
        timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def mesh_axes(mesh: DeviceMesh) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh, one object per mesh and axis for the mesh's life.

    Raises:
        MeshError: this rank is not part of the mesh.
    """
    key = id(mesh)
    if key not in _AXES:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {dist.get_rank()} is not part of {mesh}; call this only on the ranks of the mesh")
        names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
        _AXES[key] = tuple(
            MeshAxis(names[axis], mesh.size(axis), coordinate[axis], mesh.get_group(axis)) for axis in range(mesh.ndim)
        )
        weakref.finalize(mesh, _AXES.pop, key, None)
    return _AXES[key]


def flattened_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh over all ranks of a mesh, outermost axis slowest; made once, by all of its ranks together.

    Raises:
        MeshError: the ranks of the mesh are not in ascending order.
    """
    if mesh.ndim == 1:
        return mesh
    key = id(mesh)
    if key not in _FLATTENED:
        ranks: list[int] = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise MeshError(
                f"{mesh}: sharding one buffer over several axes needs ranks in ascending order, found {ranks}"
            )
        group = new_group(ranks, "flattened mesh")
        _FLATTENED[key] = DeviceMesh.from_group(group, mesh.device_type)
        weakref.finalize(mesh, _FLATTENED.pop, key, None)
    return _FLATTENED[key]


def neighbours(axis: MeshAxis, size: int) -> MeshAxis:
    """Return the part of an axis that holds this rank when it is cut into runs of ``size`` ranks.

    Made once for each group and size, by all ranks of the axis together.

    Raises:
        MeshError: ``size`` does not divide the axis.
    """
    if size < 1 or axis.size % size:
        raise MeshError(f"axis {axis.name!r} of {axis.size} ranks cannot be cut into runs of {size}")
    if size == axis.size:
        return axis
    made = _NEIGHBOURS.setdefault(axis.gather_group, {})
    if size not in made:
        first = axis.rank // size * size
        ranks = dist.get_process_group_ranks(axis.gather_group)[first : first + size]
        name = f"{axis.name}, runs of {size}"
        group = new_group(ranks, name)
        made[size] = MeshAxis(name, size, axis.rank - first, group)
    return made[size]


def axis_index(mesh: DeviceMesh, axis: int | str) -> int:
    """Return the position of an axis given by name or number (negative counts from the last).

    Raises:
        MeshError: the mesh has no such axis.
    """
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str):
        if axis in names:
            return names.index(axis)
        raise MeshError(f"the mesh has no axis {axis!r}; its axes are {tuple(names) or 'unnamed, use their numbers'}")
    if -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise MeshError(f"axis {axis} is outside the mesh, which has {mesh.ndim} axes")
