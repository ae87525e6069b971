"""Mesh: find the device mesh that a unit is sharded over."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dbuffer import Flat
from dbuffer.mesh import is_alive
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.launch import join_job
from megatron_fsdp.policy.strategy import Placements

__all__ = [
    "DataParallelMeshDims", "ShardingTarget", "buffer_device", "part_of_mesh", "sharding_target", "warn_of_one_queue",
]  # fmt: skip


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel axes of a larger mesh, for ``fully_shard(dp_mesh_dims=...)``.

    Args:
        shard: the axis to shard weights over, or several axes, which are flattened into one.
        replicate: the axis of replicas, or several axes, which are flattened into one.
    Raises:
        ConfigError: no axis is named, or an axis is named twice.

    Example:
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicas", "shards", "tp"))
        dims = DataParallelMeshDims(shard="shards", replicate="replicas")
        fully_shard(model, mesh, dp_mesh_dims=dims)
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = (*self.replicate_names, *self.shard_names)
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{self}. fix: name at least one axis, and each axis once")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes of ``shard``, as a tuple."""
        return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes of ``replicate``, as a tuple."""
        return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


@dataclass(frozen=True, slots=True)
class ShardingTarget:
    """The mesh and the strategy that a unit is sharded with.

    Attributes:
        mesh: a mesh of only the data-parallel axes. placements: the strategy on it.
        root: the mesh that these axes belong to. axis_names: their names there; several may be flattened into one axis
            of ``mesh``.
    """

    mesh: DeviceMesh
    placements: Placements
    root: DeviceMesh
    axis_names: tuple[str, ...]

    @property
    def num_weight_shards(self) -> int:
        """The number of shards of resting weights."""
        placed = zip(self.mesh.shape, self.placements.parameter, strict=True)
        return math.prod(size for size, placement in placed if placement == Flat())


def sharding_target(mesh: DeviceMesh | None, placements: Placements | None, dp_mesh_dims: Any) -> ShardingTarget:
    """Return mesh and strategy for the arguments of ``fully_shard``.

    Raises:
        ConfigError: the mesh lacks a named axis, or its axes have no obvious meaning.
    """
    mesh = _default_mesh() if mesh is None else mesh
    root, names = mesh._get_root_mesh(), None
    if dp_mesh_dims is not None:
        mesh, names = _named_axes(mesh, dp_mesh_dims), (*dp_mesh_dims.replicate_names, *dp_mesh_dims.shard_names)
    placements = _default_placements(mesh, dp_mesh_dims) if placements is None else placements
    mesh = _data_parallel_mesh(mesh, placements)
    return ShardingTarget(mesh, placements, root, tuple(mesh.mesh_dim_names or ()) if names is None else names)


def _named_axes(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    known = mesh.mesh_dim_names or ()
    parts = tuple(names for names in (tuple(dims.replicate_names), tuple(dims.shard_names)) if names)
    missing = [name for names in parts for name in names if name not in known]
    if missing:
        raise ConfigError(f"dp_mesh_dims names axes {missing} that the mesh does not have. fix: name its axes, {known}")
    return part_of_mesh(mesh, parts)


# Keyed by `id(mesh)`; the entry is removed when the mesh is collected.
_PARTS: dict[tuple[int, tuple[tuple[str, ...], ...]], DeviceMesh] = {}


def part_of_mesh(mesh: DeviceMesh, parts: tuple[tuple[str, ...], ...]) -> DeviceMesh:
    """Return the mesh of some axes of another mesh; the axes of each part are flattened into one.

    The same object is returned each time, so that the units of a model share it and its communicators.
    """
    key = (id(mesh), parts)
    if key not in _PARTS:
        _PARTS[key] = _make_part(mesh, parts)
        weakref.finalize(mesh, _PARTS.pop, key, None)
    return _PARTS[key]


def _make_part(mesh: DeviceMesh, parts: tuple[tuple[str, ...], ...]) -> DeviceMesh:
    if all(len(names) == 1 for names in parts):
        return mesh[tuple(names[0] for names in parts)]
    flat = [mesh[names] if len(names) == 1 else mesh[names]._flatten() for names in parts]
    if len(flat) == 1:
        return flat[0]
    used = [name for name in mesh.mesh_dim_names or () if any(name in names for names in parts)]
    ranks = mesh[tuple(used)].mesh.permute([used.index(name) for names in parts for name in names])
    return DeviceMesh.from_group(
        [each.get_group() for each in flat],
        mesh.device_type,
        mesh=ranks.reshape([each.size() for each in flat]),
        mesh_dim_names=tuple("_".join(names) for names in parts),
    )


# Keyed by the job's group, because another group needs another mesh. Entries of destroyed groups are deleted
# explicitly: a weak key would never expire, as the mesh refers to its group, and the group's threads would run on.
_DEFAULT_MESHES: dict[dist.ProcessGroup, DeviceMesh] = {}


def _default_mesh() -> DeviceMesh:
    device_type = _device_type()
    if not dist.is_initialized():
        join_job(device_type)
    # Units without a mesh share one, because each new mesh would create its own communicators.
    world: Any = dist.group.WORLD
    for other in [group for group in _DEFAULT_MESHES if group is not world and not is_alive(group)]:
        del _DEFAULT_MESHES[other]
    if world not in _DEFAULT_MESHES:
        _DEFAULT_MESHES[world] = init_device_mesh(device_type, (dist.get_world_size(),))
    return _DEFAULT_MESHES[world]


def _device_type() -> str:
    """Return "cuda" if a GPU is available, unless the job's group was made for CPUs only."""
    if not torch.cuda.is_available():
        return "cpu"
    # gloo also accepts CUDA tensors, through host memory. A user who chose only gloo trains on CPUs.
    pairs = dist.get_backend_config().split(",") if dist.is_initialized() else ["cuda:nccl"]
    backends = dict(pair.split(":") for pair in pairs)
    return "cpu" if backends.get("cuda", "gloo") == "gloo" else "cuda"


def _default_placements(mesh: DeviceMesh, dp_mesh_dims: Any) -> Placements:
    if dp_mesh_dims is not None and not dp_mesh_dims.shard_names:
        return Placements.no_shard(0)
    if mesh.ndim == 1:
        return Placements.optim_grads_params(0)
    if mesh.ndim == 2:
        return Placements.hsdp(0, 1)
    raise ConfigError(
        f"the mesh has {mesh.ndim} axes. fix: pass its data-parallel axes alone, mesh['dp'], or give placements="
    )


def _data_parallel_mesh(mesh: DeviceMesh, placements: Placements) -> DeviceMesh:
    names = mesh.mesh_dim_names or ()
    wanted = [names.index(axis) if axis in names else axis for axis in placements.dp_axes]
    unknown = [axis for axis in wanted if not isinstance(axis, int) or not -mesh.ndim <= axis < mesh.ndim]
    if unknown:
        raise ConfigError(
            f"placements name axes {unknown} that the mesh does not have. fix: name its axes, {names or mesh.ndim}"
        )
    positions = [int(axis) % mesh.ndim for axis in wanted]
    if positions == list(range(mesh.ndim)):
        return mesh
    if positions != sorted(positions) or not names:
        raise ConfigError(
            f"placements use axes {placements.dp_axes} of a mesh with axes {names or mesh.ndim}; a part of a mesh "
            f"needs named axes, outermost first. fix: init_device_mesh(..., mesh_dim_names=...)"
        )
    return mesh[tuple(names[position] for position in positions)]


def buffer_device(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device on a mesh: on GPUs the device bound to the job's group, or else the current one."""
    if mesh.device_type == "cuda":
        world = dist.group.WORLD
        bound = None if world is None else world.bound_device_id
        if bound is not None and bound.type == "cuda":
            # NCCL only supports this device, whatever the current one is.
            return bound
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def warn_of_one_queue(mesh: DeviceMesh) -> None:
    """Warn if the environment gives GPUs a single queue, as some Megatron and Transformer Engine images do."""
    if mesh.device_type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: with one queue to the GPU, gathers and reductions wait for compute and do "
            "not overlap with it. fix: unset CUDA_DEVICE_MAX_CONNECTIONS before the process starts",
            stacklevel=3,
        )
