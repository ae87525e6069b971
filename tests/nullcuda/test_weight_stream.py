"""A stream of whole weights on GPUs: its waits of the host, and its number of collectives."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard, remember_weights, weight_stream
from megatron_fsdp.transfer import delta
from tests.harness import run_ranks
from tests.nullcuda import accesses, machine, races
from tests.nullcuda.test_settings import stream_names

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


def model_on_gpus() -> Any:
    torch.cuda.set_device(torch.distributed.get_rank())
    mesh = init_device_mesh("cuda", (NUM_RANKS,))
    with torch.device("cuda"):
        model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    for layer in (*model, model):
        fully_shard(layer, mesh)
    return model


def races_of_a_packing_receiver(bucket_bytes: int, by_bucket: bool) -> list[str]:
    """Pack tensors on alternating streams, as vLLM does on two, between two optimizer steps."""
    model = model_on_gpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    packers = [torch.cuda.Stream() for _ in range(5)]
    x = torch.randn(4, 64, device="cuda")
    for _ in weight_stream(model, bucket_bytes=bucket_bytes):
        pass
    with machine.logged(), accesses.recorded() as record:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            stream = weight_stream(model, bucket_bytes=bucket_bytes)
            arriving: Any = stream.buckets() if by_bucket else stream
            is_over, turn = False, 0
            while not is_over:
                packer = packers[turn % 5]
                with torch.cuda.stream(packer):
                    # Chunks of three, so that they end within buckets.
                    chunk = list(itertools.islice(arriving, 1 if by_bucket else 3))
                    parts = [each.data if by_bucket else each[1].reshape(-1) for each in chunk]
                    is_over = not parts
                    if parts:
                        torch.cat(parts)
                    del chunk, parts
                turn += 1
            # The optimizer writes weights that the last gather reads.
            optimizer.step()
            optimizer.zero_grad()
    names = {machine.stream_id(packer): f"packer {index}" for index, packer in enumerate(packers)} | stream_names()
    found = races.check(machine.calls(), record, names)
    assert found.num_accesses > 100
    return [*found.races, *found.illegal]


@pytest.mark.parametrize("by_bucket", [False, True], ids=["tensors", "buckets"])
@pytest.mark.parametrize("bucket_bytes", [9_000, 20_000, 40_000])
def test_tensors_may_be_taken_on_another_stream_each(
    bucket_bytes: int, by_bucket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULLCUDA_DEVICES", "2")
    found = run_ranks(
        NUM_RANKS, races_of_a_packing_receiver, bucket_bytes, by_bucket, backend="nccl", fresh=True, timeout=200
    )
    assert found == [[], []]


def races_of_a_receiver_of_changes() -> list[str]:
    """Take each bucket of changes on another stream, between two optimizer steps; leave a second stream early."""
    # The device computes nothing, so the numbers of changed elements, by which sparse buckets are cut, are arbitrary.
    delta._is_sparse = lambda numel, count, itemsize: False
    model = model_on_gpus()
    model.register_buffer("scale", torch.ones(64, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    packers = [torch.cuda.Stream() for _ in range(5)]
    x = torch.randn(4, 64, device="cuda")
    version = remember_weights(model)
    list(weight_stream(model, changed_since=version))
    with machine.logged(), accesses.recorded() as record:
        for number_taken in (100, 2):
            version = remember_weights(model)
            model(x).sum().backward()
            optimizer.step()
            stream = weight_stream(model, changed_since=version)
            for turn in range(number_taken):
                with torch.cuda.stream(packers[turn % 5]):
                    bucket = next(stream, None)
                    if bucket is None:
                        break
                    torch.cat([bucket.values, bucket.values])
                    del bucket
            stream.close()
            # It writes what the comparison reads.
            optimizer.step()
            optimizer.zero_grad()
    names = {machine.stream_id(packer): f"packer {index}" for index, packer in enumerate(packers)} | stream_names()
    found = races.check(machine.calls(), record, names)
    assert found.num_accesses > 100
    return [*found.races, *found.illegal]


def test_changes_may_be_taken_on_another_stream_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLCUDA_DEVICES", "2")
    found = run_ranks(NUM_RANKS, races_of_a_receiver_of_changes, backend="nccl", fresh=True, timeout=200)
    assert found == [[], []]
