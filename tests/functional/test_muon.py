"""Muon over sharded weights takes the steps of ``torch.optim.Muon`` over whole matrices, to the bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import CollectiveCall, Flat, Partial, Replicate, observe_collectives
from megatron_fsdp import (
    CPUOffloadPolicy,
    FsdpModule,
    MixedPrecisionPolicy,
    Muon,
    ParameterGroup,
    Placements,
    fully_shard_optimizer,
)
from megatron_fsdp.muon import MuonOptions
from megatron_fsdp.optim.newton_schulz import Iteration
from tests.functional.muon_model import (
    Matrices,
    Whole,
    cuts_of,
    make_matrices,
    param_groups,
    shard_matrices,
    train_sharded,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.models import make_mesh
from tests.harness.oracle import differing, whole_state

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
_REPLICATED, _SUMS, _CUT = (Replicate(), Replicate()), (Partial(), Partial()), (Flat(), Flat())
ZERO = {name: getattr(Placements, name)(0) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")}
TWO_AXES = {
    "hsdp": Placements.hsdp(0, 1),
    "hfsdp": Placements.hfsdp(0, 1),
    "no_shard on two axes": Placements((0, 1), _REPLICATED, _SUMS, _REPLICATED),
    "optim_grads_params on two axes": Placements((0, 1), _CUT, _CUT, _CUT),
}
# Small buckets, so that several are in flight.
SMALL_BUCKETS = MuonOptions(bucket_bytes=300)
Weights = dict[str, torch.Tensor]


def train_with_each(mesh_shape: tuple[int, ...], num_steps: int) -> dict[str, Weights]:
    mesh = make_mesh(mesh_shape)
    found = {}
    for name, placements in (ZERO if len(mesh_shape) == 1 else TWO_AXES).items():
        model = shard_matrices(make_matrices(), mesh, placements)
        optimizer = Muon(param_groups(model), options=SMALL_BUCKETS, **OPTIONS)
        train_sharded(model, optimizer, range(num_steps), dist.get_rank())
        found[name] = whole_state(model)
    if len(mesh_shape) == 2:
        model = shard_matrices(make_matrices(), mesh, TWO_AXES["hsdp"])
        apart = MuonOptions(share_replicas=False)
        train_sharded(model, Muon(param_groups(model), options=apart, **OPTIONS), range(num_steps), dist.get_rank())
        found["hsdp, each replica does all"] = whole_state(model)
    return found


def compare_with_whole(mesh_shape: tuple[int, ...], num_steps: int) -> None:
    num_ranks = torch.Size(mesh_shape).numel()
    whole = Whole(OPTIONS)
    whole.train(range(num_steps), range(num_ranks))
    wanted = whole.weights()
    for found in run_ranks(num_ranks, train_with_each, mesh_shape, num_steps):
        assert {name: differing(weights, wanted) for name, weights in found.items()} == {name: [] for name in found}


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_weights_equal_those_of_whole_matrices_to_the_bit_on_every_strategy(mesh_shape: tuple[int, ...]) -> None:
    compare_with_whole(mesh_shape, 4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1)], ids=str)
def test_twenty_steps_equal_those_of_whole_matrices_on_every_strategy(mesh_shape: tuple[int, ...]) -> None:
    compare_with_whole(mesh_shape, 20)


def sharded(
    policy: MixedPrecisionPolicy | None = None, placements: Placements = ZERO["optim_grads_params"]
) -> Matrices:
    return shard_matrices(make_matrices(), make_mesh((dist.get_world_size(),)), placements, policy)


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    return [group for unit in model.modules() if isinstance(unit, FsdpModule) for group in unit.parameter_groups]


OTHERS: dict[str, tuple[dict[str, Any], MuonOptions]] = {
    "momentum alone": ({"nesterov": False, "momentum": 0.9}, MuonOptions()),
    "like AdamW": ({"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}, MuonOptions()),
    "fp32 on the wire": ({}, MuonOptions(comm_dtype=torch.float32)),
    "offloaded": ({}, MuonOptions()),
    "Newton-Schulz in fp32": ({}, MuonOptions(ns_dtype=torch.float32)),
}


@pytest.mark.parametrize("way", OTHERS)
@on_ranks(4)
def test_options_of_torchs_muon_mean_the_same_to_the_bit(way: str) -> None:
    own, options = OTHERS[way]
    offload = CPUOffloadPolicy(pin_memory=False) if way == "offloaded" else None
    model = shard_matrices(make_matrices(), make_mesh((4,)), ZERO["optim_grads_params"], offload=offload)
    assert all(group.spec.is_offloaded is (offload is not None) for group in groups_of(model))
    train_sharded(model, Muon(param_groups(model), options=options, **OPTIONS, **own), range(3), dist.get_rank())
    whole = Whole({**OPTIONS, **own})
    iterate = in_fp32 if "Newton" in way else torch.optim._muon._zeropower_via_newtonschulz
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", iterate):
        whole.train(range(3), range(4))
    assert differing(whole_state(model), whole.weights()) == []


def in_fp32(matrix: torch.Tensor, coefficients: Any, num_steps: int, eps: float) -> torch.Tensor:
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        factor = torch.addmm(gram, gram, gram, beta=coefficients[1], alpha=coefficients[2])
        x = torch.addmm(x, factor, x, beta=coefficients[0])
    return x.T if matrix.size(0) > matrix.size(1) else x


@on_ranks(4)
def test_split_main_weights_take_the_steps_of_fp32_ones() -> None:
    bf16, fp32, joined = torch.bfloat16, torch.float32, []
    for policy in (
        MixedPrecisionPolicy(bf16, fp32),
        MixedPrecisionPolicy(bf16, fp32, split_main_params=True, main_grads_dtype=fp32),
    ):
        model = sharded(policy)
        train_sharded(model, Muon(param_groups(model), **OPTIONS), range(3), dist.get_rank())
        joined.append(torch.cat([group.weights.values().local_buffer.clone() for group in groups_of(model)]))
    assert torch.equal(*joined)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Note the number of matrices in every call of Newton-Schulz, and whether gradients were accumulating."""
    calls: list[int] = []
    original = Iteration.__call__

    def counted(self: Iteration, matrices: torch.Tensor, works: Sequence[object] = ()) -> torch.Tensor:
        calls.append(len(matrices))
        return original(self, matrices, works)

    with mock.patch.object(Iteration, "__call__", counted):
        yield calls


def count(num_steps: int, options: MuonOptions) -> tuple[int, int, int]:
    """Return how many matrices this rank made orthogonal, what the optimizer counted, and the messages."""
    model = sharded()
    optimizer = Muon(param_groups(model), options=options, **OPTIONS)
    messages: list[CollectiveCall] = []
    with counting() as calls, observe_collectives(messages.append):
        train_sharded(model, optimizer, range(num_steps), dist.get_rank())
    return sum(calls), optimizer.num_orthogonalized, sum(call.kind == "all_to_all" for call in messages)


def test_each_matrix_is_one_ranks_work_once_a_step() -> None:
    num_steps = 2
    num_matrices = sum(1 for name, _ in make_matrices().named_parameters() for _ in cuts_of(name.rpartition(".")[2]))
    ranks = run_ranks(4, count, num_steps, MuonOptions())
    assert all(owned == counted for owned, counted, _ in ranks)
    assert sum(owned for owned, *_ in ranks) == num_steps * num_matrices
    assert max(owned for owned, *_ in ranks) <= num_steps * (num_matrices / 4 + 2)
    # There and back once a step: none while gradients accumulate.
    assert {messages for *_, messages in ranks} == {2 * num_steps}
    # Every matrix is larger than such a bucket: at most as many as the busiest rank has matrices that travel.
    for *_, messages in run_ranks(4, count, 1, MuonOptions(bucket_bytes=1)):
        assert 2 < messages <= 2 * (num_matrices / 4 + 2)


@on_ranks(2)
def test_the_state_dict_of_a_new_optimizer_shows_where_a_checkpoint_is_read_into() -> None:
    model = sharded()
    fresh = fully_shard_optimizer(Muon(param_groups(model), **OPTIONS)).state_dict()["state"]
    assert {" ".join(sorted(values)) for values in fresh.values()} == {"exp_avg exp_avg_sq step", "momentum_buffer"}
