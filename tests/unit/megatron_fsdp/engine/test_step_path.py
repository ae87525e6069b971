"""The calls that sharding adds to a block in one training step."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.engine import fused_linear as fuse
from megatron_fsdp.engine.params import SMALL_NUMEL

pytestmark = pytest.mark.usefixtures("eight_ranks")

WIDTH = 32
# Python and C calls that sharding adds to a block, without the optimizer: with fused linear layers, and with layers too
# small to fuse. FSDP2 of torch 2.13 adds 2,319 in FP32 and 2,411 in bf16.
MAX_CALLS = {("fp32", False): 338, ("fp32", True): 415, ("bf16", False): 356, ("bf16", True): 405}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        x = x + self.o(self.q(h) * self.k(h) + self.v(h))
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def stepper(kind: str, num_blocks: int, *, shards: bool) -> Callable[[], None]:
    model = nn.Sequential(*[Block() for _ in range(num_blocks)])
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    if shards:
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        for part in (*model, model):
            fully_shard(part, mp_policy=policy)
    else:
        model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def num_calls(kind: str, num_blocks: int, *, shards: bool) -> int:
    step, found = stepper(kind, num_blocks, shards=shards), []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_call"):
            found.append(event)

    # The garbage of earlier tests would call finalizers meanwhile.
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(found)


@pytest.mark.parametrize(("kind", "is_fused"), MAX_CALLS)
def test_sharding_adds_no_more_calls_to_a_block_than_are_listed(
    kind: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "MIN_NUMEL", 0 if is_fused else SMALL_NUMEL + 1)
    few, many = ([num_calls(kind, count, shards=shards) for shards in (True, False)] for count in (3, 9))
    added = (many[0] - many[1] - few[0] + few[1]) / 6
    print(f"{kind}, {'fused' if is_fused else 'small'} layers: {added:.0f} calls a block")
    assert 0 < added <= MAX_CALLS[kind, is_fused]
