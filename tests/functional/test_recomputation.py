"""Gradients stay right when activation checkpointing runs forward again inside backward, in both of PyTorch's ways."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Headed, inputs
from tests.harness.oracle import Case, compare

KINDS = {"reentrant": True, "non-reentrant": False}


class Checkpointed(nn.Module):
    """Runs its blocks in checkpointed regions of ``span`` blocks; without parameters of its own."""

    def __init__(self, span: int, use_reentrant: bool, *blocks: nn.Module) -> None:
        super().__init__()
        self.span = span
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in range(0, len(self.blocks), self.span):
            region = _Region(self.blocks[start : start + self.span])
            x = checkpoint(region, x, use_reentrant=self.use_reentrant)
        return x


class _Region:
    def __init__(self, blocks: nn.Module) -> None:
        self.blocks = list(blocks.children())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CheckpointInside(Block):
    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._branch, x, use_reentrant=self.use_reentrant)

    def _branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class CheckpointInsideReentrantly(CheckpointInside):
    use_reentrant = True


class Whole(nn.Module):
    def __init__(self, use_reentrant: bool, inner: nn.Module) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Sometimes(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().flatten()[0]) > 0:
            return super().forward(x)
        return x + self.norm(x)


def unequal_blocks(count: int) -> list[Block]:
    return [Block(hidden=5 + 4 * index) for index in range(count)]


def one_block_regions(use_reentrant: bool) -> nn.Module:
    return Checkpointed(1, use_reentrant, *unequal_blocks(4))


def two_block_regions(use_reentrant: bool) -> nn.Module:
    return Checkpointed(2, use_reentrant, *unequal_blocks(4))


def one_region(use_reentrant: bool) -> nn.Module:
    return Checkpointed(4, use_reentrant, *unequal_blocks(4))


def region_inside_units(use_reentrant: bool) -> nn.Module:
    kind = CheckpointInsideReentrantly if use_reentrant else CheckpointInside
    return Headed(*(kind(hidden=5 + index) for index in range(3)))


def region_around_the_root(use_reentrant: bool) -> nn.Module:
    return Whole(use_reentrant, Headed(*unequal_blocks(3)))


def frozen_parts(use_reentrant: bool) -> nn.Module:
    model = Checkpointed(1, use_reentrant, *unequal_blocks(4))
    model.blocks[2].requires_grad_(False)
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


def data_dependent_use(use_reentrant: bool) -> nn.Module:
    return Checkpointed(1, use_reentrant, *(Sometimes(hidden=5 + index) for index in range(4)))


def data_dependent_use_in_pairs(use_reentrant: bool) -> nn.Module:
    return Checkpointed(2, use_reentrant, *(Sometimes(hidden=5 + index) for index in range(4)))


BUILDERS: dict[str, Callable[[bool], nn.Module]] = {
    "regions of one block": one_block_regions,
    "regions of two blocks": two_block_regions,
    "one region of all blocks": one_region,
    "a region inside each unit": region_inside_units,
    "a region around the root": region_around_the_root,
    "frozen weights in the regions": frozen_parts,
    "weights that some ranks do not use": data_dependent_use,
    "weights that some ranks do not use, in regions of two blocks": data_dependent_use_in_pairs,
}


def shard_blocks(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model.inner if isinstance(model, Whole) else model)


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    # Reentrant checkpointing computes no gradient at all unless an input asks for one.
    return model(inputs(rank, step).requires_grad_()).square().mean()


# Each builder with one kind by turns.
QUICK = [(builder, list(KINDS)[place % len(KINDS)]) for place, builder in enumerate(BUILDERS)]


@pytest.mark.parametrize(("builder", "kind"), nightly_but(QUICK, product(BUILDERS, KINDS)))
@on_ranks(2, timeout=20)
def test_gradients_equal_those_of_a_whole_model_with(builder: str, kind: str) -> None:
    result = compare(Case(lambda: BUILDERS[builder](KINDS[kind]), loss, shard=shard_blocks))
    assert result.is_exact, result


def count_collectives(kind: str, builder: str) -> list[dict[str, int]]:
    model = BUILDERS[builder](KINDS[kind])
    shard_blocks(model)
    steps = []
    for step in range(2):
        calls: list[CollectiveCall] = []
        with observe_collectives(calls.append):
            loss(model, 0, step).backward()
        steps.append(dict(Counter(call.kind for call in calls)))
    return steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("builder", ["regions of one block", "regions of two blocks"])
def test_recomputation_shares_the_gather_of_backward_with(builder: str, kind: str) -> None:
    first, _ = run_ranks(2, count_collectives, kind, builder)
    # Reentrant regions run without a graph, so nothing says that a backward of the last unit will follow.
    num_gathers = 8 if kind == "reentrant" else 7
    assert first == [{"all_gather": num_gathers, "reduce_scatter": 4}] * 2
