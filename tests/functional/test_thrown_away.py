"""Microbatches that are dropped, skipped, interrupted or frozen leave what a plain model would hold, or an error."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import (
    MixedPrecisionPolicy,
    Placements,
    StateError,
    clip_grad_norm_,
    fully_shard,
    microbatch,
    no_sync,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Headed, inputs
from tests.harness.oracle import whole


class Side:
    """One of the two models that go through a script: the plain one, on all ranks' data, or the sharded one.

    Attributes:
        ranks: whose data it sees. accumulating: makes the block in which backward keeps gradients to itself.
    """

    def __init__(
        self, model: nn.Module, ranks: range, accumulating: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.accumulating = accumulating
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(self, step: int) -> list[torch.Tensor]:
        """Run forward on the data of one step."""
        return [self.model(inputs(rank, step)).square().mean() / len(self.ranks) for rank in self.ranks]

    def train(self, step: int) -> None:
        """Run forward and backward."""
        for loss in self.losses(step):
            loss.backward()

    def accumulate(self, step: int) -> None:
        """Run forward and backward of a microbatch that is not the last."""
        with self.accumulating():
            self.train(step)

    def fail(self, step: int, error: BaseException, where: str) -> None:
        """Run forward and backward of a step, in which a hook of the middle block raises."""

        def raise_it(*_: object) -> None:
            raise error

        def in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(raise_it)

        handle = self.model.layers[1].register_forward_hook(raise_it if where == "forward" else in_backward)
        with pytest.raises(type(error)):
            self.train(step)
        handle.remove()

    def set_trained(self, is_trained: bool, *names: str) -> None:
        """Freeze parameters, or train them."""
        for name in names:
            self.model.get_submodule(name).requires_grad_(is_trained)


# ---------------------------------------------------------------- thrown away


def dropped(side: Side) -> None:
    side.accumulate(0)
    side.optimizer.zero_grad()
    side.train(1)


def dropped_between_forward_and_backward(side: Side) -> None:
    side.accumulate(0)
    losses = side.losses(1)
    side.model.zero_grad()
    for loss in losses:
        loss.backward()


def dropped_after_two_forwards(side: Side) -> None:
    side.accumulate(0)
    first, second = side.losses(1), side.losses(2)
    side.optimizer.zero_grad()
    for loss in (*second, *first):
        loss.backward()


def zeroed(side: Side) -> None:
    side.accumulate(0)
    side.optimizer.zero_grad(set_to_none=False)
    side.accumulate(1)
    side.train(2)


def zeroed_and_not_used_again(side: Side) -> None:
    side.accumulate(0)
    side.optimizer.zero_grad(set_to_none=False)
    for parameter in side.model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(torch.ones_like(parameter))


def dropped_for_some_parameters(side: Side) -> None:
    side.accumulate(0)
    side.model.layers[0].norm.weight.grad = None
    side.model.layers[1].up.weight.grad.zero_()
    side.model.head.bias.grad = None
    side.accumulate(1)
    side.train(2)


def dropped_onto_final_gradients(side: Side) -> None:
    side.train(0)
    side.accumulate(1)
    side.optimizer.zero_grad()
    side.train(2)


def accumulated_onto_final_gradients(side: Side) -> None:
    side.train(0)
    side.accumulate(1)
    side.model.layers[2].up.weight.grad = None
    side.accumulate(2)
    side.train(3)


def replaced_while_under_way(side: Side) -> None:
    side.accumulate(0)
    for parameter in side.model.layers[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    side.train(1)


def dropped_with_a_penalty(side: Side) -> None:
    for step, is_last in ((0, False), (1, False), (2, True)):
        with nullcontext() if is_last else side.accumulating():
            # Its gradient reaches the sharded parameter itself.
            (0.1 * side.model.layers[0].up.weight.square().sum()).backward()
            side.train(step)
        if step == 0:
            side.optimizer.zero_grad()


# ---------------------------------------------------------------- skipped


def forward_without_backward(side: Side) -> None:
    side.accumulate(0)
    side.losses(1)
    side.train(2)


def two_forwards_and_the_backward_of_the_first(side: Side) -> None:
    first, second = side.losses(0), side.losses(1)
    for loss in first:
        loss.backward()
    del second
    side.train(2)


def two_forwards_and_the_backward_of_the_second(side: Side) -> None:
    first, second = side.losses(0), side.losses(1)
    for loss in second:
        loss.backward()
    side.train(2)
    del first


def step_without_backward(side: Side) -> None:
    side.train(0)
    side.optimizer.step()
    side.optimizer.zero_grad()
    side.losses(1)
    side.optimizer.step()
    side.train(2)


# ---------------------------------------------------------------- interrupted


def error_in_forward(side: Side) -> None:
    side.accumulate(0)
    side.fail(1, RuntimeError("out of memory"), "forward")
    side.train(2)


def interrupt_in_forward(side: Side) -> None:
    side.accumulate(0)
    side.fail(1, KeyboardInterrupt(), "forward")
    side.accumulate(2)
    side.train(3)


def error_in_backward(side: Side) -> None:
    side.fail(0, RuntimeError("out of memory"), "backward")
    side.optimizer.zero_grad()
    side.train(1)


def error_in_backward_after_a_microbatch(side: Side) -> None:
    side.accumulate(0)
    side.fail(1, RuntimeError("out of memory"), "backward")
    side.optimizer.zero_grad()
    side.accumulate(2)
    side.train(3)


def error_in_backward_after_final_gradients(side: Side) -> None:
    side.train(0)
    side.fail(1, RuntimeError("out of memory"), "backward")
    losses = side.losses(2)
    side.model.zero_grad(set_to_none=False)
    for loss in losses:
        loss.backward()


def interrupt_in_backward(side: Side) -> None:
    side.accumulate(0)
    with side.accumulating():
        side.fail(1, KeyboardInterrupt(), "backward")
    side.optimizer.zero_grad()
    side.optimizer.step()
    side.train(2)


def error_in_an_accumulating_backward_and_another_through_the_graph(side: Side) -> None:
    (*_, loss) = [(loss, 0) for loss in side.losses(0)][-1:]
    side.fail(1, RuntimeError("out of memory"), "backward")
    side.optimizer.zero_grad()
    for one in side.losses(0):
        one.backward()
    del loss


# ---------------------------------------------------------------- frozen


def frozen_between_forward_and_backward(side: Side) -> None:
    losses = side.losses(0)
    side.set_trained(False, "layers.0", "layers.1.up", "head")
    for loss in losses:
        loss.backward()
    assert all(parameter.grad is None for parameter in side.model.layers[0].parameters())
    side.set_trained(True, "layers.0", "layers.1.up", "head")
    side.optimizer.step()
    side.optimizer.zero_grad()
    side.train(1)
    side.set_trained(False, "layers.2")


def frozen_after_a_microbatch(side: Side) -> None:
    side.accumulate(0)
    side.set_trained(False, "layers.0", "layers.1.up")
    side.train(1)
    side.optimizer.step()


def frozen_after_final_gradients(side: Side) -> None:
    side.train(0)
    side.set_trained(False, "layers.0", "layers.1.up")
    side.accumulate(1)
    side.train(2)


SCRIPTS = [
    dropped, dropped_between_forward_and_backward, dropped_after_two_forwards, zeroed, zeroed_and_not_used_again,
    dropped_for_some_parameters, dropped_onto_final_gradients, accumulated_onto_final_gradients,
    replaced_while_under_way, dropped_with_a_penalty, forward_without_backward,
    two_forwards_and_the_backward_of_the_first, two_forwards_and_the_backward_of_the_second, step_without_backward,
    error_in_forward, interrupt_in_forward, error_in_backward, error_in_backward_after_a_microbatch,
    error_in_backward_after_final_gradients, interrupt_in_backward,
    error_in_an_accumulating_backward_and_another_through_the_graph, frozen_between_forward_and_backward,
    frozen_after_a_microbatch, frozen_after_final_gradients,
]  # fmt: skip

STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard", "hsdp", "hfsdp")


def sharded(strategy: str, **options: Any) -> nn.Module:
    """Make a model of one strategy; the outer axis of two-axis strategies is the one with two ranks."""
    torch.manual_seed(0)
    model = Headed(Block(), Block(hidden=1), Block(), outputs=3)
    axes = (0, 1) if strategy in ("hsdp", "hfsdp") else (0,)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner")) if len(axes) == 2 else None
    placements = getattr(Placements, strategy)(*axes)
    for part in (*model.layers, model):
        fully_shard(part, mesh, placements, **options)
    return model


ACCUMULATIONS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "no_sync": no_sync,
    "microbatch": lambda model: microbatch(model, is_last=False),
}


def compare(strategy: str, script: Callable[[Side], None], names: Sequence[str]) -> list[str]:
    """Return what differs from the plain model after a script: a line for each way of accumulating and parameter."""
    found = []
    for name in names:
        accumulate = ACCUMULATIONS[name]
        policy = MixedPrecisionPolicy(fuse_weight_gradients=name == "no_sync")
        model, rank = sharded(strategy, mp_policy=policy), dist.get_rank()
        torch.manual_seed(0)
        plain = Headed(Block(), Block(hidden=1), Block(), outputs=3)
        script(Side(model, range(rank, rank + 1), lambda model=model, accumulate=accumulate: accumulate(model)))
        script(Side(plain, range(dist.get_world_size()), nullcontext))
        for (path, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if (mine.grad is None) is not (theirs.grad is None):
                found.append(f"{name}: gradient of {path} is {mine.grad}, wanted {theirs.grad}")
            for what, one, other in (("gradient", mine.grad, theirs.grad), ("weight", mine, theirs)):
                worst = (whole(one, theirs) - whole(other, theirs)).abs().max().item()
                if not worst < 2e-6:
                    found.append(f"{name}: {what} of {path} is off by {worst:.2g}")
    return found


# All scripts under ZeRO-3 and a sixth under each other strategy, by turns with one and the other way of accumulating.
QUICK = [
    (strategy, script.__name__, tuple(ACCUMULATIONS)[(row + column) % 2])
    for row, strategy in enumerate(STRATEGIES)
    for column, script in enumerate(SCRIPTS)
    if row == 0 or (row + column) % 6 == 0
]


def differences(strategy: str, is_quick: bool) -> dict[str, list[str]]:
    found = {}
    for script in SCRIPTS:
        names = [name for name in ACCUMULATIONS if ((strategy, script.__name__, name) in QUICK) is is_quick]
        found[script.__name__] = compare(strategy, script, names)
    return found


@pytest.mark.parametrize("is_quick", nightly_but([True], [True, False]))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_and_weights_equal_those_of_a_plain_model_after_the_same_script(
    strategy: str, is_quick: bool
) -> None:
    for found in run_ranks(2, differences, strategy, is_quick, timeout=120):
        assert found == {script.__name__: [] for script in SCRIPTS}


# ---------------------------------------------------------------- refused


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except StateError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@on_ranks(2)
def test_a_sum_under_way_is_not_read_as_a_gradient(strategy: str) -> None:
    model = sharded(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with no_sync(model):
        model(inputs(dist.get_rank(), 0)).square().mean().backward()
    model.reshard()
    actions: list[Callable[[], object]] = [
        optimizer.step,
        lambda: clip_grad_norm_(model, 1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: model.head.weight.grad.full_tensor().sum(),
        lambda: model.head.weight.grad.mul_(0.5),
    ]
    messages = [message_of(action) for action in actions]
    after = [parameter.to_local() for parameter in model.parameters()]
    is_changed = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not is_changed
    for message in messages:
        assert "is a sum under way" in message or "before gradients are final" in message
        assert "outside of no_sync" in message
    assert all("parameter 'head.weight'" in message for message in messages[3:])


def refusals_after_a_backward_that_raised(strategy: str) -> tuple[list[str], bool]:
    model = sharded(strategy)
    side = Side(model, range(dist.get_rank(), dist.get_rank() + 1), nullcontext)
    side.train(0)
    side.fail(1, RuntimeError("out of memory"), "backward")
    messages = [message_of(side.optimizer.step), message_of(lambda: side.train(2)), message_of(lambda: side.train(3))]
    model.reset_iter_state()
    side.train(4)
    return messages, all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "hsdp"])
def test_training_on_the_gradients_of_a_backward_that_raised_is_refused_until_they_are_dropped(strategy: str) -> None:
    # The units behind the one that raised have gradients, and the root in the strategies that keep it from the start.
    incomplete = (
        r"unit '(layers\.2|Headed)': the gradient of parameter '.*' is incomplete, because the last backward raised"
    )
    for messages, goes_on in run_ranks(2, refusals_after_a_backward_that_raised, strategy):
        for message in messages:
            assert re.match(incomplete, message)
            assert "model.reset_iter_state()" in message
        assert goes_on


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard", "hsdp"])
@on_ranks(2)
def test_a_backward_that_raised_is_over_for_the_next_forward_while_a_thread_still_holds_its_task(strategy: str) -> None:
    torch.manual_seed(0)
    plain = Side(Headed(Block(), Block(hidden=1), Block(), outputs=3), range(2), nullcontext)
    model = sharded(strategy)
    side = Side(model, range(dist.get_rank(), dist.get_rank() + 1), nullcontext)
    backward, held = model._fsdp_unit.backward, []
    follow = backward._follow_task

    def keep() -> Any:
        reference = follow()
        # As a device's thread does that has not got as far as to drop the graph task.
        held.append(reference())
        return reference

    backward._follow_task = keep
    side.fail(0, RuntimeError("out of memory"), "backward")
    backward._follow_task = follow
    assert held[0] is not None
    # The task's end had not been seen when somebody may have dropped the gradients, so they are to be dropped now.
    assert "is incomplete, because the last backward raised" in message_of(lambda: side.train(1))
    for each in (side, plain):
        each.optimizer.zero_grad()
        each.train(1)
    wanted = dict(plain.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name].grad)
