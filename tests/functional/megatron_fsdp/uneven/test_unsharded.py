"""Forwards inside unsharded() need no collective; weights may be read; unequal changes are refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import MeshError
from dbuffer.storage import FlatStorage
from megatron_fsdp import (
    AgreementError,
    FsdpError,
    MixedPrecisionPolicy,
    StateError,
    explain,
    unsharded,
)
from megatron_fsdp.checks import rendezvous
from tests.harness import on_ranks
from tests.harness.models import Made, inputs, squared
from tests.harness.twins import Twins, sharded

WORLDS = {"optim": 3, "optim_grads": 2, "optim_grads_params": 3, "hsdp": 4}
ON_THEIR_RANKS: Any = on_ranks(lambda strategy: WORLDS[strategy])
all_strategies = pytest.mark.parametrize("strategy", list(WORLDS))


def evaluate_unevenly(twins: Twins, step: int) -> None:
    """Evaluate a different number of batches on each rank."""
    with torch.no_grad(), unsharded(twins.model):
        for number in range(1 + 2 * dist.get_rank()):
            found = squared(twins.model, dist.get_rank(), 10 * step + number)
            wanted = squared(twins.plain, dist.get_rank(), 10 * step + number)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@all_strategies
@ON_THEIR_RANKS
def test_uneven_evaluations_between_microbatches_change_no_training(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    optimizers = twins.optimizers(torch.optim.AdamW, lr=1e-2)
    for step in range(4):
        evaluate_unevenly(twins, step)
        for microbatch in range(2):
            twins.backward(3 * step + microbatch)
            evaluate_unevenly(twins, step)
        assert twins.gradients_apart() < 1e-6
        twins.step(optimizers)
        evaluate_unevenly(twins, step)
        assert twins.weights_apart() < 1e-6


@on_ranks(3)
def test_a_block_between_forward_and_backward_changes_no_gradient() -> None:
    twins = Twins()
    for step in range(3):
        loss = squared(twins.model, dist.get_rank(), step)
        evaluate_unevenly(twins, step)
        loss.backward()
        twins.plain_backward(step)
        assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_a_forward_inside_may_have_its_backward_outside() -> None:
    twins = Twins()
    with unsharded(twins.model):
        loss = squared(twins.model, dist.get_rank(), 0)
    loss.backward()
    twins.plain_backward(0)
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_a_backward_inside_gives_the_plain_gradients() -> None:
    twins = Twins()
    with unsharded(twins.model):
        twins.backward(0)
    assert twins.gradients_apart() < 1e-6


class Router(nn.Module):
    """Runs the part that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        """Return (rows, 7)."""
        for number in order:
            x = x + self.parts[number](x)
        return x


@on_ranks(3)
def test_ranks_may_run_other_units_in_other_orders() -> None:
    twins = Twins(Router)
    rank = dist.get_rank()
    orders = [[0], [2, 1, 0, 2], [1, 1]]

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        out: torch.Tensor = model(inputs(rank, step, 2, 7), [0, 1, 2]).square().mean()
        return out

    for step in range(3):
        twins.backward(step, loss)
        assert twins.gradients_apart() < 1e-6
        with torch.no_grad(), unsharded(twins.model):
            found = twins.model(inputs(rank, step, 2, 7), orders[(rank + step) % 3])
            wanted = twins.plain(inputs(rank, step, 2, 7), orders[(rank + step) % 3])
        torch.testing.assert_close(found, wanted)


@on_ranks(3)
def test_units_that_are_not_named_gather_as_usual() -> None:
    twins = Twins(Router)
    rank = dist.get_rank()
    held = twins.model.parts[1]
    with torch.no_grad(), unsharded(twins.model, units=[held]):
        for number in range(2):
            order = [0, *[1] * rank, 2]
            found = twins.model(inputs(rank, number, 2, 7), order)
            torch.testing.assert_close(found, twins.plain(inputs(rank, number, 2, 7), order))
        assert type(twins.model.parts[0].weight).__name__ == "FlatDTensor"
        torch.testing.assert_close(held.weight.detach(), twins.plain.parts[1].weight.detach())


@all_strategies
@ON_THEIR_RANKS
def test_parameters_inside_are_whole_and_sharded_again_after(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    with unsharded(twins.model), unsharded(twins.model):
        for mine, wanted in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), wanted.detach())
    assert all(hasattr(parameter, "full_tensor") for parameter in twins.model.parameters())
    assert twins.weights_apart() == 0


@on_ranks(2)
def test_the_inner_of_two_blocks_keeps_the_outer_ones_weights() -> None:
    twins = Twins()
    with torch.no_grad(), unsharded(twins.model):
        with unsharded(twins.model):
            pass
        for number in range(1 + dist.get_rank()):
            squared(twins.model, dist.get_rank(), number)


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_a_change_is_refused_by_name_and_not_kept(strategy: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    twins = Twins(strategy=strategy, mp_policy=policy)
    first = next(iter(dict(twins.model.named_parameters())))
    with pytest.raises(StateError, match="writeback=True") as error, torch.no_grad(), unsharded(twins.model):
        dict(twins.model.named_parameters())[first].add_(1.0)
    assert first.rpartition(".")[2] in str(error.value)
    assert twins.weights_apart() == 0
    squared(twins.model, dist.get_rank(), 0).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@all_strategies
@ON_THEIR_RANKS
def test_writeback_keeps_what_all_ranks_change(strategy: str, dtype: torch.dtype) -> None:
    twins = Twins(strategy=strategy, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    with torch.no_grad(), unsharded(twins.model, writeback=True):
        for model in twins:
            list(model.parameters())[1][0] = 3.0
            list(model.parameters())[-1].fill_(0.5)
        squared(twins.model, dist.get_rank(), 0)
    # Unchanged elements keep their FP32 values.
    assert twins.weights_apart() == 0
    if dtype is torch.float32:
        twins.backward(1)
        assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_writeback_keeps_the_remainder_of_split_main_weights() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, split_main_params=True)
    twins = Twins(mp_policy=policy)
    with torch.no_grad(), unsharded(twins.model, writeback=True):
        next(iter(twins.model.parameters()))[0] = 3.0
    with torch.no_grad():
        next(iter(twins.plain.parameters()))[0] = 3.0
    for group in (group for part in twins.model.modules() for group in getattr(part, "parameter_groups", ())):
        values = group.weights.values()
        for index, name in enumerate(group.parameters):
            assert values.layout.piece(index, values.local_buffer).isfinite().all(), name
    assert twins.weights_apart() < 1e-2


@all_strategies
@ON_THEIR_RANKS
def test_changes_that_differ_between_ranks_are_refused_by_name(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    words = "the ranks changed weights differently"
    with pytest.raises(MeshError, match=words), torch.no_grad(), unsharded(twins.model, writeback=True):
        next(iter(twins.model.parameters())).add_(float(dist.get_rank()))
    assert twins.weights_apart() == 0
    twins.backward(1)
    assert twins.gradients_apart() < 1e-6


def change_and_raise(model: Any) -> None:
    next(iter(model.parameters())).add_(1.0)
    raise KeyError


@all_strategies
@ON_THEIR_RANKS
def test_an_exception_inside_leaves_the_model_sharded_and_unchanged(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    with pytest.raises(KeyError), torch.no_grad(), unsharded(twins.model, writeback=True):
        change_and_raise(twins.model)
    assert twins.weights_apart() == 0
    twins.backward(0)
    assert twins.gradients_apart() < 1e-6


class Unreachable:
    """A store whose host has ended."""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Connection reset by peer")


def raise_without_store(model: Any, patch: pytest.MonkeyPatch) -> None:
    with unsharded(model, writeback=True):
        patch.setattr(rendezvous, "job_store", Unreachable)
        raise KeyError


@on_ranks(2)
def test_an_exception_inside_reaches_the_caller_when_the_store_is_gone() -> None:
    twins = Twins()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        raise_without_store(twins.model, patch)
    twins.model.reshard()
    twins.backward(0)
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_a_step_inside_is_refused_by_name() -> None:
    twins = Twins()
    optimizer, _ = twins.optimizers(torch.optim.SGD, lr=0.1)
    twins.backward(0)
    with pytest.raises(StateError, match=r"SGD\.step\(\).*inside unsharded\(\)"), unsharded(twins.model):
        optimizer.step()
    optimizer.step()


@on_ranks(2)
def test_another_models_step_inside_is_allowed() -> None:
    twins = Twins()
    other = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with torch.no_grad(), unsharded(twins.model):
        other.weight.grad = torch.ones(1, 3)
        optimizer.step()
        torch.testing.assert_close(squared(twins.model, dist.get_rank(), 0), squared(twins.plain, dist.get_rank(), 0))


def change_and_run(model: Any, sharded: list[torch.Tensor]) -> None:
    for parameter in sharded:
        parameter.mul_(2.0)
    squared(model, dist.get_rank(), 0)


@on_ranks(2)
def test_a_change_of_main_weights_inside_is_refused_in_the_next_forward() -> None:
    twins = Twins()
    kept = list(twins.model.parameters())
    words = r"main weights of .* changed inside"
    with pytest.raises(StateError, match=words), torch.no_grad(), unsharded(twins.model):
        change_and_run(twins.model, kept)


@pytest.mark.parametrize("action", ["reshard", "double", "state_dict"])
@on_ranks(2)
def test_methods_that_would_release_weights_are_refused_inside(action: str) -> None:
    twins = Twins()
    with pytest.raises(StateError, match=r"inside unsharded\(\)"), unsharded(twins.model):
        getattr(twins.model.layers[0], action)()
    twins.backward(0)
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_ranks_that_gather_different_units_raise_an_error() -> None:
    twins = Twins()
    parts = list(twins.model.layers if hasattr(twins.model, "layers") else twins.model.children())
    with pytest.raises(MeshError, match="other units"), unsharded(twins.model, units=[parts[dist.get_rank()]]):
        pass


@on_ranks(2)
def test_a_rank_without_memory_keeps_no_rank_waiting() -> None:
    twins = Twins()
    allocate = FlatStorage.reallocate
    calls = [0]

    def run_out(self: FlatStorage) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("no memory for this one")
        allocate(self)

    if dist.get_rank() == 1:
        FlatStorage.reallocate = run_out  # type: ignore[method-assign]
    try:
        with pytest.raises((AgreementError, torch.OutOfMemoryError)) as error, unsharded(twins.model):
            pass
    finally:
        FlatStorage.reallocate = allocate  # type: ignore[method-assign]
    assert "no memory for this one" in str(error.value)
    twins.backward(0)
    assert twins.gradients_apart() < 1e-6


def one_linear(model: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.linear(x)
    return found


@on_ranks(2)
def test_explain_says_what_all_gathered_weights_take() -> None:
    model = sharded(Made(one_linear, linear=nn.Linear(7, 3)))
    with unsharded(model):
        (group,) = model.linear.parameter_groups
        assert explain(model).all_gathered_bytes == group.gathered.storage.nbytes >= 4 * 24
    assert "all units, gathered" in str(explain(model))


@on_ranks(2)
def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(FsdpError, match="fully_shard"), unsharded(nn.Linear(2, 2)):
        pass
