"""A virtual device records large operators without computing them, and shows the engine's waits."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_fsdp
from benchmarks.h200 import H200
from megatron_fsdp import MixedPrecisionPolicy, Placements
from megatron_fsdp.virtual.device import VirtualDevice, virtual_device
from megatron_fsdp.virtual.playback import Playback, play
from megatron_fsdp.virtual.recording import Work

WIDTH, TOKENS = 1024, 4096


def works(device: VirtualDevice) -> list[Work]:
    """Return the recorded work."""
    return [item.work for item in device.recording.items if item.work is not None]


def test_a_large_operator_is_noted_with_its_operations_and_touches_no_memory() -> None:
    with virtual_device(1) as device:
        device.recording.is_on = True
        left = torch.empty(1 << 18, 1 << 12, dtype=torch.bfloat16)
        right = torch.zeros(1 << 12, 1 << 12, dtype=torch.bfloat16)
        product = left @ right
        product.add_(1)
    assert (product.shape, product.dtype) == ((1 << 18, 1 << 12), torch.bfloat16)
    found = {work.name: work for work in works(device)}
    assert found["mm"].flops == 2 * (1 << 42)
    assert found["mm"].num_bytes == 2 * (2 * (1 << 30) + (1 << 24))
    assert found["add_"].num_bytes == 2 * 2 * (1 << 30)


def test_small_operators_have_their_values() -> None:
    with virtual_device(1):
        assert (torch.arange(6).view(2, 3) * 2).sum().item() == 30


def test_reading_a_value_lets_the_host_wait() -> None:
    with virtual_device(1) as device:
        device.recording.is_on = True
        (torch.zeros(1 << 20) + 1).sum().item()
    assert device.recording.items[-1].stream is None
    assert device.recording.items[-1].point is not None


@pytest.mark.parametrize("causal_length", [128])
def test_fused_attention_has_the_operations_of_causal_attention(causal_length: int) -> None:
    with virtual_device(1) as device:
        device.recording.is_on = True
        query = torch.empty(2, 8, causal_length, 64, requires_grad=True)
        attended = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        attended.sum().backward()
    flops = [work.flops for work in works(device) if work.kind == "attention"]
    once = 2 * 8 * causal_length * causal_length * 64
    assert flops == [2 * once, 5 * once]


def test_a_virtual_world_does_not_affect_the_real_job() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=6)
    try:
        job, mesh, hook = dist.group.WORLD, init_device_mesh("cpu", (6,)), sys.excepthook
        with virtual_device(16, 5):
            assert (dist.get_rank(), dist.get_world_size()) == (5, 16)
            assert init_device_mesh("cpu", (4, 4)).get_coordinate() == (1, 1)
            with ThreadPoolExecutor() as others:
                assert others.submit(dist.get_rank).result() == 1
        assert (dist.group.WORLD, dist.get_rank(), sys.excepthook) == (job, 1, hook)
        dist.all_reduce(torch.ones(1), group=mesh.get_group())
    finally:
        dist.destroy_process_group()
    with virtual_device(2):
        pass
    assert not dist.is_initialized()


def test_tensors_may_be_larger_than_any_memory() -> None:
    with virtual_device(1):
        tensor = torch.empty(1 << 12, 1 << 30)
        row = tensor[3]
        storage = tensor.untyped_storage()
        storage.resize_(0)
        assert storage.nbytes() == 0
        storage.resize_(1 << 44)
        assert (storage.nbytes(), row.data_ptr() - tensor.data_ptr()) == (1 << 44, 3 << 32)


def train(placements: Placements, sizes: tuple[int, ...] = (8,), num_buffers: int = 1) -> Playback:
    """Run forward and backward of four square layers on H200s, and return the playback."""
    with virtual_device(torch.Size(sizes).numel()) as device:
        mesh = init_device_mesh("cpu", sizes)
        model = nn.Sequential(*(nn.Sequential(*_block()) for _ in range(6)))
        for unit in (*model, model):
            megatron_fsdp.fully_shard(
                unit, mesh, placements=placements, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
            )
        root: megatron_fsdp.FSDPModule = model  # type: ignore[assignment]
        root.set_reduce_scatter_max_input_buffers(num_buffers)
        x = torch.zeros(TOKENS, 4 * WIDTH, dtype=torch.bfloat16)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        return play(device.record(step).items, H200)


def _block() -> list[nn.Module]:
    return [nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False) for _ in range(4)]


def test_gathers_and_reductions_of_all_units_have_the_bytes_of_the_engine() -> None:
    found = train(Placements.optim_grads_params(0))
    layer = 4 * (4 * WIDTH) ** 2 * 2
    sent = [(run.work.kind, run.work.num_bytes, run.work.label) for run in found.runs if run.work.ranks]
    gathers = [label for kind, num_bytes, label in sent if kind == "all_gather" and num_bytes == layer]
    # The last unit keeps its weights for backward.
    assert gathers == [f"gather of {unit}" for unit in (0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0)]
    reductions = [label for kind, num_bytes, label in sent if kind == "reduce_scatter" and num_bytes == layer]
    assert reductions == [f"reduction of {unit}" for unit in (5, 4, 3, 2, 1, 0)]


def test_two_packed_buffers_wait_less_than_one() -> None:
    one, two = (train(Placements.optim_grads_params(0), num_buffers=number) for number in (1, 2))
    assert two.seconds < one.seconds
    assert two.busy() == pytest.approx(one.busy())


def test_a_sum_over_nodes_is_seen_on_the_network() -> None:
    found = train(Placements.hsdp(0, 1), (2, 8))
    outer = [run.work for run in found.runs if run.work.ranks == (0, 8)]
    assert {work.kind for work in outer} == {"all_reduce"}
    assert {H200.link(work) for work in outer} == {"network"}
