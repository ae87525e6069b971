"""A forward that only one rank runs gathers the right weights, and ends in an error with a name on every rank."""

import contextlib
import copy
import io
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import whereabouts
from megatron_fsdp.checks import rendezvous
from tests.harness import RankError, on_ranks, run_ranks
from tests.harness.oracle import sharded
from tests.harness.timeouts import give_up_after


def run_one_more_forward(grad: bool) -> None:
    """Train beyond the steps that compare units between ranks; then rank 0 runs one more forward."""
    # The engine's communicators use the job's timeout, which is short here but not the limit of this call.
    give_up_after(10.0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(3)))
    # Units of one size: gloo ends the process if ranks gather different sizes.
    model = sharded(copy.deepcopy(plain), reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    if dist.get_rank() == 0:
        inputs = torch.randn(2, 8)
        with torch.set_grad_enabled(grad):
            assert torch.allclose(model(inputs), plain(inputs))
    for _ in range(3):
        step()


@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_of_one_rank_before_a_step_of_all_names_every_rank(grad: bool) -> None:
    with pytest.raises(RankError) as found:
        run_ranks(3, run_one_more_forward, grad, timeout=120, fresh=True)
    texts = {failure.rank: failure.report for failure in found.value.failures}
    assert [rank for rank in range(3) if "AgreementError: unit " in texts[rank]] == [0, 1, 2], texts
    assert "failed on rank 0" in texts[0]


@on_ranks(2)
def test_a_rank_that_ends_in_its_own_collective_prints_where_the_others_wait() -> None:
    if dist.get_rank() == 0:
        whereabouts.publish("waits for weights or gradients of the engine, at train.py:7 (model(batch))")
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
