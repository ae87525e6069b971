"""A rank that waits for a collective learns what another rank has found, whatever kind of handle it waits for."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import MeshError
from dbuffer.collectives.gloo_messages import WorkThen, exchange, gather_flat, start
from dbuffer.collectives.waits import wait_for
from dbuffer.mesh import MeshAxis, mesh_axes
from dbuffer.whereabouts import ALARMS, job_store
from tests.harness import on_ranks


def gather(axis: MeshAxis) -> dist.Work:
    work: dist.Work = start(gather_flat, torch.empty(2), torch.ones(1), group=axis.gather_group)
    return work


def reduction(axis: MeshAxis) -> dist.Work:
    return WorkThen(exchange(torch.empty(2), torch.ones(2), axis, axis.gather_group), lambda: None)


@pytest.mark.parametrize("begin", [gather, reduction])
@on_ranks(2, fresh=True)
def test_a_waiting_rank_raises_what_another_rank_has_found_long_before_the_timeout(
    begin: Callable[[MeshAxis], dist.Work],
) -> None:
    (axis,) = mesh_axes(init_device_mesh("cpu", (2,)))
    store, key = job_store(), "an alarm"
    assert store is not None
    if dist.get_rank() == 1:
        # A rank that has found a difference issues no collective.
        store.set(key, "the ranks run other units")
        return
    ALARMS.add(key)
    begun = time.monotonic()
    with pytest.raises(MeshError, match="the ranks run other units"):
        wait_for(begin(axis))
    # The job's timeout is a minute.
    assert time.monotonic() - begun < 20
