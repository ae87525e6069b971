"""A barrier names the device that it runs on, where it runs on one: NCCL warns where it has to guess."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbuffer.collectives_rare import barrier


@pytest.mark.parametrize(
    ("backends", "wanted"), [("cuda:nccl", [3]), ("cpu:gloo,cuda:nccl", [3]), ("cpu:gloo,cuda:gloo", None)]
)
def test_a_barrier_on_nccl_gets_the_rank_s_device(
    monkeypatch: pytest.MonkeyPatch, backends: str, wanted: list[int] | None
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "barrier", lambda *, device_ids: given.append(device_ids))
    barrier()
    assert given == [wanted]
