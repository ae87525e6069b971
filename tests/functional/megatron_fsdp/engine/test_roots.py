"""Units below two roots, roots below a module that is sharded later, and hooks that are called when a step ends."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, StateError, fully_shard, no_sync, reshard_
from megatron_fsdp.engine.accumulation import GradBinding
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, Stack, inputs, squared
from tests.harness.oracle import whole
from tests.harness.twins import Twins


def build() -> nn.Module:
    return Stack(Block(), Block(hidden=5))


class Head(nn.Module):
    """An encoder, which another head may use too, and a layer."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.last = encoder, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.encoder(x))
        return result


class Heads(nn.Module):
    """Two heads with one encoder."""

    def __init__(self) -> None:
        super().__init__()
        encoder = build()
        self.first, self.second = Head(encoder), Head(encoder)


def shard_heads(model: Any, *_: Any, **options: Any) -> None:
    for layer in model.first.encoder.layers:
        fully_shard(layer, **options)
    fully_shard(model.first, **options)
    fully_shard(model.second, **options)


def of_first(model: Any, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = model.first(inputs(rank, step).requires_grad_()).square().mean()
    return loss


def of_both(model: Any, rank: int, step: int) -> torch.Tensor:
    return of_first(model, rank, step) + model.second(inputs(rank, step + 50)).square().mean()


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_an_encoder_below_two_roots_trains_as_in_a_plain_model(strategy: str, freezes: bool) -> None:
    twins = Twins(Heads, strategy, shard=shard_heads)
    for model in twins:
        model.first.set_reduce_scatter_max_input_buffers(4) if model is twins.model else None
        model.first.encoder.layers[0].requires_grad_(not freezes)
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.1)
    for step in range(4):
        twins.backward(step, of_first if step % 2 else of_both)
        assert twins.gradients_apart() < 1e-6
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model in twins:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter).detach() if parameter.requires_grad else None
    twins.backward(5, of_first)
    assert twins.gradients_apart() < 1e-6
    assert twins.weights_apart() < 1e-6


def wrap(twins: Twins, **options: Any) -> None:
    """Shard a module around the model, which was a root."""
    torch.manual_seed(3)
    outer = Head(twins.plain)
    twins.plain, twins.model = outer, Head(twins.model)
    twins.model.last = copy.deepcopy(outer.last)
    fully_shard(twins.model, **options)


def after_no_sync(model: nn.Module) -> None:
    with no_sync(model):
        squared(model, dist.get_rank(), 0).backward()


def after_an_error(model: nn.Module) -> None:
    with (
        mock.patch.object(GradBinding, "complete", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        squared(model, dist.get_rank(), 0).backward()


@pytest.mark.parametrize("leave", [after_no_sync, after_an_error])
@on_ranks(2)
def test_dropped_sums_stay_dropped_when_the_root_gets_another_root(leave: Callable[[nn.Module], None]) -> None:
    twins = Twins(build)
    leave(twins.model)
    twins.model.zero_grad()
    wrap(twins)
    for step in range(2):
        twins.zero_grad()
        twins.backward(step + 1)
        assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_an_incomplete_sum_is_refused_before_a_root_around_it_changes_anything() -> None:
    twins = Twins(build)
    after_an_error(twins.model)
    inner = twins.model
    with pytest.raises(StateError, match="is incomplete, because the last backward raised"):
        wrap(twins)
    inner.zero_grad()
    fully_shard(twins.model)
    twins.backward(1)
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_settings_of_a_root_hold_below_the_module_that_is_sharded_around_it() -> None:
    twins = Twins(build)
    twins.model.set_manual_backward_finalization(True)
    wrap(twins)
    twins.backward(0)
    for parameter in twins.model.encoder.parameters():
        with pytest.raises(StateError, match=r"call finalize_backward\(\)"):
            parameter.grad.full_tensor()
    twins.model.finalize_backward()
    assert twins.gradients_apart() < 1e-6


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_reductions_in_flight_of_several_roots_are_completed_by_the_root_around_them(strategy: str) -> None:
    def shard_layers(model: Any, *_: Any, **options: Any) -> None:
        for layer in model.layers:
            fully_shard(layer, **options)
            layer.set_manual_backward_finalization(True)

    twins = Twins(build, strategy, shard=shard_layers)
    twins.backward(0)
    # Each layer was a root and has issued a reduction that nothing has waited for.
    assert all(layer._fsdp_unit.root.backward.reducing for layer in twins.model.layers)
    fully_shard(twins.model)
    twins.model.finalize_backward()
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_sums_that_were_dropped_do_not_stand_in_the_way_of_a_move_or_a_conversion() -> None:
    twins = Twins(build)
    after_no_sync(twins.model)
    twins.model.zero_grad()
    reshard_(twins.model)
    after_an_error(twins.model)
    twins.model.zero_grad()
    for model in twins:
        model.double()
    (squared(twins.model.float(), dist.get_rank(), 1)).backward()
    twins.plain.float()
    twins.plain_backward(1)
    assert twins.gradients_apart() < 1e-6


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_a_hook_of_the_first_layer_may_step_all_weights(strategy: str) -> None:
    twins = Twins(build, strategy)
    mine, theirs = twins.optimizers(torch.optim.SGD, lr=0.1)

    def step(_: torch.Tensor) -> None:
        mine.step()
        mine.zero_grad()

    next(twins.model.layers[0].parameters()).register_post_accumulate_grad_hook(step)
    for number in range(2):
        twins.backward(number)
        theirs.step()
        theirs.zero_grad()
        assert twins.gradients_apart() == 0
        assert twins.weights_apart() < 1e-6


@on_ranks(2)
def test_slots_may_be_given_up_while_reductions_are_in_flight() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, accumulate_dtype=torch.float32)
    twins = Twins(build, mp_policy=policy)
    twins.model.set_slot_pool("by_size")
    twins.model.set_manual_backward_finalization(True)
    twins.model.set_reduce_scatter_max_input_buffers(4)
    twins.backward(0)
    twins.model.set_slot_pool(None)
    twins.model.finalize_backward()
    for mine, wanted in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad, wanted), wanted.grad, rtol=0.02, atol=0.01)


@on_ranks(2)
def test_a_unit_that_was_removed_from_a_forward_order_is_named_with_the_fix() -> None:
    twins = Twins(build)
    twins.model.set_forward_order()
    twins.backward(0)
    twins.zero_grad()
    for model in twins:
        del model.layers[1]
    with pytest.raises(StateError, match=r"was removed from the model. fix: call set_forward_order\(\)"):
        twins.backward(1)
    twins.model.set_forward_order()
    twins.backward(1)
    assert twins.gradients_apart() < 1e-6
