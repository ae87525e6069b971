"""Stream order on a double of CUDA's streams; the cases of ``tests.certify`` search for races.

The training runs on the CPU, in host order; vector clocks compute the order that events and waits alone guarantee on a
GPU.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    ParameterGroup,
    Watch,
    fully_shard,
    no_sync,
)
from megatron_fsdp.certify.checker import Checker
from megatron_fsdp.certify.clocks import VirtualStreams
from megatron_fsdp.engine.streams import drive_with, latest_submission
from tests.certify.models import Branches
from tests.harness import on_ranks
from tests.harness.models import Block, Stack, inputs
from tests.harness.twins import Twins, sharded


@contextlib.contextmanager
def driven() -> Iterator[tuple[VirtualStreams, Checker]]:
    double = VirtualStreams()
    with drive_with(double), Checker(double) as watching:
        yield double, watching


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    return [group for module in model.modules() if isinstance(module, FsdpModule) for group in module.parameter_groups]


@on_ranks(1)
def test_small_gradients_are_copied_on_their_stream_before_another_ones_turn() -> None:
    copied: list[tuple[str, str]] = []
    with driven() as (double, _):
        model = fully_shard(
            Branches(double, 5, bias=False), mp_policy=MixedPrecisionPolicy(fuse_weight_gradients=False)
        )
        names = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
        buffer: Any = groups_of(model)[0].gradient_buffer
        pack = buffer._pack

        def noted(index: int, gradient: torch.Tensor) -> None:
            copied.append((double.current().name, names[index]))
            pack(index, gradient)

        buffer._pack = noted
        model(inputs(0, 0)).square().mean().backward()
    assert copied == [("side", "there"), ("compute", "here"), ("side", "there_first"), ("compute", "common"),
                      ("compute", "here_first")]  # fmt: skip


@on_ranks(1)
def test_compute_waits_for_a_gather_only_where_it_uses_the_weights() -> None:
    seen = []
    with driven() as (double, _):
        model = sharded(Stack(Block(), Block(hidden=1), Block(hidden=17), Block()))

        def look(gradient: torch.Tensor) -> None:
            gathers = double.lanes[0]
            are_packed = any(
                group.gradient_buffer.is_filled for group in groups_of(model) if group.gradient_buffer is not None
            )
            seen.append((are_packed, double.compute.follows(gathers)))

        def watch(output: torch.Tensor) -> None:
            output.register_hook(look)

        for layer in list(model.layers)[1:]:
            # The norm's output has a gradient when the linear layers behind it have theirs.
            layer.get_submodule("norm").register_forward_hook(lambda _, args, output: watch(output))
        model(inputs(0, 0)).square().mean().backward()
    assert seen == [(True, False)] * 3


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
        # A wait for an event outside the capture raises.
        assert double.waits


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


class Recomputed(nn.Module):
    """A layer that computes again, in an inner backward, each time that backward reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


@on_ranks(4)
def test_a_unit_used_again_after_its_last_reduction_gets_its_whole_gradient() -> None:
    def loss(model: nn.Module, rank: int, _: int) -> torch.Tensor:
        first, second = (inputs(rank, step, 3, 5) for step in range(2))
        return model(first).square().mean() + model(second).sin().mean()

    for strategy in ("hsdp", "hfsdp"):
        with driven():
            twins = Twins(lambda: nn.Sequential(nn.Linear(5, 5), Recomputed()), strategy, units=lambda m: [m[1].inner])
            twins.backward(0, loss)
            assert twins.gradients_apart() < 1e-6
