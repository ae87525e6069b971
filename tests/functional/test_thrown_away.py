"""Microbatches that are dropped, skipped, interrupted or frozen leave what a plain model would hold, or an error."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import Placements, StateError, clip_grad_norm_, fully_shard, no_sync
from tests.functional.random_models import Part, Wrap
from tests.functional.random_use import Program
from tests.functional.random_use_refusals import REFUSALS
from tests.functional.random_use_run import run
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Headed, inputs, make_mesh

# Programs in the words of ``random_use``, where "add" is a forward and a backward of a microbatch that is not the last
# one and "train" those of the last one. Of Wrap 1, which "fuse 1" breaks, the weights are 3 to 6; 0 to 2 and 7 to 9 are
# those of the units before and after it, and two of the root follow.
USES = {
    "a microbatch is dropped": "add, zero_grad none, train",
    "it is dropped between forward and backward": "add, forward, zero_grad model, backward",
    "it is dropped after two forwards": "add, forward, forward, zero_grad none, backward apart",
    "a sum is set to zero": "add, zero_grad zero, add, train",
    "a sum is set to zero and no backward follows": "add, zero_grad zero, grad add all kept",
    "a sum is dropped for some parameters": (
        "add, grad none 0 kept amid, grad zero 4 kept amid, grad none 10 kept amid, add, train"
    ),
    "a microbatch on final gradients is dropped": "train, add, zero_grad none, train",
    "one parameter's is dropped": "train, add, grad none 8 kept amid, add, train",
    "gradients are replaced in a sum": "add, grad ones 3 kept amid, grad ones 6 kept amid, train",
    "a microbatch with a penalty is dropped": (
        "forward penalty kept, backward *, zero_grad none, forward penalty kept, backward *, "
        "forward penalty kept, backward"
    ),
    "a forward has no backward": "add, forward, drop, train",
    "of two forwards the first has a backward": "forward, forward, backward first, drop, train",
    "of two forwards the second has a backward": "forward, forward, backward latest, forward, backward latest",
    "a step has no backward": "train, step, zero_grad none, forward, step, train",
    "an error in forward": "add, forward bomb 1 error, train",
    "an interrupt in forward": "add, forward bomb 1 interrupt, add, train",
    "an error in backward": "forward fuse 1 error, backward, zero_grad none, train",
    "an error in backward after a microbatch": "add, forward fuse 1 error, backward, zero_grad none, add, train",
    "an error in backward after final ones": "train, forward fuse 1 error, backward, forward, zero_grad zero, backward",
    "an interrupt in backward": "add, forward fuse 1 interrupt, backward *, zero_grad none, step, train",
    "an error in the backward of the second of two forwards": (
        "forward, forward fuse 1 error, backward latest, zero_grad none, backward, train"
    ),
    "weights are frozen between forward and backward": (
        "forward, freeze 0 kept, freeze 3 kept, freeze 10 kept, backward, thaw all kept, step, zero_grad none, train, "
        "freeze 8 kept"
    ),
    "weights are frozen after a microbatch": "add, freeze 0 kept, freeze 3 kept, train, step",
    "weights are frozen after final gradients": "train, freeze 0 kept, freeze 3 kept, add, train",
}
STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard", "hsdp", "hfsdp")
# By each way of accumulating; one of them multiplies weight gradients apart from their buffers.
POLICIES = {"no_sync": "none", "microbatch": "unfused"}


def program_of(strategy: str, use: str, how: str) -> Program:
    part = Part("gated", (Part("linear", size=3), Part("mlp", (), 3), Part("linear", size=2)), 2)
    wraps = (Wrap((path,), strategy, policy=POLICIES[how]) for path in ("parts.0", "parts.1", "parts.2", ""))
    actions = USES[use].replace("add,", "forward, backward *,").replace("train", "forward, backward").replace("*", how)
    return Program(part, actions, tuple(wraps), mesh=(2, 1))


# All uses under ZeRO-3 and a sixth under each other strategy, by turns with one and the other way of accumulating.
QUICK = [
    (strategy, use, tuple(POLICIES)[(row + column) % 2])
    for row, strategy in enumerate(STRATEGIES)
    for column, use in enumerate(USES)
    if row == 0 or (row + column) % 6 == 0
]


@pytest.mark.parametrize("is_quick", nightly_but([True], [True, False]))
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, timeout=120)
def test_losses_gradients_and_weights_are_a_plain_models_at_every_moment(strategy: str, is_quick: bool) -> None:
    for use in USES:
        for how in POLICIES:
            if ((strategy, use, how) in QUICK) is is_quick:
                verdict = run(program_of(strategy, use, how), REFUSALS)
                assert (verdict.outcome, verdict.num_allowances) == ("same", 0), (use, how, verdict)


def sharded(strategy: str) -> nn.Module:
    torch.manual_seed(0)
    model = Headed(Block(), Block(hidden=1), Block(), outputs=3)
    mesh = make_mesh((2, 1) if strategy == "hsdp" else (2,))
    for part in (*model.layers, model):
        fully_shard(part, mesh, getattr(Placements, strategy)(*range(mesh.ndim)))
    return model


def train(model: nn.Module, step: int) -> None:
    model(inputs(dist.get_rank(), step)).square().mean().backward()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@on_ranks(2)
def test_a_sum_under_way_is_not_read_as_a_gradient(strategy: str) -> None:
    model = sharded(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    with no_sync(model):
        train(model, 0)
    model.reshard()
    reads: list[tuple[str, Callable[[], object]]] = [
        ("", optimizer.step),
        ("", lambda: clip_grad_norm_(model, 1.0)),
        ("", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        ("parameter 'head.weight'.*", lambda: model.head.weight.grad.full_tensor().sum()),
        ("parameter 'head.weight'.*", lambda: model.head.weight.grad.mul_(0.5)),
    ]
    for name, read in reads:
        with pytest.raises(
            StateError, match=rf"(?s){name}(is a sum under way|before gradients are final).*outside of no_sync"
        ):
            read()
    for one, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, parameter.to_local())


def fail(model: nn.Module, step: int) -> None:
    """Run forward and backward of a step in which a hook behind the middle block raises."""

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.layers[1].register_forward_hook(lambda module, _, output: output.register_hook(explode) and None)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model, step)
    handle.remove()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "hsdp"])
@on_ranks(2)
def test_training_on_the_gradients_of_a_backward_that_raised_is_refused_until_they_are_dropped(strategy: str) -> None:
    model = sharded(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 0)
    fail(model, 1)
    # The units behind the one that raised have gradients, and the root in the strategies that keep it from the start.
    incomplete = (
        r"unit '(layers\.2|Headed)': the gradient of parameter '.*' is incomplete, because the last backward raised"
    )
    for step in (optimizer.step, lambda: train(model, 2), lambda: train(model, 3)):
        with pytest.raises(StateError) as refused:
            step()
        assert re.match(incomplete, str(refused.value))
        assert "model.reset_iter_state()" in str(refused.value)
    model.reset_iter_state()
    train(model, 4)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard", "hsdp"])
@on_ranks(2)
def test_a_backward_that_raised_is_over_for_the_next_forward_while_a_thread_still_holds_its_task(strategy: str) -> None:
    model = sharded(strategy)
    torch.manual_seed(0)
    plain = Headed(Block(), Block(hidden=1), Block(), outputs=3)
    backward, held = model._fsdp_unit.backward, []
    follow = backward._follow_task

    def keep() -> Any:
        reference = follow()
        # As a device's thread does that has not got as far as to drop the graph task.
        held.append(reference())
        return reference

    backward._follow_task = keep
    fail(model, 0)
    backward._follow_task = follow
    assert held[0] is not None
    # The task's end had not been seen when somebody may have dropped the gradients, so they are to be dropped now.
    with pytest.raises(StateError, match="is incomplete, because the last backward raised"):
        train(model, 1)
    model.zero_grad()
    train(model, 1)
    for rank in range(2):
        (plain(inputs(rank, 1)).square().mean() / 2).backward()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grad)
