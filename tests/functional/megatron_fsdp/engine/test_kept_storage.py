"""Gathered weights whose memory stays when they are resharded: the same addresses, the same training."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbuffer import StorageError, memory_meter
from dbuffer.slot_pool import can_exchange_memory
from megatron_fsdp import MixedPrecisionPolicy
from tests.harness import on_ranks
from tests.harness.models import inputs, three_blocks
from tests.harness.oracle import whole
from tests.harness.twins import sharded


def made(policy: MixedPrecisionPolicy | None, keeps: bool) -> Any:
    torch.manual_seed(0)
    model = sharded(three_blocks(), mp_policy=policy)
    if keeps:
        model.set_keep_unsharded_storage(True)
    return model


def train(model: Any) -> tuple[list[float], list[set[int]]]:
    """Return the losses of three steps of two microbatches, and by layer the addresses of its gathered weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[set[int]] = [set() for _ in model.layers]
    for layer, found in zip(model.layers, seen, strict=True):
        layer.register_forward_hook(lambda module, args, out, found=found: found.add(module.up.weight.data_ptr()))
    losses = []
    for step in range(6):
        loss = model(inputs(dist.get_rank(), step)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, seen


POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(torch.bfloat16),
    "in 8 bits": MixedPrecisionPolicy(torch.bfloat16, gather_dtype="int8_block"),
}


@pytest.mark.parametrize("name", POLICIES)
@on_ranks(2)
def test_training_is_the_same_and_so_are_the_addresses(name: str) -> None:
    kept, usual = made(POLICIES[name], True), made(POLICIES[name], False)
    (losses, seen), (wanted, _) = train(kept), train(usual)
    pairs = zip(kept.parameters(), usual.parameters(), strict=True)
    worst = max(float((whole(one, one) - whole(other, other)).abs().max()) for one, other in pairs)
    assert losses == wanted
    assert worst == 0.0
    assert [len(found) for found in seen] == [1, 1, 1]


@pytest.mark.skipif(not can_exchange_memory(), reason="storages of this PyTorch cannot exchange memory")
@on_ranks(2)
def test_a_unit_that_keeps_its_memory_takes_no_turns_in_slots() -> None:
    model, usual = made(None, False), made(None, False)
    model.set_slot_pool("largest")
    model.layers[1].set_keep_unsharded_storage(True, recurse=False)
    (losses, seen), (wanted, _) = train(model), train(usual)
    assert losses == wanted
    assert len(seen[1]) == 1


@on_ranks(2)
def test_kept_storage_takes_the_bytes_of_whole_weights_until_disabled() -> None:
    meter = memory_meter()
    model = made(None, False)
    found = [meter.current_bytes]
    for keep in (True, False):
        model.set_keep_unsharded_storage(keep)
        for step in range(2):
            model(inputs(dist.get_rank(), step)).square().mean().backward()
            model.zero_grad()
        found.append(meter.current_bytes)
    groups = [group for layer in model.layers for group in layer.parameter_groups]
    whole_bytes = sum(group.gathered.nbytes for group in groups)
    assert [value - found[0] for value in found] == [0, whole_bytes, 0]


@on_ranks(2)
def test_reading_kept_storage_after_reshard_is_refused() -> None:
    model = made(None, True)
    layer = model.layers[0]
    layer.unshard()
    weight = layer.up.weight
    layer.reshard()
    with pytest.raises(StorageError, match=r"parameter 'up\.weight': add of its gathered weight, which was released"):
        weight + 1


@on_ranks(2)
def test_other_buffers_under_the_same_parameters_stay_too() -> None:
    model = made(None, True).to(torch.bfloat16)
    seen = set()
    model.layers[0].register_forward_hook(lambda module, args, out: seen.add(module.up.weight.data_ptr()))
    for step in range(2):
        model(inputs(dist.get_rank(), step).bfloat16()).square().mean().backward()
        model.zero_grad()
    assert len(seen) == 1
    assert all(group.gathered.is_allocated for group in model.layers[0].parameter_groups)
