"""Gathers that run ahead by a number of elements: which units, in which order, and that results stay the same."""

import argparse

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import FsdpConfig, add_megatron_fsdp_args, fully_shard
from megatron_fsdp.config.fsdp_config import prefetch_elements
from megatron_fsdp.errors import StateError
from tests.harness import on_ranks, run_ranks
from tests.harness.transcript import record_transcript

# Each of five layers has 7 * 7 + 7 elements; the root owns a projection of 7 * 3 + 3.
LAYER = 56


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(5))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def config(line: str) -> FsdpConfig:
    return FsdpConfig.from_args(add_megatron_fsdp_args(argparse.ArgumentParser()).parse_args(line.split()))


def steps(line: str) -> tuple[list[str], list[torch.Tensor]]:
    """Return what the runtime did in the second of two steps, and the gradients after it."""
    given = config(line)
    torch.manual_seed(5)
    model, mesh = Stack(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = given.fully_shard_kwargs(mesh)
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    fully_shard(model, mesh, **options)
    given.apply(model)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        x = torch.randn(2, 7)
        with record_transcript() as transcript:
            model(x).square().mean().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters() if parameter.grad is not None]
    return transcript, gradients


def ahead(transcript: list[str]) -> list[list[str]]:
    """Return which units' gathers were started between one use of weights and the next."""
    rounds: list[list[str]] = [[]]
    for line in transcript:
        verb, _, unit = line.partition(" ")
        if verb == "use":
            rounds.append([])
        elif verb == "gather":
            rounds[-1].append(unit.rpartition(".")[2] or unit)
    return rounds


SIZE = "--suggested-communication-unit-size"


def test_suggested_communication_unit_size_gathers_so_many_elements_ahead() -> None:
    (both, _), (other, _) = run_ranks(2, steps, f"{SIZE} {2 * LAYER}")
    assert both == other, "ranks gather in another order"
    (default, _), _ = run_ranks(2, steps, "")
    # Of the forward: the root's own weights and two layers, then one more at each layer, as those ahead are consumed.
    assert [len(units) for units in ahead(both)[:6]] == [1, 2, 1, 1, 1, 0]
    assert ahead(both)[1] == ["0", "1"]
    assert [len(units) for units in ahead(default)[:6]] == [1, 1, 1, 1, 1, 1]
    # In backward layer 4 is still there, and layer 3 is gathered ahead of its use; with a size layer 2 is, too.
    for transcript, is_started in ((both, True), (default, False)):
        backward = [line.replace("layers.", "") for line in transcript[transcript.index("reshard layers.3") + 1 :]]
        assert ("gather 2" in backward[: backward.index("reshard 4")]) is is_started


@pytest.mark.parametrize("size", [1, LAYER + 1, 10**9])
def test_the_size_changes_no_gradient(size: int) -> None:
    for (_, found), (_, wanted) in zip(run_ranks(2, steps, f"{SIZE} {size}"), run_ranks(2, steps, ""), strict=True):
        assert len(found) == len(wanted) == 12
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@on_ranks(1)
def test_units_are_taken_until_they_hold_the_number_and_there_is_always_one() -> None:
    found = {}
    for size in (1, LAYER, LAYER + 1, 3 * LAYER, 10**9):
        model, mesh = Stack(), init_device_mesh("cpu", (1,))
        for layer in model.layers:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        prefetch_elements(model, size)
        units = [layer._fsdp_unit for layer in model.layers]
        found[size] = (
            [len(unit.forward_prefetch) for unit in units],
            [len(unit.backward_prefetch) for unit in units],
        )
    assert found == {
        1: ([1, 1, 1, 1, 0], [0, 1, 1, 1, 1]),
        LAYER: ([1, 1, 1, 1, 0], [0, 1, 1, 1, 1]),
        LAYER + 1: ([2, 2, 2, 1, 0], [0, 1, 2, 2, 2]),
        3 * LAYER: ([3, 3, 2, 1, 0], [0, 1, 2, 3, 3]),
        10**9: ([4, 3, 2, 1, 0], [0, 1, 2, 3, 4]),
    }


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(StateError, match="Linear holds no sharded module"):
        prefetch_elements(nn.Linear(1, 1), 5)
