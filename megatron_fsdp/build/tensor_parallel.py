"""Parameters that are DTensors over tensor- or expert-parallel axes, sharded over data-parallel axes as well.

The engine lays out this rank's part of such a parameter like any whole tensor. Only the parameters that users see are
DTensors: over the parameter's own mesh while gathered, over (own axes, data-parallel axes) while sharded. The own axes
come first because the parameter was cut along them first.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from dbuffer.mesh import MeshAxis, mesh_axes
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.mesh import ShardingTarget, part_of_mesh

__all__ = ["TensorParallel", "tensor_parallel_of"]


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """The placement of a parameter on its own mesh, in addition to the data-parallel mesh.

    Attributes:
        mesh: of the axes that are not data-parallel. placements: one per axis of it, ``Replicate`` or ``Shard``.
        shape, stride: of the whole parameter. data_axes: names of the data-parallel axes of the root mesh.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    data_axes: tuple[str, ...]

    @property
    def key(self) -> tuple[int, tuple[Placement, ...]]:
        """The properties that all parameters of a group share."""
        return (id(self.mesh), self.placements)

    @property
    def sharded_axes(self) -> list[MeshAxis]:
        """The axes whose ranks hold different elements."""
        axes = mesh_axes(self.mesh)
        return [axis for axis, placement in zip(axes, self.placements, strict=True) if isinstance(placement, Shard)]

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor that all ranks hold alike."""
        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()

    def gathered(self, local: torch.Tensor) -> DTensor:
        """Return this rank's part, whole along the data-parallel axes, as the DTensor that compute uses."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient, placed like the parameter.

        Backward may produce partial sums, or a replica where the parameter is sharded; all ranks of the mesh call this
        in the same order.
        """
        if not isinstance(gradient, DTensor):
            return gradient
        if tuple(gradient.placements) != self.placements:
            gradient = gradient.redistribute(placements=self.placements)
        return gradient.to_local()

    def as_sharded(self, rows: DTensor) -> DTensor:
        """Return the sharded parameter: ``rows``, this rank's part over the data-parallel axes, under all axes."""
        mesh = _combined_mesh(self.mesh, rows.device_mesh, self.data_axes)
        placements = (*self.placements, *rows.placements)
        return FlatDTensor.from_local(
            rows.to_local(), mesh, placements, run_check=False, shape=self.shape, stride=self.stride
        )


def tensor_parallel_of(name: str, parameter: torch.Tensor, target: ShardingTarget | None) -> TensorParallel | None:
    """Return the existing sharding of a parameter; None for a plain tensor.

    Args:
        target: over what ``fully_shard`` shards. A parameter whose mesh has these axes too must be replicated along
            them.
    Raises:
        ConfigError: the meshes are no slices of one named mesh, or a placement that cannot be sharded further.
    """
    if target is None or not isinstance(parameter, DTensor):
        return None
    where = f"parameter {name!r}, a DTensor with placements {tuple(parameter.placements)} on {parameter.device_mesh},"
    taken = target.axis_names
    names = parameter.device_mesh.mesh_dim_names or ()
    if not taken or not names or parameter.device_mesh._get_root_mesh() != target.root:
        raise ConfigError(
            f"{where} can be sharded over data-parallel axes only if both meshes are slices of one mesh with named "
            f"axes; the data-parallel mesh here is {target.mesh}. fix: mesh = init_device_mesh(..., mesh_dim_names="
            "('dp', 'tp')); parallelize_module(m, mesh['tp'], ...); fully_shard(m, mesh=mesh['dp'])"
        )
    for axis, placement in zip(names, parameter.placements, strict=True):
        if axis in taken and not isinstance(placement, Replicate):
            raise ConfigError(
                f"{where} is sharded over the data-parallel axis {axis!r} already. fix: replicate it there"
            )
        if type(placement) not in (Replicate, Shard):
            raise ConfigError(f"{where} has placement {placement!r} on axis {axis!r}. fix: use Replicate or Shard")
    kept = [position for position, axis in enumerate(names) if axis not in taken]
    if not kept:
        raise ConfigError(f"{where} has only data-parallel axes. fix: give fully_shard the plain parameter")
    mesh = parameter.device_mesh
    if len(kept) < len(names):
        mesh = part_of_mesh(mesh, tuple((names[position],) for position in kept))
    placements = tuple(parameter.placements[position] for position in kept)
    return TensorParallel(mesh, placements, parameter.shape, parameter.stride(), target.axis_names)


# Keyed by the identities of two meshes; the entry is removed when either is collected.
_COMBINED: dict[tuple[int, int], DeviceMesh] = {}


def _combined_mesh(own: DeviceMesh, data: DeviceMesh, data_axes: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh whose first axes are ``own``'s and whose last are ``data``'s.

    ``data`` has the data-parallel axes of the root, some of them perhaps flattened into one.
    """
    key = (id(own), id(data))
    if key not in _COMBINED:
        root, first = own._get_root_mesh(), tuple(own.mesh_dim_names or ())
        in_root = [name for name in root.mesh_dim_names or () if name in (*first, *data_axes)]
        ranks = root[tuple(in_root)].mesh.permute([in_root.index(name) for name in (*first, *data_axes)])
        ranks = ranks.reshape(*own.mesh.shape, *data.mesh.shape)
        groups = [mesh.get_group(axis) for mesh in (own, data) for axis in range(mesh.ndim)]
        last = data.mesh_dim_names or ("_".join(data_axes),)
        _COMBINED[key] = DeviceMesh.from_group(groups, own.device_type, mesh=ranks, mesh_dim_names=(*first, *last))
        for mesh in (own, data):
            weakref.finalize(mesh, _COMBINED.pop, key, None)
    return _COMBINED[key]
