"""bitsandbytes' 4-bit weights (``Params4bit``): a frozen packed base and trained layers train as in a plain model."""

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard
from tests.integration.ranks import run_ranks


def make_model() -> nn.Sequential:
    """A frozen 4-bit layer between two that are trained; packed weights have FP32 as their storage."""
    torch.manual_seed(0)
    base: Any = bnb.nn.Linear4bit(64, 48, bias=False, compute_dtype=torch.float32, quant_storage=torch.float32)
    weight = bnb.nn.Params4bit(
        torch.randn(48, 64), requires_grad=False, quant_type="nf4", quant_storage=torch.float32, module=base
    )
    base.weight = weight._quantize(torch.device("cpu"))
    return nn.Sequential(nn.Linear(10, 64), base, nn.ReLU(), nn.Linear(48, 3))


def train(is_sharded: bool) -> tuple[list[float], torch.Tensor, torch.Tensor, int]:
    """Return losses of three steps, then the packed bytes, a trained weight and the bytes of the base at rest."""
    model = make_model()
    if is_sharded:
        for part in (model[0], model[1], model[3], model):
            fully_shard(part)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(3):
        inputs = torch.randn(5, 10, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    packed, trained = model[1].weight, model[3].weight
    local: Any = packed.to_local() if is_sharded else packed
    whole: Any = packed.full_tensor() if is_sharded else packed.data
    kept: Any = trained.full_tensor() if is_sharded else trained.data
    return losses, whole.clone(), kept.clone(), local.numel() * local.element_size()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_4_bit_base_is_sharded_and_used_as_in_a_plain_model(num_ranks: int) -> None:
    losses, packed, trained, num_bytes = train(is_sharded=False)
    assert num_bytes == 48 * 64 // 2
    for found in run_ranks(num_ranks, train, True):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert torch.equal(found[1].view(torch.int32), packed.view(torch.int32))
        torch.testing.assert_close(found[2], trained)
        assert found[3] <= -(-num_bytes // num_ranks // 4) * 4 + 4
