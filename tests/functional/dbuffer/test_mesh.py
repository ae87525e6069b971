"""Axes and groups that the engine reads from a device mesh, on real process groups."""

import datetime
import gc
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _world

from dbuffer import MeshError
from dbuffer.mesh import axis_index, flattened_mesh, is_alive, mesh_axes, new_group
from tests.harness import on_ranks, run_ranks


def describe_axes() -> list[tuple[str, int, int, list[int]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return [
        (axis.name, axis.size, axis.rank, dist.get_process_group_ranks(axis.gather_group)) for axis in mesh_axes(mesh)
    ]


def test_axes_tell_name_size_own_place_and_fellow_ranks() -> None:
    ranks = run_ranks(4, describe_axes)
    assert ranks[0] == [("outer", 2, 0, [0, 2]), ("inner", 2, 0, [0, 1])]
    assert ranks[2] == [("outer", 2, 1, [0, 2]), ("inner", 2, 0, [2, 3])]


def look_at_one_axis() -> str:
    """Check the mesh of all ranks. Return the error of a mesh of the first two ranks, empty on those two."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    (axis,) = mesh_axes(mesh)
    total = torch.ones(1)
    dist.all_reduce(total, group=axis.reduce_group)
    assert total.item() == 3.0
    assert axis.name == "axis 0"
    assert mesh_axes(mesh)[0] is axis
    assert axis.reduce_group is axis.reduce_group is not axis.gather_group
    assert dist.get_process_group_ranks(axis.reduce_group) == dist.get_process_group_ranks(axis.gather_group)
    assert flattened_mesh(mesh) is mesh
    try:
        mesh_axes(init_device_mesh("cpu", (2,)))
    except MeshError as error:
        return str(error)
    return ""


def test_an_axis_is_cached_has_a_reduce_communicator_and_refuses_ranks_outside() -> None:
    first, second, outside = run_ranks(3, look_at_one_axis)
    assert first == second == ""
    assert "rank 2 is not part of" in outside


@on_ranks(2)
def test_equal_meshes_share_one_communicator_for_reductions() -> None:
    before = len(_world.pg_map)
    meshes = [init_device_mesh("cpu", (dist.get_world_size(),)) for _ in range(5)]
    for mesh in meshes:
        assert mesh_axes(mesh)[0].reduce_group is not None
    assert len(_world.pg_map) - before == 1


@on_ranks(4)
def test_a_flattened_mesh_counts_its_outermost_axis_slowest_and_is_made_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    flat = flattened_mesh(mesh)
    rank = dist.get_rank()
    result = flat.mesh.tolist(), flat.get_local_rank(), flattened_mesh(mesh) is flat
    assert result == ([0, 1, 2, 3], rank, True)


@on_ranks(2)
def test_the_axes_of_a_mesh_that_has_gone_are_forgotten() -> None:
    from dbuffer.mesh import _AXES

    before = len(_AXES)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mesh_axes(mesh)
    del mesh
    gc.collect()
    assert len(_AXES) == before


@on_ranks(1)
def test_an_axis_is_found_by_name_or_number_or_refused() -> None:
    named = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
    unnamed = init_device_mesh("cpu", (1, 1))
    assert (axis_index(named, "inner"), axis_index(named, 0), axis_index(unnamed, -1)) == (1, 0, 1)
    for mesh, axis, said in (
        (named, "tp", "the mesh has no axis 'tp'. fix: use one of ('outer', 'inner')"),
        (unnamed, "inner", "the mesh has no axis 'inner'. fix: use one of its numbers, because its axes have no names"),
        (named, 2, "axis 2 is outside the mesh, which has 2 axes. fix: 0 to 1"),
    ):
        with pytest.raises(MeshError, match=f"^{re.escape(said)}$"):
            axis_index(mesh, axis)


@on_ranks(2)
def test_a_mesh_uses_recreated_process_groups_or_raises() -> None:
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh, part = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    lonely = part["a"]
    old = [axis.reduce_group for axis in (*mesh_axes(mesh), *mesh_axes(lonely))]
    flat = flattened_mesh(part)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=PrefixStore("anew", store), rank=rank, world_size=size)
    (axis,) = mesh_axes(mesh)
    total = torch.ones(1)
    dist.all_reduce(total, group=axis.reduce_group)
    refusal = ""
    try:
        mesh_axes(lonely)
    except MeshError as error:
        refusal = str(error)
    found = {
        "gathers": is_alive(axis.gather_group),
        "reductions": is_alive(axis.reduce_group) and axis.reduce_group not in old,
        "sum": total.item() == size,
        "flattened": flattened_mesh(init_device_mesh("cpu", (1, size))) is not flat,
        "refused": "process groups were destroyed" in refusal and "call init_device_mesh again" in refusal,
    }
    assert found == dict.fromkeys(("gathers", "reductions", "sum", "flattened", "refused"), True)


@on_ranks(2, timeout=43)
def test_groups_of_a_mesh_have_the_jobs_timeout_by_default() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    own = dist.new_group([dist.get_rank()], timeout=datetime.timedelta(seconds=77), use_local_synchronization=True)
    chosen = DeviceMesh.from_group(own, "cpu")
    axes = {"mesh": mesh_axes(mesh)[1], "whole": mesh_axes(mesh)[0], "chosen": mesh_axes(chosen)[0]}
    groups = {name: axis.gather_group for name, axis in axes.items()}
    groups["reduce"] = axes["whole"].reduce_group
    found = {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for name, group in groups.items()
    }
    assert found == {"mesh": 43, "whole": 43, "chosen": 77, "reduce": 43}


@on_ranks(3)
def test_a_group_of_some_ranks_never_splits_the_one_of_all() -> None:
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    sizes: list[int] = []
    try:
        for ranks in ([0, 1], [0, 1, 2]):
            if dist.get_rank() in ranks:
                with mock.patch.object(dist.distributed_c10d, "_get_split_source", return_value=None) as split:
                    group = new_group(ranks, "test")
                sizes += [len(ranks)] * split.call_count
                assert group.bound_device_id == world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
    assert sizes == [3]
