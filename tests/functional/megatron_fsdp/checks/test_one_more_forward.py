"""A forward that only one rank runs gathers the right weights, and ends in an error with a name on every rank."""

import contextlib
import datetime
import io
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import whereabouts
from megatron_fsdp import Placements, fully_shard
from megatron_fsdp.checks import rendezvous
from tests.harness import RankError, on_ranks, run_ranks

STRATEGIES = {
    "ZeRO-3": Placements.optim_grads_params(0),
    "ZeRO-1": Placements.optim(0),
}


def uneven_blocks() -> nn.Sequential:
    """Return a model whose units have different sizes, so that a gather of one does not fit another."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8 + 3 * i), nn.GELU(), nn.Linear(8 + 3 * i, 8)) for i in range(3))
    )


def run_one_more_forward(strategy: str, grad: bool, following: str) -> None:
    """Train beyond the steps in which units are compared; then rank 0 runs one more forward."""
    # The engine's communicators take the job's timeout. Short, but not the limit of this call.
    world: Any = dist.group.WORLD
    world._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=10))
    model = uneven_blocks()
    for block in model:
        fully_shard(block, placements=STRATEGIES[strategy], reshard_after_forward=True)
    fully_shard(model, placements=STRATEGIES[strategy], reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    plain = uneven_blocks()
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    if dist.get_rank() == 0:
        inputs = torch.randn(2, 8)
        with torch.set_grad_enabled(grad):
            assert torch.allclose(model(inputs), plain(inputs))
    if following == "gather":
        dist.all_gather([torch.empty(400) for _ in range(dist.get_world_size())], torch.ones(400))
    for _ in range(3):
        step()


def texts_of_ranks(*arguments: object) -> dict[int, str]:
    """Return what each of three ranks raised."""
    with pytest.raises(RankError) as found:
        run_ranks(3, run_one_more_forward, *arguments, timeout=120, fresh=True)
    return {failure.rank: failure.report for failure in found.value.failures}


@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_of_one_rank_before_a_step_of_all_names_every_rank(grad: bool) -> None:
    texts = texts_of_ranks("ZeRO-3", grad, "training")
    assert [rank for rank in range(3) if "AgreementError: unit " in texts[rank]] == [0, 1, 2], texts
    assert "the gather of its weights failed on rank 0" in texts[0]
    assert "rank 0 waits for weights or gradients of the engine" in texts[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_of_one_rank_never_pairs_with_a_gather_of_the_script(strategy: str) -> None:
    texts = texts_of_ranks(strategy, False, "gather")
    assert "AgreementError: unit " in texts[0], texts
    assert "the gather of its weights failed on rank 0" in texts[0]
    # Gloo's own words, of the script's own collective: the process lives, and explains them when it ends.
    assert "RuntimeError" in texts[1], texts
    assert "all_gather" in texts[1]


@on_ranks(2)
def test_a_rank_that_ends_in_its_own_collective_prints_where_the_others_wait() -> None:
    if dist.get_rank() == 0:
        whereabouts._say("waits for weights or gradients of the engine, at train.py:7 (model(batch))")
    dist.barrier()
    printed = io.StringIO()
    if dist.get_rank() == 1:
        error = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation")
        with mock.patch.object(sys, "last_value", error, create=True), contextlib.redirect_stderr(printed):
            rendezvous._leave_word()
        assert printed.getvalue().startswith("megatron_fsdp: rank 1 ended in a collective of the script's own: another")
        assert "rank 0 waits for weights or gradients of the engine, at train.py:7 (model(batch))" in printed.getvalue()
        assert "fix: root.set_forward_order()" in printed.getvalue()
    dist.barrier()
