"""What orders streams, host and lanes, proved without a GPU: a double of CUDA's streams finds accesses that race.

The training runs on the CPU, in host order; vector clocks say what events and waits alone would promise on a GPU.
"""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import (
    AdamW,
    CPUOffloadPolicy,
    FsdpModule,
    MixedPrecisionPolicy,
    ParameterGroup,
    Watch,
    fully_shard,
    no_sync,
)
from megatron_fsdp.certify.checker import Checker
from megatron_fsdp.certify.clocks import CaptureError, Queue, VirtualStreams
from megatron_fsdp.runtime.step.cuda_lane import latest_submission
from megatron_fsdp.runtime.step.lanes import drive_with
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, Stack, inputs, three_blocks
from tests.harness.twins import sharded

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_params_dtype=torch.float32)


@contextlib.contextmanager
def driven() -> Iterator[tuple[VirtualStreams, Checker]]:
    double = VirtualStreams()
    with drive_with(double), Checker(double) as watching:
        yield double, watching


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    return [group for module in model.modules() if isinstance(module, FsdpModule) for group in module.parameter_groups]


def name_buffers(watching: Checker, model: nn.Module) -> None:
    for group in groups_of(model):
        buffers = {"main_weight": group.main_weight, "model_weight": group.model_weight, "main_grad": group.main_grad}
        for name, buffer in buffers.items():
            # Others are named when they get memory.
            if buffer is not None and buffer.is_allocated:
                watching.name(f"{group.name}: {name}", buffer.local_buffer)


class Here(torch.autograd.Function):
    """Runs what comes before it in backward on a stream, as autograd does with what ran there in forward.

    The stream waits for the one that made the gradient, and for nothing else.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, double: VirtualStreams, stream: Queue) -> torch.Tensor:
        ctx.double, ctx.stream = double, stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.stream is not ctx.double.compute:
            ctx.stream.wait_stream(ctx.double.compute)
        ctx.double.switch(ctx.stream)
        return gradients[0], None, None


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_training_step_orders_all_that_lanes_and_compute_share(policy: MixedPrecisionPolicy | None) -> None:
    with driven() as (_, watching):
        model = sharded(three_blocks(), mp_policy=policy)
        optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=1.0)
        for step in range(3):
            model(inputs(0, step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert watching.races == []


@pytest.mark.parametrize("policy", [None, BF16], ids=["stepped itself", "cast"])
@on_ranks(1)
def test_the_host_writes_offloaded_weights_after_the_gathers_that_read_them(
    policy: MixedPrecisionPolicy | None,
) -> None:
    with driven() as (_, watching):
        model = sharded(three_blocks(), mp_policy=policy, offload_policy=CPUOffloadPolicy())
        for group in groups_of(model):
            buffers = (group.main_weight, group.model_weight, group.main_grad)
            watching.lies_on_host(*(buffer.local_buffer for buffer in buffers if buffer is not None))
        name_buffers(watching, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(3):
            with torch.no_grad():
                model(inputs(0, step))
            model(inputs(0, step)).float().square().mean().backward()
            with watching.on_host():
                optimizer.step()
            with torch.no_grad():
                model(inputs(0, step))
            with watching.on_host(), torch.no_grad():
                for group in groups_of(model):
                    group.main_weight.local_buffer.mul_(0.5)
        assert watching.races == []


class Branches(nn.Module):
    """Two branches, one of which runs on another stream, forward and backward; both use a common weight too."""

    def __init__(self, double: VirtualStreams, hidden: int) -> None:
        super().__init__()
        self.double, self.side = double, double.stream("side")
        self.common = nn.Linear(WIDTH, WIDTH)
        self.here, self.there = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = Here.apply(self.here(self.common(x)), self.double, self.double.compute)
        self.side.wait_stream(self.double.compute)
        with self.double.use(self.side):
            there = Here.apply(self.there(self.common(x)), self.double, self.side)
        self.double.compute.wait_stream(self.side)
        return torch.cat((here, there), -1)


@pytest.mark.parametrize("fuses", [False, True], ids=["copied", "multiplied"])
@pytest.mark.parametrize("hidden", [5, 4000], ids=["small", "large"])
@on_ranks(1)
def test_gradients_of_a_branch_on_another_stream_are_packed_before_they_are_reduced(hidden: int, fuses: bool) -> None:
    with driven() as (double, watching):
        policy = MixedPrecisionPolicy(fuse_weight_gradients=fuses)
        model = fully_shard(Branches(double, hidden), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        name_buffers(watching, model)
        group = groups_of(model)[0]
        group.gradients.packed.reallocate_storage()
        watching.name("packed gradients", group.gradients.packed.local_buffer)
        group.gradients.packed.release_storage()
        for step in range(2):
            model(inputs(0, step)).square().mean().backward()
            assert double.current() is double.compute
            optimizer.step()
            optimizer.zero_grad()
        assert [race for race in watching.races if not race.startswith("a tensor")] == []


@on_ranks(1)
def test_small_gradients_are_copied_on_the_stream_that_made_them_before_another_has_its_turn() -> None:
    # Those of the layer on the side, then those of the other and of the common one.
    copied = []
    with driven() as (double, _):
        model = fully_shard(Branches(double, 5), mp_policy=MixedPrecisionPolicy(fuse_weight_gradients=False))
        buffer = groups_of(model)[0].gradients
        pack = buffer._pack

        def noted(index: int, gradient: torch.Tensor) -> None:
            copied.append(double.current().name)
            pack(index, gradient)

        buffer._pack = noted
        model(inputs(0, 0)).square().mean().backward()
    assert [(name, copied.count(name)) for name in dict.fromkeys(copied)] == [("side", 2), ("compute", 4)]


@on_ranks(1)
def test_compute_waits_for_a_gather_only_where_it_uses_the_weights() -> None:
    seen = []
    with driven() as (double, _):
        model = sharded(Stack(Block(), Block(hidden=1), Block(hidden=17), Block()))

        def look(gradient: torch.Tensor) -> None:
            gathers = double.lanes[0]
            are_packed = any(group.gradients.is_filled for group in groups_of(model) if group.gradients is not None)
            seen.append((are_packed, double.compute.follows(gathers)))

        def watch(output: torch.Tensor) -> None:
            output.register_hook(look)

        for layer in list(model.layers)[1:]:
            # Its output has a gradient when the linear layers behind it have theirs.
            layer.get_submodule("norm").register_forward_hook(lambda _, args, output: watch(output))
        model(inputs(0, 0)).square().mean().backward()
    assert seen == [(True, False)] * 3


@on_ranks(1)
def test_a_graph_that_ends_with_the_backward_has_joined_every_lane() -> None:
    with driven() as (double, watching):
        model = sharded(three_blocks())
        name_buffers(watching, model)
        optimizer = AdamW(model.parameters(), lr=1e-2, capturable=True)

        def forward_and_backward() -> None:
            model(inputs(0, 0)).square().mean().backward()

        with double.use(aside := double.stream("aside")):
            aside.wait_stream(double.compute)
            forward_and_backward()
            optimizer.step()
            optimizer.zero_grad()
        double.compute.wait_stream(aside)
        graph, hooks = double.stream("graph"), double.stream("hooks")
        graph.wait_stream(double.compute)
        with double.capture(graph):
            hooks.wait_stream(graph)
            loss = model(inputs(0, 0)).square().mean()
            with double.use(hooks):
                hooks.wait_stream(graph)
                loss.register_hook(lambda _: double.switch(hooks))
                model.layers[0].register_full_backward_pre_hook(lambda *_: double.switch(graph))
            loss.backward()
            joined = [graph.follows(lane) for lane in double.lanes]
        double.compute.wait_stream(graph)
        optimizer.step()
        found = [race for race in watching.races if "main_" in race or "model_" in race], joined
        assert found == ([], [True, True])


@pytest.mark.parametrize("second", ["no_sync", "deleted"])
@on_ranks(1)
def test_a_second_graph_waits_for_nothing_of_the_first(second: str) -> None:
    with driven() as (double, _):
        model = sharded(Stack(Block(), Block()))
        graphs = [double.stream(f"graph {number}") for number in range(2)]
        model(inputs(0, 0)).square().mean().backward()
        graphs[0].wait_stream(double.compute)
        with double.capture(graphs[0]):
            model(inputs(0, 0)).square().mean().backward()
        graphs[1].wait_stream(graphs[0])
        with double.capture(graphs[1]):
            if second == "no_sync":
                with no_sync(model):
                    model(inputs(0, 1)).square().mean().backward()
            else:
                fully_shard(nn.Linear(3, 3))
                gc.collect()


@on_ranks(1)
def test_the_watch_queries_no_event_of_a_capture() -> None:
    with driven() as (double, _):
        model = sharded(Stack(Block(), Block()))
        watch = Watch(model)
        watch._timeout_s = -1.0
        model(inputs(0, 0)).square().mean().backward()
        looked = latest_submission() is not None
        assert not watch._is_stuck()
        graph = double.stream("graph")
        with double.capture(graph):
            model(inputs(0, 1)).square().mean().backward()
            assert not watch._is_stuck()
        assert not watch._is_stuck()
        assert looked
        assert latest_submission() is None


@on_ranks(1)
def test_memory_of_a_deleted_model_goes_back_after_the_lanes_that_use_it() -> None:
    with driven() as (double, _):
        model = sharded(three_blocks())
        model.layers[0].unshard(async_op=True)
        before = [double.compute.follows(lane) for lane in double.lanes]
        gone = weakref.ref(model)
        del model
        gc.collect()
        after, is_gone = [double.compute.follows(lane) for lane in double.lanes], gone() is None
        assert not all(before)
        assert all(after)
        assert is_gone


@on_ranks(1)
def test_the_double_finds_two_streams_that_nothing_orders() -> None:
    with driven() as (double, watching):
        tensor = torch.zeros(3)
        watching.name("it", tensor)
        with double.use(double.stream("side")):
            tensor.add_(1)
        (race,) = watching.races
        assert race == "it: write by aten::zeros on compute, then write by aten::add_ on side"


def misuse_of_captures() -> list[str]:
    double, errors = VirtualStreams(), []

    def capture_and_fork(lane: Queue) -> None:
        with double.capture(graph):
            inside = double.event()
            inside.record(graph)
            for call in (lambda: graph.wait_event(before), inside.query, inside.synchronize):
                with pytest.raises(CaptureError) as refused:
                    call()
                errors.append(str(refused.value))
            lane.wait_stream(graph)
            lane.tick()

    before = double.event()
    before.record(double.compute)
    graph = double.stream("graph")
    with pytest.raises(CaptureError) as error:
        capture_and_fork(double.new(torch.device("cpu"), "gather"))
    return [*errors, str(error.value)]


def test_the_double_refuses_what_cuda_refuses_in_a_capture() -> None:
    words = ("outside of the capture", "queries", "synchronizes", "never joined")
    assert all(word in error for word, error in zip(words, misuse_of_captures(), strict=True))
