"""Ranks that use different parameters reduce in one order; what a unit was built from is let go."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import memory_meter
from megatron_fsdp import clip_grad_norm_, fully_shard
from tests.harness import on_ranks
from tests.harness.models import Block, inputs
from tests.harness.oracle import Case, compare


class Dropped(nn.Module):
    """Owns what comes before its blocks; the first rank leaves out the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.first, self.second = nn.Linear(7, 7), Block(), Block()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.entry(x)
        return self.second(x if rank == 0 else self.first(x))


class TwoHeads(nn.Module):
    """Owns what comes after its blocks; the first rank uses one head of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head, self.extra = Block(), Block(), nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.second(self.first(x))
        return self.head(x) + (self.extra(x) if rank else 0)


class Skipping(Block):
    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        return x if skips else super().forward(x)


class Skipped(Dropped):
    """Like ``Dropped``, but the block is called and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Skipping()

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.second(self.first(self.entry(x), rank == 0))


def shard_blocks(model: nn.Module) -> None:
    for child in (model.first, model.second):
        assert isinstance(child, nn.Module)
        fully_shard(child)
    fully_shard(model)


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step), rank).square().mean()


@pytest.mark.parametrize("kind", [TwoHeads, Skipped])
@on_ranks(3, timeout=30)
def test_a_unit_around_others_is_reduced_after_them_on_every_rank(kind: type[nn.Module]) -> None:
    result = compare(Case(kind, loss, shard=shard_blocks))
    assert result.is_exact, result


@on_ranks(2)
def test_a_unit_with_parameters_of_its_own_frees_everything_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    before = memory_meter().current_bytes
    plain = nn.Linear(64, 64)
    original = weakref.ref(plain.weight)
    model = fully_shard(plain)
    del plain
    is_gone = original() is None
    model(torch.ones(1, 64)).sum().backward()
    del model
    held = memory_meter().current_bytes - before
    gc.enable()
    assert (held, is_gone) == (0, True)


@on_ranks(2)
def test_the_norm_of_fp64_gradients_has_fp64_precision() -> None:
    model = nn.Linear(5, 3).double()
    oracle = nn.Linear(5, 3).double()
    oracle.load_state_dict(model.state_dict())
    fully_shard(model)
    x = torch.full((2, 5), 1e-3 * (dist.get_rank() + 1), dtype=torch.float64)
    model(x).square().sum().backward()
    for rank in range(dist.get_world_size()):
        y = torch.full((2, 5), 1e-3 * (rank + 1), dtype=torch.float64)
        (oracle(y).square().sum() / dist.get_world_size()).backward()
    wanted = nn.utils.clip_grad_norm_(oracle.parameters(), float("inf"))
    found = clip_grad_norm_(model, float("inf")).item()
    wanted = wanted.item()
    assert found == pytest.approx(wanted, rel=1e-12)
