"""If one rank alone reads sharded tensors, runs other units or freezes other parameters, errors name the difference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as pytorchs_fully_shard

from dbuffer import MeshError
from dbuffer.errors import ReadError
from megatron_fsdp import Muon, clip_grad_norm_, fully_shard
from tests.harness import RankError, on_ranks, run_ranks
from tests.harness.models import Block, Stack, squared
from tests.harness.twins import Twins, sharded

READS: dict[str, Callable[[Any], object]] = {
    "norm": lambda model: model.layers[0].up.weight.norm().item(),
    "full_tensor": lambda model: model.layers[0].up.weight.full_tensor(),
    "state dict": lambda model: [value.full_tensor() for value in model.state_dict().values()],
    "norm of a gradient": lambda model: model.layers[0].up.weight.grad.norm(),
}


def two_blocks() -> Any:
    return sharded(Stack(Block(), Block()))


@pytest.mark.parametrize("read", READS)
@on_ranks(3)
def test_a_read_of_one_rank_never_pairs_with_a_read_after_the_step(read: str) -> None:
    model = two_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    squared(model, dist.get_rank(), 0).backward()

    def reads() -> None:
        if dist.get_rank() == 0:
            READS[read](model)
        optimizer.step()
        _ = [value.full_tensor() for value in model.state_dict().values()]

    with pytest.raises(ReadError, match=r"read different things.*rank 0 reads.*rank 2 reads.*fix: let every rank"):
        reads()


NORMS: dict[str, Callable[[nn.Module], object]] = {
    "megatron_fsdp": lambda model: clip_grad_norm_(model, 1.0),
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_all_gradients_on_one_rank_ends_with_its_name_on_every_rank(norm: str) -> None:
    with pytest.raises(RankError) as found:
        run_ranks(3, train_with_a_norm_on_one_rank, norm, timeout=12, fresh=True)
    texts = {failure.rank: failure.report for failure in found.value.failures}
    assert "reads the norm" in texts[0] or "reads norms" in texts[0]
    assert "AgreementError" in texts[1]
    assert "rank 0 waits for" in texts[1]
    assert "AgreementError" in texts[2]


def train_with_a_norm_on_one_rank(norm: str) -> None:
    model = two_blocks()
    for step in range(2):
        squared(model, dist.get_rank(), step).backward()
        if dist.get_rank() == 0:
            NORMS[norm](model)


@on_ranks(2)
def test_reads_of_two_weights_of_one_size_are_refused_on_both_ranks() -> None:
    model = two_blocks()
    with pytest.raises(ReadError, match=r"rank 0 reads all of 'up.weight' of unit 'layers.0'.*unit 'layers.1'"):
        model.layers[dist.get_rank()].up.weight.full_tensor()


@on_ranks(3)
def test_units_in_another_order_on_one_rank_are_named_on_all_ranks() -> None:
    model = two_blocks()
    if dist.get_rank() == 2:
        model.layers = model.layers[::-1]
    with pytest.raises(MeshError, match=r"run other units.*number 1 is of 'layers.[01]'.*fix: root.set_forward_order"):
        squared(model, dist.get_rank(), 0).backward()
    with pytest.raises(MeshError, match="fix: end this process and start the job again"):
        squared(two_blocks(), dist.get_rank(), 0)


@on_ranks(2)
def test_parameters_frozen_on_one_rank_are_named_before_the_first_gather() -> None:
    model = two_blocks()
    if dist.get_rank() == 0:
        model.layers[1].requires_grad_(False)
    with pytest.raises(MeshError, match=r"rank 0 has unit 'layers.1' \(.*frozen: .*rank 1 has .*all trained"):
        squared(model, dist.get_rank(), 0).backward()


@on_ranks(2)
def test_adamw_trains_right_with_parameters_in_another_order_on_one_rank() -> None:
    twins = Twins(lambda: Stack(Block(), Block()))
    params = list(twins.model.parameters())
    optimizers = [
        torch.optim.AdamW(params[::-1] if dist.get_rank() else params, lr=0.1),
        torch.optim.AdamW(twins.plain.parameters(), lr=0.1),
    ]
    for step in range(3):
        twins.backward(step)
        for parameters in (params[::-1] if dist.get_rank() else params, twins.plain.parameters()):
            nn.utils.clip_grad_norm_(parameters, 0.01)
        twins.step(optimizers)
    assert twins.weights_apart() < 1e-5


@pytest.mark.parametrize("make", [Muon, torch.optim.Muon])
@on_ranks(3)
def test_muon_refuses_matrices_in_another_order_on_one_rank(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = two_blocks()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = make(matrices[::-1] if dist.get_rank() == 1 else matrices, lr=0.1)
    squared(model, dist.get_rank(), 0).backward()
    before = [p.detach().to_local().clone() for p in matrices]
    with pytest.raises((MeshError, ReadError), match=r"rank \d has .*layers\.[01].*rank \d has .*layers\.[01].*fix: "):
        optimizer.step()
    assert all(torch.equal(p.detach().to_local(), each) for p, each in zip(matrices, before, strict=True))


@on_ranks(2)
def test_ranks_with_other_seeds_keep_their_own_rows_as_in_fsdp2() -> None:
    for shard_it in (fully_shard, pytorchs_fully_shard):
        torch.manual_seed(dist.get_rank())
        layer: Any = nn.Linear(4, 6)
        own = [torch.empty(6, 4), torch.empty(6, 4)]
        dist.all_gather(own, layer.weight.detach().clone())
        shard_it(layer)
        whole = layer.weight.detach().full_tensor()
        first = len(layer.weight.to_local()) if dist.get_rank() == 0 else 6 - len(layer.weight.to_local())
        assert torch.equal(whole, torch.cat([own[0][:first], own[1][first:]]))
        assert 0 < first < 6
