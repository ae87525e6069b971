"""Muon over sharded weights takes the steps of ``torch.optim.Muon`` over whole matrices, to the bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbuffer import Flat, Partial, Replicate
from megatron_fsdp import Placements
from megatron_fsdp.optim import Muon, MuonOptions
from tests.functional.models import differing, make_mesh, whole_state
from tests.functional.muon_model import Whole, make_matrices, param_groups, shard_matrices, train_sharded
from tests.harness import run_ranks

NUM_STEPS = 20
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
_REPLICATED, _SUMS, _CUT = (Replicate(), Replicate()), (Partial(), Partial()), (Flat(), Flat())
ZERO = {name: getattr(Placements, name)(0) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")}
TWO_AXES = {
    "hsdp": Placements.hsdp(0, 1),
    "hfsdp": Placements.hfsdp(0, 1),
    "no_shard on two axes": Placements((0, 1), _REPLICATED, _SUMS, _REPLICATED),
    "optim_grads_params on two axes": Placements((0, 1), _CUT, _CUT, _CUT),
}


def train_with_each(mesh_shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Train with every strategy of a mesh, in small buckets so that several are in flight."""
    mesh = make_mesh(mesh_shape)
    found = {}
    for name, placements in (ZERO if len(mesh_shape) == 1 else TWO_AXES).items():
        model = shard_matrices(make_matrices(), mesh, placements)
        optimizer = Muon(param_groups(model), options=MuonOptions(bucket_bytes=300), **options)
        train_sharded(model, optimizer, range(NUM_STEPS), dist.get_rank())
        found[name] = whole_state(model)
    return found


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_weights_equal_those_of_whole_matrices_to_the_bit_on_every_strategy(mesh_shape: tuple[int, ...]) -> None:
    num_ranks = torch.Size(mesh_shape).numel()
    whole = Whole(OPTIONS)
    whole.train(range(NUM_STEPS), range(num_ranks))
    wanted = whole.weights()
    for found in run_ranks(num_ranks, train_with_each, mesh_shape, OPTIONS):
        assert {name: differing(weights, wanted) for name, weights in found.items()} == {name: [] for name in found}
