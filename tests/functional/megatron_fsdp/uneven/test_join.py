"""With join(), ranks with fewer batches contribute zeros until all ranks have finished."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import ConfigError, FsdpError, StateError, clip_grad_norm_, fully_shard, join, microbatch
from tests.harness import on_ranks
from tests.harness.models import Made, inputs, make_mesh, squared
from tests.harness.twins import Twins

WORLDS = {"no_shard": 2, "optim": 3, "optim_grads": 2, "optim_grads_params": 3, "hsdp": 4}
ON_THEIR_RANKS: Any = on_ranks(lambda strategy: WORLDS[strategy])
all_strategies = pytest.mark.parametrize("strategy", list(WORLDS))


def num_batches(rank: int) -> int:
    """Return how many batches a rank has: rank 0 most."""
    return max(1, 3 - rank)


def plain_backward(twins: Twins, number: int, scale: float, *, over_all: bool = False) -> list[int]:
    """Run the plain model on the batches of the ranks that have one; return these ranks."""
    ranks = [rank for rank in range(dist.get_world_size()) if number < num_batches(rank)]
    count = dist.get_world_size() if over_all else len(ranks)
    for rank in ranks:
        (squared(twins.plain, rank, number) * scale / count).backward()
    return ranks


@pytest.mark.parametrize("with_length", [True, False])
@all_strategies
@ON_THEIR_RANKS
def test_training_with_a_step_for_each_batch_equals_the_plain_model(strategy: str, with_length: bool) -> None:
    twins = Twins(strategy=strategy)
    optimizers = twins.optimizers(torch.optim.AdamW, lr=1e-2)
    rank = dist.get_rank()
    own: Any = range(num_batches(rank))
    numbers = []
    with join(twins.model, own if with_length else iter(own)) as joined:
        for number, mine in enumerate(joined):
            squared(twins.model, rank, mine).backward()
            ranks = plain_backward(twins, number, 1.0)
            assert joined.has_data == (rank in ranks)
            assert joined.num_with_data == len(ranks)
            assert joined.is_last == (number == 2)
            assert twins.gradients_apart() < 1e-6
            clip_grad_norm_(twins.model, 0.5)
            nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.5)
            twins.step(optimizers)
            numbers.append(mine)
    assert numbers == [min(number, num_batches(rank) - 1) for number in range(3)]
    assert twins.weights_apart() < 1e-6
    twins.backward(7)
    assert twins.gradients_apart() < 1e-6


@all_strategies
@ON_THEIR_RANKS
def test_uneven_microbatches_add_up_to_the_plain_gradient(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    rank = dist.get_rank()
    for step in range(3):
        with join(twins.model, range(num_batches(rank))) as joined:
            for number, mine in enumerate(joined):
                with microbatch(twins.model, is_last=joined.is_last):
                    squared(twins.model, rank, mine).backward()
                plain_backward(twins, number, 1.0)
        assert twins.gradients_apart() < 1e-6, step
        twins.zero_grad()


@on_ranks(3)
def test_the_mean_may_be_over_all_ranks() -> None:
    twins = Twins()
    with join(twins.model, range(num_batches(dist.get_rank())), mean_over="all ranks") as joined:
        for number, mine in enumerate(joined):
            squared(twins.model, dist.get_rank(), mine).backward()
            plain_backward(twins, number, 1.0, over_all=True)
    assert twins.gradients_apart() < 1e-6


@on_ranks(3)
def test_a_rank_without_any_batch_takes_part_with_its_filler() -> None:
    twins = Twins()
    rank = dist.get_rank()
    with join(twins.model, range(2) if rank == 1 else (), filler=5) as joined:
        for number, mine in enumerate(joined):
            assert mine == (number if rank == 1 else 5)
            squared(twins.model, rank, mine).backward()
            squared(twins.plain, 1, number).backward()
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_a_rank_without_any_batch_or_filler_is_an_error_on_all_ranks() -> None:
    twins = Twins()
    words = r"rank 1 has no batch at all.*filler="
    with pytest.raises(StateError, match=words), join(twins.model, range(2 - 2 * dist.get_rank())) as joined:
        list(joined)
    twins.backward(0)
    assert twins.gradients_apart() < 1e-6


def one_of_two(model: Any, x: torch.Tensor, second: bool) -> torch.Tensor:
    found: torch.Tensor = (model.second if second else model.first)(x)
    return found


def two_parts() -> nn.Module:
    return Made(one_of_two, first=nn.Linear(7, 5), second=nn.Linear(7, 5))


@on_ranks(2)
def test_a_repeated_batch_gives_no_gradient_to_parameters_only_it_uses() -> None:
    twins = Twins(two_parts, shard=fully_shard)
    rank = dist.get_rank()
    own = [(0, False), (1, False)] if rank == 0 else [(0, True)]
    with join(twins.model, own) as joined:
        for number, (step, second) in enumerate(joined):
            twins.zero_grad()
            x = inputs(rank, step, 3, 7) * (1.0 if joined.has_data else float("nan"))
            twins.model(x, second).square().mean().backward()
            for other in range(2 - number):
                out = twins.plain(inputs(other, number, 3, 7), other == 1).square().mean()
                (out / (2 - number)).backward()
            assert twins.gradients_apart() < 1e-6
    assert twins.plain.second.weight.grad is None


@on_ranks(2)
def test_evaluation_counts_each_batch_once() -> None:
    twins = Twins()
    rank = dist.get_rank()
    total = torch.zeros(())
    with torch.no_grad(), join(twins.model, range(num_batches(rank))) as joined:
        for mine in joined:
            loss = squared(twins.model, rank, mine)
            total += loss * joined.has_data
    dist.all_reduce(total)
    with torch.no_grad():
        wanted = sum(squared(twins.plain, rank, number) for rank in range(2) for number in range(num_batches(rank)))
    torch.testing.assert_close(total, torch.as_tensor(wanted))


@on_ranks(3)
def test_microbatches_are_joined_inside_joined_batches() -> None:
    twins = Twins()
    rank = dist.get_rank()
    # Rank 2 has a single batch; each other rank has as many microbatches per batch as its rank number.
    with join(twins.model, range(1 if rank == 2 else 2)) as outer:
        for batch, mine in enumerate(outer):
            with join(twins.model, range(1 + rank)) as inner:
                for microbatch_number, part in enumerate(inner):
                    with microbatch(twins.model, is_last=inner.is_last):
                        squared(twins.model, rank, 10 * mine + part).backward()
                    ranks = [each for each in range(3) if microbatch_number <= each and (each < 2 or batch == 0)]
                    assert inner.has_data == (rank in ranks)
                    for each in ranks:
                        (squared(twins.plain, each, 10 * batch + microbatch_number) / len(ranks)).backward()
            assert twins.gradients_apart() < 1e-6
            twins.zero_grad()


@pytest.mark.parametrize("is_after", [False, True])
@on_ranks(2)
def test_an_evaluation_beside_the_training_loop_counts_every_batch(is_after: bool) -> None:
    twins = Twins()
    rank = dist.get_rank()
    with join(twins.model, range(1 + rank)) as joined:
        for number in joined if is_after else ():
            squared(twins.model, rank, number).backward()
        with torch.no_grad(), join(twins.model, range(2 - rank)) as evaluated:
            found = [(evaluated.has_data, evaluated.num_with_data) for _ in evaluated]
        assert found == [(True, 2), (rank == 0, 1)]
        for model in twins:
            model.zero_grad()
        twins.backward(3)
        assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_a_batch_drawn_by_next_has_its_weight() -> None:
    twins = Twins()
    rank = dist.get_rank()
    with join(twins.model, range(rank), filler=0) as joined:
        squared(twins.model, rank, next(iter(joined))).backward()
        squared(twins.plain, 1, 0).backward()
    assert twins.gradients_apart() < 1e-6


@on_ranks(3)
def test_units_trained_over_other_ranks_are_refused_by_name() -> None:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    fully_shard(model[0], mesh=DeviceMesh.from_group(halves[rank // 2], "cpu"))
    fully_shard(model, mesh=make_mesh((3,)))
    words = r"unit 'Sequential' is sharded over ranks 0-2, and parameter 'weight' of unit '0' over rank"
    with pytest.raises(StateError, match=words), join(model, range(1 + rank)):
        pass
    with torch.no_grad(), join(model, range(1 + rank)) as joined:
        assert len([model(inputs(rank, number)) for number in joined]) == 3


def run_until_last(model: Any, joined: Any) -> None:
    for mine in joined:
        if joined.is_last:
            raise KeyError
        squared(model, dist.get_rank(), mine).backward()


@on_ranks(2)
def test_an_exception_inside_leaves_gradients_with_their_weight() -> None:
    twins = Twins()
    with pytest.raises(KeyError), join(twins.model, range(1 + dist.get_rank())) as joined:
        run_until_last(twins.model, joined)
    twins.zero_grad()
    twins.backward(0)
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_fewer_batches_than_their_length_are_refused_by_name() -> None:
    class Short:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            return iter([0])

    twins = Twins()
    words = r"len\(\).* is 2, but batch 2 is missing"
    with pytest.raises(StateError, match=words), join(twins.model, Short()) as joined:
        list(joined)


def test_another_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match="ranks with data"), join(nn.Linear(1, 1), [], mean_over="none"):  # type: ignore[arg-type]
        pass


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(FsdpError, match="fully_shard"), join(nn.Linear(1, 1), []):
        pass
