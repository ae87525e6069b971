"""Ranks that differ or hang raise an error that names the unit; correct programs raise none."""

import contextlib
import datetime
import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, SequenceParallel, parallelize_module

from megatron_fsdp import AgreementError, ConfigError, StateError, Watch, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Block, Made, Model, draw_tokens, inputs, loss_of
from tests.harness.oracle import sharded_model, train, whole_state
from tests.harness.twins import Twins

# Long enough for ranks on a busy machine to answer.
TIMEOUT = datetime.timedelta(seconds=2)
STALL_S = 6.0


def step(model: Model, tokens: torch.Tensor) -> float:
    loss = loss_of(model(tokens), tokens)
    torch.autograd.backward(loss)
    return loss.item()


def stall_in_forward(model: Model) -> None:
    model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(STALL_S))


def swap_blocks(model: Model) -> None:
    """Run rank 1's blocks, which have equal sizes, in another order: no rank hangs, but weights are mixed up."""
    model.blocks = nn.ModuleList(reversed(model.blocks))


def skip_block(model: Model) -> None:
    model.blocks = nn.ModuleList(list(model.blocks)[1:])


def unshard_alone(model: Model) -> None:

    def look(root: Any, *_: object) -> None:
        root.blocks[0].unshard()
        root.blocks[0].reshard()

    model.register_forward_hook(look)


def raise_in_forward(model: Model) -> None:

    def fail(*_: object) -> None:
        raise KeyError("token")

    model.blocks[1].register_forward_pre_hook(fail)


FAULTS: dict[str, Callable[[Model], None]] = {
    function.__name__: function
    for function in (stall_in_forward, swap_blocks, skip_block, unshard_alone, raise_in_forward)
}


def train_past_the_comparison_of_orders(model: Model) -> None:
    """Run the backwards that compare the order of units between ranks."""
    for _ in range(3):
        step(model, draw_tokens(dist.get_rank()))
        model.zero_grad()


def run_with(fault: str) -> tuple[str, float]:
    """Return the text of this rank's error, and the seconds until it was raised."""
    model, tokens = sharded_model(), draw_tokens(dist.get_rank())
    train_past_the_comparison_of_orders(model)
    if dist.get_rank() == 1:
        FAULTS[fault](model)
    start = time.monotonic()
    try:
        with Watch(model, TIMEOUT):
            for _ in range(3):
                step(model, tokens)
    except (AgreementError, KeyError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


WANTED = {
    "stall_in_forward": r"waited for 2 s.*ranks 0, 2: waiting in use 'blocks.0'.*rank 1: standing at "
    r"test_watch.py:\d+ in <lambda>, after use 'blocks.1'.*the others went on with gather 'blocks.0'",
    "swap_blocks": r"different branches at action \d+, after gather .*:\s+ranks 0, 2: gather 'blocks.0'\s+"
    r"rank 1: gather 'blocks.1'",
    "raise_in_forward": r"waited for 2 s.*rank 1: gone with KeyError: 'token', after reshard 'Model'",
    "unshard_alone": r"different branches at action \d+.*rank 1: gather 'blocks.0'",
    "skip_block": r"different branches at action \d+.*rank 1: gather 'blocks.1'",
}


@pytest.mark.parametrize("fault", WANTED)
def test_every_rank_raises_an_error_with_each_ranks_action_and_unit(fault: str) -> None:
    for rank, (error, seconds) in enumerate(run_ranks(3, run_with, fault)):
        if rank == 1 and fault == "raise_in_forward":
            assert error == "KeyError: 'token'"
            continue
        assert error.startswith("AgreementError"), (rank, error)
        assert re.search(WANTED[fault], error, re.DOTALL), error
        assert seconds < (STALL_S if rank != 1 else STALL_S + 3)


@on_ranks(3)
def test_ranks_that_opened_different_numbers_of_watches_before_understand_each_other() -> None:
    fault = "skip_block"
    part = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        model = sharded_model(mesh=part)
        with Watch(model, TIMEOUT):
            step(model, draw_tokens(dist.get_rank()))
    error, _ = run_with(fault)
    assert re.search(WANTED["skip_block"], error, re.DOTALL), error


@on_ranks(3)
def test_swapped_units_of_one_size_are_found_at_the_end_and_at_an_interval() -> None:
    errors = []
    for way in ("check", "end", "interval 2"):
        model, tokens = sharded_model(), draw_tokens(dist.get_rank())
        train_past_the_comparison_of_orders(model)
        watch = Watch(model, TIMEOUT, interval=2 if way == "interval 2" else 1)
        steps = 0
        try:
            with watch:
                if dist.get_rank() == 1:
                    swap_blocks(model)
                for _ in range(1 if way != "interval 2" else 6):
                    step(model, tokens)
                    steps += 1
                if way == "check":
                    watch.check()
                    steps += 100
        except AgreementError as error:
            errors.append(f"{way} after {steps}: {str(error).splitlines()[0]}")
        dist.barrier()
    text = "the ranks did not issue the same collectives, so gradients or weights may be wrong:"
    assert errors == [f"check after 1: {text}", f"end after 1: {text}", f"interval 2 after 3: {text}"]


def train_watched(strategy: str, shape: tuple[int, ...], is_watched: bool) -> dict[str, torch.Tensor]:
    model = sharded_model(strategy, mesh=shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    threads = threading.enumerate()
    with Watch(model, TIMEOUT * 30) if is_watched else contextlib.nullcontext() as watch:
        train(model, optimizer, range(3), [dist.get_rank()])
        if watch is not None:
            watch.check()
    assert threading.enumerate() == threads
    return whole_state(model)


@pytest.mark.parametrize(("strategy", "shape"), [("optim_grads_params", (3,)), ("optim", (2,)), ("hfsdp", (2, 2))])
def test_watched_training_gives_the_same_bits(strategy: str, shape: tuple[int, ...]) -> None:
    num_ranks = torch.Size(shape).numel()
    plain = run_ranks(num_ranks, train_watched, strategy, shape, False)
    watched = run_ranks(num_ranks, train_watched, strategy, shape, True)
    for mine, other in zip(watched, plain, strict=True):
        assert mine.keys() == other.keys()
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


def two_heads(model: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
    x = model.second(model.first(x))
    return model.head(x) + (model.extra(x) if rank else 0)


# The part that the first rank leaves out: one of two heads that the root owns, or the layers before the blocks.
UNEVEN: dict[str, Callable[[Any, torch.Tensor, int], torch.Tensor]] = {
    "a head": two_heads,
    "a part": lambda model, x, rank: model.first(model.second(x if rank == 0 else model.extra(model.head(x)))),
}


@pytest.mark.parametrize("kind", UNEVEN)
@on_ranks(3)
def test_ranks_that_use_different_parameters_still_agree_and_train_as_a_whole_model(kind: str) -> None:
    def build() -> nn.Module:
        return Made(UNEVEN[kind], first=Block(), second=Block(), head=nn.Linear(7, 7), extra=nn.Linear(7, 7))

    twins = Twins(build, units=lambda model: (model.first, model.second))
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.1)
    with Watch(twins.model, 30 * TIMEOUT) as watch:
        for number in range(3):
            twins.backward(number, lambda model, rank, step: model(inputs(rank, step), rank).square().mean())
            assert twins.gradients_apart() < 2e-6
            twins.step(optimizers)
        watch.check()
    assert twins.weights_apart() < 2e-6


@on_ranks(1)
def test_a_single_rank_has_no_agreement_to_check() -> None:
    model = sharded_model(mesh=(1,))
    with Watch(model) as watch:
        step(model, draw_tokens(0))
        watch.check()
        assert all(thread.name != "megatron_fsdp watch" for thread in threading.enumerate())


class Timed(dist.Work):
    """A GPU's collective that completes after two checks; records the timeouts passed to ``wait``."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.times = 0, list[datetime.timedelta]()

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        self.times.append(timeout)
        return True


@on_ranks(1)
def test_a_gpu_collective_is_polled_without_a_timeout_that_makes_nccl_abort() -> None:
    watch = Watch(sharded_model(mesh=(1,)))
    watch._looks = True
    work = Timed()
    with mock.patch.object(dist, "Work", Timed):
        watch.wait(work)
    assert work.looks == 3
    assert work.times == [datetime.timedelta(0)]


@on_ranks(2)
def test_a_watch_that_was_left_is_refused_a_second_time() -> None:
    watch = Watch(sharded_model(), TIMEOUT)
    with watch:
        pass
    with pytest.raises(StateError, match=r"this Watch was entered before.* fix: make a new Watch\(model\)"), watch:
        pass


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ConfigError, match="no module of the model is sharded"):
        Watch(nn.Linear(2, 2))


REPLICATED = [((2, 2), "hsdp", 3, "rank 1 against rank 3"), ((3,), "no_shard", 1, "rank 1 against ranks 0, 2")]


def damaged(shape: tuple[int, ...], strategy: str, broken: int | None) -> tuple[str, int]:
    """Flip one bit of two blocks on one rank between two steps; return the error, and the number of steps begun."""
    model, tokens = sharded_model(strategy, mesh=shape), draw_tokens(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    number = 0
    try:
        with Watch(model, TIMEOUT * 30, replica_interval=2):
            for number in range(1, 7):
                step(model, tokens)
                optimizer.step()
                optimizer.zero_grad()
                if number == 3 and dist.get_rank() == broken:
                    for block in list(model.blocks)[:0:-1]:
                        block.project.weight.detach().to_local().view(-1).view(torch.int32)[-1] ^= 1
    except AgreementError as error:
        return str(error).splitlines()[0], number
    return "no error", number


@pytest.mark.parametrize(("shape", "strategy", "broken", "sides"), REPLICATED)
def test_one_bit_of_one_replica_is_found_at_the_next_comparison_and_named(
    shape: tuple[int, ...], strategy: str, broken: int, sides: str
) -> None:
    for error, number in run_ranks(torch.Size(shape).numel(), damaged, shape, strategy, broken):
        assert error.startswith("replicas differ")
        assert error.endswith(f"parameter 'project.weight' of unit 'blocks.1': {sides}")
        assert number == 5


@pytest.mark.parametrize(("shape", "strategy"), [((2, 2), "hsdp"), ((2,), "no_shard"), ((3,), "optim_grads_params")])
def test_undamaged_replicas_agree_and_single_shards_are_not_compared(shape: tuple[int, ...], strategy: str) -> None:
    assert set(run_ranks(torch.Size(shape).numel(), damaged, shape, strategy, None)) == {("no error", 6)}


@on_ranks(2)
def test_a_check_looks_at_replicas_at_once_and_frozen_parameters_count() -> None:
    model: Any = sharded_model("no_shard", mesh=(2,))
    with Watch(model, TIMEOUT * 30, replica_interval=1000) as watch:
        watch.check()
        if dist.get_rank() == 1:
            model.shift.detach().to_local()[0] += 1
        with pytest.raises(AgreementError) as error:
            watch.check()
    assert str(error.value).splitlines()[0].endswith("parameter 'shift' of unit 'Model': rank 0 against rank 1")


@on_ranks(4)
def test_replicas_over_tensor_parallel_ranks_are_compared_on_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
    plan: dict[str, ParallelStyle] = {"0": SequenceParallel(), "1": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh["dp"])
    with Watch(model, TIMEOUT * 30, replica_interval=1) as watch:
        watch.check()
        if dist.get_rank() == 2:
            model[0].bias.detach().to_local()[0] += 1
        with pytest.raises(AgreementError) as error:
            watch.check()
    assert str(error.value).splitlines()[0].endswith("parameter '0.bias' of unit 'Sequential': rank 2 against rank 3")


@on_ranks(3)
def test_a_rank_that_left_its_watch_is_not_taken_for_dead() -> None:
    model, tokens = sharded_model(), draw_tokens(dist.get_rank())
    train_past_the_comparison_of_orders(model)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() != 0:
        with Watch(model, TIMEOUT):
            step(model, tokens)
        # The wait stands for a collective of the script.
        store.wait(["rank 0 was told"])
        return
    with pytest.raises(AgreementError, match=r"ranks 1-2: out of its Watch, which it left at test_watch.py:\d+"):
        step_twice_watched(model, tokens)
    store.set("rank 0 was told", "")


def step_twice_watched(model: Model, tokens: torch.Tensor) -> None:
    with Watch(model, TIMEOUT):
        for _ in range(2):
            step(model, tokens)
