"""A stream of whole weights on GPUs: what it asks of the host, and how many collectives it issues."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard, weight_stream
from tests.harness import run_ranks
from tests.nullcuda import machine

NUM_LAYERS, NUM_RANKS = 4, 2
WAITS = ("event_sync", "stream_sync", "device_sync")


def calls_of_a_stream() -> tuple[int, int, int, Counter[str]]:
    """Return the stream's tensors, buckets and planned gathers, and how many calls of each kind it made."""
    torch.cuda.set_device(torch.distributed.get_rank())
    mesh = init_device_mesh("cuda", (NUM_RANKS,))
    with torch.device("cuda"):
        layers = [nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)) for _ in range(NUM_LAYERS)]
    model: Any = nn.Sequential(*layers)
    for layer in (*layers, model):
        fully_shard(layer, mesh)
    for _ in weight_stream(model):
        # The first stream connects communicators.
        pass
    stream = weight_stream(model)
    report = stream.explain()
    with machine.logged():
        num_tensors = sum(1 for _ in stream)
    return num_tensors, report.num_buckets, report.num_gathers, Counter(call.kind for call in machine.calls())


def test_the_host_waits_for_no_tensor_and_a_unit_is_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLCUDA_DEVICES", "2")
    for num_tensors, num_buckets, num_gathers, calls in run_ranks(
        NUM_RANKS, calls_of_a_stream, backend="nccl", fresh=True, timeout=200
    ):
        assert num_tensors == 6 * NUM_LAYERS
        assert calls["collective"] == num_gathers == NUM_LAYERS
        assert sum(calls[kind] for kind in WAITS) <= num_buckets
