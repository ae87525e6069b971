"""The methods of the model that fully_shard_model returns: microbatches, gradients and weights."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import observe_collectives
from megatron_fsdp import StateError
from megatron_fsdp.integrations.megatron.fully_shard_model import fully_shard_model
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, inputs, squared
from tests.harness.oracle import units_of
from tests.harness.twins import Twins

NUM_MICROBATCHES = 3
STRATEGIES = {"zero0": (0, 0, 1), "zero1": (1, 0, 1), "zero2": (2, 0, 1), "zero3": (3, 0, 1), "hsdp": (3, 0, 2),
              "hfsdp": (3, 1, 2)}  # fmt: skip


def twins_of(strategy: str, **options: Any) -> Twins:
    zero, outer, num_axes = STRATEGIES[strategy]
    if num_axes == 2:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "dp"))
        options |= {"device_mesh": mesh, "dp_outer_dim": "outer", "dp_shard_dim": "dp"}
    return Twins(shard=lambda model: fully_shard_model(model, [Block], zero, outer, **options))


Backward = Callable[[MegatronFSDP, int], None]


def backward(model: MegatronFSDP, index: int) -> None:
    squared(model, dist.get_rank(), index).backward()


def in_no_sync(model: MegatronFSDP, index: int) -> None:
    with model.no_sync() if index < NUM_MICROBATCHES - 1 else nullcontext():
        backward(model, index)


def in_sync_at_the_end(model: MegatronFSDP, index: int) -> None:
    with model.sync() if index == NUM_MICROBATCHES - 1 else nullcontext():
        backward(model, index)


def finished_by_hand(model: MegatronFSDP, index: int) -> None:
    backward(model, index)
    if index == NUM_MICROBATCHES - 1:
        model.start_grad_sync()
        model.finish_grad_sync()
        model.finish_grad_sync()
        model.synchronize_gradient_reduce()
        model.attach_grad_to_optimizer_state()


def switched_by_hand(model: MegatronFSDP, index: int) -> None:
    model.set_model_auto_sync(index == NUM_MICROBATCHES - 1)
    backward(model, index)


LOOPS: dict[str, tuple[bool, Backward]] = {
    "every backward is synced": (True, backward), "no_sync": (True, in_no_sync), "sync": (False, in_sync_at_the_end),
    "finish_grad_sync": (False, finished_by_hand), "set_model_auto_sync": (True, switched_by_hand),
}  # fmt: skip


def accumulated(loop: str, strategy: str) -> tuple[float, int]:
    """Return the largest error of gradients in two steps, and how often the axis of partial sums was reduced."""
    syncs, run = LOOPS[loop]
    twins = twins_of(strategy, sync_model_each_microbatch=syncs)
    worst, kinds = 0.0, Counter[str]()
    for step in range(2):
        with observe_collectives(lambda call: kinds.update([call.kind])):
            for index in range(NUM_MICROBATCHES):
                run(twins.model, index)
                twins.plain_backward(index)
        worst = max(worst, twins.gradients_apart())
        twins.step(twins.optimizers(torch.optim.SGD, lr=0.1 * (step + 1)))
    return worst, kinds["all_reduce"]


ONE_AXIS = ("zero0", "zero1", "zero2", "zero3")
# Each loop runs under one strategy with whole gradients and one with sharded gradients; each strategy runs at least
# twice.
QUICK = [(loop, ONE_AXIS[(place + 2 * half) % 4]) for place, loop in enumerate(LOOPS) for half in range(2)]


@pytest.mark.parametrize(("loop", "strategy"), nightly_but(QUICK, product(LOOPS, ONE_AXIS)))
def test_gradients_are_the_sum_over_microbatches_with(loop: str, strategy: str) -> None:
    for worst, num_all_reduces in run_ranks(2, accumulated, loop, strategy):
        assert worst < 2e-6
        if strategy == "zero0":
            once_a_step = 2 * 3
            assert num_all_reduces == once_a_step * (NUM_MICROBATCHES if loop.startswith("every") else 1)


ON_TWO_AXES = list(product(("no_sync", "finish_grad_sync"), ("hsdp", "hfsdp")))


@pytest.mark.parametrize(("loop", "strategy"), nightly_but([ON_TWO_AXES[1], ON_TWO_AXES[2]], ON_TWO_AXES))
def test_gradients_are_the_sum_over_microbatches_on_two_axes_with(loop: str, strategy: str) -> None:
    assert max(worst for worst, _ in run_ranks(4, accumulated, loop, strategy)) < 2e-6


def without_finish(strategy: str) -> bool:
    model = twins_of(strategy, sync_model_each_microbatch=False).model
    backward(model, 0)
    try:
        return not all(parameter.grad.isfinite().all() for parameter in model.parameters())
    except StateError as error:
        return "is a sum under way" in str(error)


@pytest.mark.parametrize(("strategy", "wanted"), [("zero0", True), ("zero1", True), ("zero3", False)])
def test_unsharded_gradients_cannot_be_read_before_they_are_final(strategy: str, wanted: bool) -> None:
    assert run_ranks(2, without_finish, strategy) == [wanted, wanted]


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_zero_grad_buffer_drops_final_gradients_and_unfinished_ones(strategy: str) -> None:
    twins = twins_of(strategy, sync_model_each_microbatch=False)
    model = twins.model
    backward(model, 0)
    model.zero_grad_buffer()
    backward(model, 1)
    model.finish_grad_sync()
    model.zero_grad_buffer()
    assert all(parameter.grad is None for parameter in model.parameters())
    backward(model, 2)
    model.finish_grad_sync()
    twins.plain_backward(2)
    assert twins.gradients_apart() < 2e-6


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3"])
@on_ranks(3)
def test_gradients_of_a_loss_per_token_are_summed_and_scaled(strategy: str) -> None:
    twins = twins_of(strategy, calculate_per_token_loss=True, sync_model_each_microbatch=False)
    model, oracle = twins
    counts = [2 + rank for rank in range(dist.get_world_size())]
    model(inputs(dist.get_rank(), 0, counts[dist.get_rank()], 7)).square().sum().backward()
    if strategy == "zero3":
        model.scale_gradients(2.0)
        model.scale_gradients(0.5)
    else:
        with pytest.raises(ValueError, match=r"finish_grad_sync\(\) first"):
            model.scale_gradients(2.0)
    model.finish_grad_sync()
    model.scale_gradients(1 / sum(counts))
    for rank, count in enumerate(counts):
        (oracle(inputs(rank, 0, count, 7)).square().sum() / sum(counts)).backward()
    assert twins.gradients_apart() < 5e-6


@pytest.mark.parametrize("force_sync", [True, False])
@on_ranks(2)
def test_start_param_sync_gathers_what_forward_needs_first(force_sync: bool) -> None:
    model, oracle = twins_of("zero3")
    kinds: Counter[str] = Counter()
    counts = []
    with torch.no_grad(), observe_collectives(lambda call: kinds.update([call.kind])):
        model.start_param_sync(force_sync=force_sync)
        counts.append(kinds["all_gather"])
        for _ in range(2):
            output = model(inputs(0, 0))
            counts.append(kinds["all_gather"] - sum(counts))
        model.start_param_sync()
        model.synchronize_param_gather()
        assert torch.equal(output, model(inputs(0, 0)))
        worst = float((output - oracle(inputs(0, 0))).abs().max())
    assert counts == [1, 2, 3]
    assert worst < 1e-6


def broadcast_from_first(strategy: str) -> tuple[list[float], list[float]]:
    """Shard models that differ between ranks; return the distance from rank 0's before and after."""
    model, oracle = twins_of(strategy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 + dist.get_rank())

    def distance() -> list[float]:
        with torch.no_grad():
            return [
                float((model(inputs(0, 0)) - oracle(inputs(0, 0))).abs().max()),
                float(next(oracle.parameters())[0]),
            ]

    before = distance()
    model.broadcast_params()
    return before, distance()


def test_broadcast_params_makes_replicas_equal_to_the_first() -> None:
    (_, first), (before, after) = run_ranks(2, broadcast_from_first, "zero0")
    assert before[0] > 1e-3
    assert after[0] < 1e-6
    assert first[0] < 1e-6


def test_broadcast_params_goes_over_the_outer_axis_alone() -> None:
    found = run_ranks(4, broadcast_from_first, "hsdp")
    # Ranks 0 and 1 are the first replica: its weights are rank 0's rows, and rank 1's doubled ones.
    assert len({round(after[0], 5) for _, after in found}) == 1
    assert found[0][0][0] != pytest.approx(found[2][0][0], abs=1e-3)


@on_ranks(2)
def test_install_optimized_model_weights_takes_over_what_no_counter_shows() -> None:
    model, oracle = twins_of("zero1")
    with torch.no_grad():
        model(inputs(0, 0))
    for unit in units_of(model):
        for group in unit.parameter_groups:
            group.main_weight.local_buffer.numpy()[:] *= 2.0
    model.install_optimized_model_weights()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.mul_(2.0)
        assert float((model(inputs(0, 0)) - oracle(inputs(0, 0))).abs().max()) < 1e-5


@on_ranks(1)
def test_the_model_keeps_its_class_and_names_and_refuses_what_cannot_be_changed() -> None:
    model, oracle = twins_of("zero3")
    assert list(model.state_dict()) == list(oracle.state_dict())
    assert isinstance(model, type(oracle))
    assert type(model).__name__ == "MegatronFSDPStack"
    with pytest.raises(ValueError, match="call fully_shard_model once"):
        fully_shard_model(model, [Block])
    for name, arguments, words in (
        ("mixed_precision_context", (None,), "mixed_precision_context:"),
        ("reset_mixed_precision_policy", (None,), "mixed_precision_context:"),
        ("get_distributed_index", (), "get_distributed_index:"),
        ("all_gather_and_wait_parameters_ready", ([], False, True), "all_gather_and_wait_parameters_ready:"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            getattr(model, name)(*arguments)
