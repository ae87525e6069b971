"""Megatron's process groups as meshes, and which elements of a sharded weight this rank counts; imports no Megatron."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.collectives.all_reduce import all_reduce
from dbuffer.mesh import MeshAxis
from megatron_fsdp.errors import ConfigError

__all__ = ["ModelGroups", "hybrid_mesh", "is_cut", "is_expert", "rank_in", "reduce_over", "size_of"]


@dataclass(frozen=True)
class ModelGroups:
    """This rank's process groups of Megatron; None if Megatron has no such group.

    Attributes:
        data: ranks with the same part of a dense weight, including context-parallel ranks (``dp_cp``).
        expert_data: ranks with the same part of the same experts (``expt_dp``).
        data_inner, expert_data_inner: with hybrid sharding, the ranks of this rank's optimizer instance, for dense
            weights and for experts.
        outer: with hybrid sharding, the ranks at the same position of each instance.
        tensor, expert_tensor: tensor-parallel ranks of dense weights and of experts.
        expert: expert-parallel ranks.
        pipeline: pipeline stages.
        model: ranks that together hold one replica of the dense weights (``mp``, tensor times pipeline).
        embedding: stages that hold the same embedding; None on other stages.
    """

    data: ProcessGroup
    expert_data: ProcessGroup | None = None
    data_inner: ProcessGroup | None = None
    expert_data_inner: ProcessGroup | None = None
    outer: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None
    expert: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    model: ProcessGroup | None = None
    embedding: ProcessGroup | None = None

    def dense_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh that dense weights are sharded over: one axis, or (outer, inner)."""
        return _mesh(self.data, self.outer, self.data_inner, device_type)

    def expert_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return the mesh that experts are sharded over; None: the same mesh as dense weights."""
        if self.expert_data is None and size_of(self.expert) * size_of(self.expert_tensor) > 1:
            raise ConfigError(
                "experts are spread over ranks, but pg_collection has no group of ranks with the same experts. fix: "
                "set pg_collection.expt_dp"
            )
        ranks_of = dist.get_process_group_ranks
        if self.expert_data is None or ranks_of(self.expert_data) == ranks_of(self.data):
            return None
        return _mesh(self.expert_data, self.outer, self.expert_data_inner, device_type)

    @property
    def is_data_parallel_only(self) -> bool:
        """Return whether all ranks have the same full weights."""
        return all(size_of(group) == 1 for group in (self.tensor, self.expert_tensor, self.expert, self.pipeline))

    def scopes(self) -> list[ProcessGroup]:
        """Return the groups whose all-reduces, one after the other, sum a number over all ranks."""
        wanted = (self.data, self.model) if self.model is not None else (self.data, self.tensor, self.pipeline)
        return [group for group in wanted if group is not None and group.size() > 1]

    def tied(self, model: nn.Module) -> list[nn.Parameter]:
        """Return this rank's parameters that another pipeline stage shares: the tied embedding, or none."""
        if size_of(self.embedding) == 1:
            return []
        return [parameter for parameter in model.parameters() if getattr(parameter, "shared_embedding", False)]

    def show_main_grads(self, model: nn.Module) -> None:
        """Set ``main_grad`` of tied parameters to their final gradients, for ``finalize_model_grads``."""
        for parameter in self.tied(model):
            parameter.main_grad = parameter.grad  # type: ignore[attr-defined]

    def forget_main_grads(self, model: nn.Module) -> None:
        """Remove the ``main_grad`` attributes that ``show_main_grads`` set."""
        for parameter in self.tied(model):
            vars(parameter).pop("main_grad", None)

    def counts(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank counts a parameter in sums over model-parallel ranks, which may hold copies.

        As in Megatron's norms, a weight that is equal on all tensor-parallel ranks counts on the first one, and a tied
        embedding counts on the first stage.
        """
        if getattr(parameter, "shared", False):
            return False
        if is_cut(parameter):
            return True
        return rank_in(self.expert_tensor if is_expert(parameter) else self.tensor) == 0


@functools.lru_cache(maxsize=64)
def _mesh(whole: ProcessGroup, outer: ProcessGroup | None, inner: ProcessGroup | None, device_type: str) -> DeviceMesh:
    # Cached, so that the chunks of a pipeline stage share one mesh and its communicators.
    if outer is None or inner is None:
        return DeviceMesh.from_group(whole, device_type)
    return hybrid_mesh(whole, outer, inner, device_type)


def hybrid_mesh(whole: ProcessGroup, outer: ProcessGroup, inner: ProcessGroup, device_type: str) -> DeviceMesh:
    """Return the mesh (outer, inner) of Megatron's groups for hybrid sharding.

    Args:
        whole: all data-parallel ranks of this rank, in order: instance by instance.
        outer: those at the same place of each optimizer instance. inner: those of this rank's instance.
    """
    ranks = torch.tensor(dist.get_process_group_ranks(whole)).view(dist.get_world_size(outer), -1)
    row, column = (ranks == dist.get_rank()).nonzero()[0].tolist()
    wanted = ranks[:, column].tolist(), ranks[row].tolist()
    found = dist.get_process_group_ranks(outer), dist.get_process_group_ranks(inner)
    if found != wanted:
        raise ConfigError(
            f"hybrid sharding over ranks {ranks.tolist()} needs the groups {wanted[0]} of instances and {wanted[1]} "
            f"inside of one, found {found[0]} and {found[1]}. fix: leave Megatron's order of groups as it is"
        )
    return DeviceMesh.from_group([outer, inner], device_type, mesh=ranks, mesh_dim_names=("dp_outer", "dp_shard"))


def reduce_over(tensor: torch.Tensor, group: ProcessGroup, op: str) -> None:
    """Reduce ``tensor`` over a group, in place on all of its ranks. ``op`` is "sum" or "max"."""
    axis = MeshAxis("ranks of the model", group.size(), group.rank(), group, has_separate_reduce_group=False)
    all_reduce(tensor, axis, op)


def size_of(group: ProcessGroup | None) -> int:
    """Return the number of ranks, 1 for None."""
    return 1 if group is None else group.size()


def rank_in(group: ProcessGroup | None) -> int:
    """Return this rank's place, 0 for None."""
    return 0 if group is None else group.rank()


def is_expert(parameter: torch.Tensor) -> bool:
    """Return whether Megatron marked a parameter as an expert's: not reduced over all data-parallel ranks."""
    return getattr(parameter, "allreduce", True) is False


def is_cut(parameter: torch.Tensor) -> bool:
    """Return whether Megatron marked a parameter as tensor-parallel."""
    return bool(getattr(parameter, "tensor_model_parallel", False))
