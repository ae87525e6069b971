"""Muon over sharded weights steps like ``torch.optim.Muon`` over whole matrices to the bit, with torch's state."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import CollectiveCall, Flat, Partial, Replicate, observe_collectives
from megatron_fsdp import (
    ConfigError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Muon,
    NonfiniteGradientError,
    Placements,
    explain,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp.muon import MatrixView, muon_param_groups
from megatron_fsdp.optim.muon import muon
from megatron_fsdp.optim.muon.newton_schulz import Iteration
from tests.functional.adamw_comparison import groups_of
from tests.functional.megatron_fsdp.optim.muon.muon_model import (
    Matrices,
    Whole,
    cuts_of,
    make_matrices,
    param_groups,
    shard_matrices,
    train_sharded,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import make_mesh, make_model, world_mesh
from tests.harness.oracle import differing, sharded_model, train, whole_state

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
_REPLICATED, _SUMS, _CUT = (Replicate(), Replicate()), (Partial(), Partial()), (Flat(), Flat())
ZERO = {name: getattr(Placements, name)(0) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")}
TWO_AXES = {
    "hsdp": Placements.hsdp(0, 1),
    "hfsdp": Placements.hfsdp(0, 1),
    "no_shard on two axes": Placements((0, 1), _REPLICATED, _SUMS, _REPLICATED),
    "optim_grads_params on two axes": Placements((0, 1), _CUT, _CUT, _CUT),
}
Weights = dict[str, torch.Tensor]


def train_with_each(mesh_shape: tuple[int, ...], num_steps: int) -> dict[str, Weights]:
    mesh = make_mesh(mesh_shape)
    found = {}
    for name, placements in (ZERO if len(mesh_shape) == 1 else TWO_AXES).items():
        model = shard_matrices(make_matrices(), mesh, placements)
        # Small buckets, so that several are in flight.
        with mock.patch.object(muon, "BUCKET_BYTES", 300):
            train_sharded(model, Muon(param_groups(model), **OPTIONS), range(num_steps), dist.get_rank())
        found[name] = whole_state(model)
    return found


def assert_equal_to_whole(mesh_shape: tuple[int, ...], num_steps: int) -> None:
    num_ranks = torch.Size(mesh_shape).numel()
    whole = Whole(OPTIONS)
    whole.train(range(num_steps), range(num_ranks))
    wanted = whole.weights()
    for found in run_ranks(num_ranks, train_with_each, mesh_shape, num_steps):
        assert {name: differing(weights, wanted) for name, weights in found.items()} == {name: [] for name in found}


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_weights_equal_those_of_whole_matrices_to_the_bit_on_every_strategy(mesh_shape: tuple[int, ...]) -> None:
    assert_equal_to_whole(mesh_shape, 4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1)], ids=str)
def test_twenty_steps_equal_those_of_whole_matrices_on_every_strategy(mesh_shape: tuple[int, ...]) -> None:
    assert_equal_to_whole(mesh_shape, 20)


OTHERS: dict[str, dict[str, Any]] = {
    "momentum alone": {"nesterov": False, "momentum": 0.9},
    "like AdamW": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    "offloaded": {},
    "Newton-Schulz in fp32": {"ns_dtype": torch.float32},
}


@pytest.mark.parametrize("way", OTHERS)
@on_ranks(4)
def test_options_of_torchs_muon_mean_the_same_to_the_bit(way: str) -> None:
    own = OTHERS[way]
    offload = CPUOffloadPolicy(pin_memory=False) if way == "offloaded" else None
    model = shard_matrices(make_matrices(), make_mesh((4,)), ZERO["optim_grads_params"], offload=offload)
    assert all(group.spec.is_offloaded is (offload is not None) for group in groups_of(model))
    train_sharded(model, Muon(param_groups(model), **OPTIONS, **own), range(3), dist.get_rank())
    whole = Whole({**OPTIONS, **{key: value for key, value in own.items() if key != "ns_dtype"}})
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
        model = shard_matrices(make_matrices(), make_mesh((4,)), ZERO["optim_grads_params"], policy)
        train_sharded(model, Muon(param_groups(model), **OPTIONS), range(3), dist.get_rank())
        joined.append(torch.cat([group.weights.values().local_buffer.clone() for group in groups_of(model)]))
    assert torch.equal(*joined)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Note the number of matrices in every call of Newton-Schulz, and whether gradients were accumulating."""
    calls: list[int] = []
    original = Iteration.__call__

    def counted(self: Iteration, matrices: torch.Tensor) -> torch.Tensor:
        calls.append(len(matrices))
        return original(self, matrices)

    with mock.patch.object(Iteration, "__call__", counted):
        yield calls


def count(num_steps: int, bucket_bytes: int) -> tuple[int, int]:
    """Return how many matrices this rank orthogonalized, and the number of messages."""
    model = shard_matrices(make_matrices(), make_mesh((4,)), ZERO["optim_grads_params"])
    optimizer = Muon(param_groups(model), **OPTIONS)
    messages: list[CollectiveCall] = []
    small = mock.patch.object(muon, "BUCKET_BYTES", bucket_bytes)
    with small, counting() as calls, observe_collectives(messages.append):
        train_sharded(model, optimizer, range(num_steps), dist.get_rank())
    return sum(calls), sum(call.kind == "all_to_all" for call in messages)


def test_each_matrix_is_one_ranks_work_once_a_step() -> None:
    num_steps = 2
    num_matrices = sum(1 for name, _ in make_matrices().named_parameters() for _ in cuts_of(name.rpartition(".")[2]))
    ranks = run_ranks(4, count, num_steps, muon.BUCKET_BYTES)
    assert sum(owned for owned, _ in ranks) == num_steps * num_matrices
    assert max(owned for owned, _ in ranks) <= num_steps * (num_matrices / 4 + 2)
    # One all-to-all to the owners and one back per step; none while gradients accumulate.
    assert {messages for _, messages in ranks} == {2 * num_steps}
    # Every matrix is larger than this bucket, so there are at most as many messages as the busiest rank has matrices to
    # move.
    for _, messages in run_ranks(4, count, 1, 1):
        assert 2 < messages <= 2 * (num_matrices / 4 + 2)


# ---------------------------------------------------------------------- state

# Checkpoints resume on other numbers of ranks. All of them train on the sum of the gradients for numbers 0 and 1.
NUM_SOURCES = 2


def train_on_two(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps on the sums of the gradients of two ranks' numbers, on any number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [source for source in range(NUM_SOURCES) if source % size == rank]
    for step in steps:
        for source in mine or [-1]:
            loss = model(10_000 * max(source, 0) + 100 * step) + model(10_000 * max(source, 0) + 100 * step + 50)
            (loss * float(source >= 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(mesh_shape: tuple[int, ...], placements: Placements) -> tuple[Matrices, Muon]:
    model = shard_matrices(make_matrices(), make_mesh(mesh_shape), placements)
    return model, Muon(param_groups(model), **OPTIONS)


def save_half_way(folder: str) -> list[str]:
    """Train and save; return the keys of state tensors whose layout differs from their parameter's."""
    model, optimizer = sharded((2,), Placements.optim_grads_params(0))
    train_on_two(model, optimizer, range(2))
    save_checkpoint(model, optimizer, folder)
    state: Any = optimizer.state
    return [
        key
        for parameter, values in state.items()
        for key, value in values.items()
        if value.ndim and not (isinstance(value, DTensor) and value._spec is parameter._spec)
    ]


def resume(folder: str, mesh_shape: tuple[int, ...], strategy: str) -> Weights:
    placements = getattr(Placements, strategy)(*range(len(mesh_shape)))
    model, optimizer = sharded(mesh_shape, placements)
    load_checkpoint(model, optimizer, folder)
    train_on_two(model, optimizer, range(2, 4))
    return whole_state(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Weights]:
    """Save a checkpoint after two steps; return it with the weights after four steps in one process."""
    folder = str(tmp_path_factory.mktemp("muon") / "checkpoint")
    assert run_ranks(2, save_half_way, folder) == [[], []]
    whole = Whole(OPTIONS)
    whole.train(range(4), range(NUM_SOURCES))
    return folder, whole.weights()


LAYOUTS = [((3,), "optim_grads_params"), ((1,), "no_shard"), ((2, 2), "hfsdp")]


@pytest.mark.parametrize(("mesh_shape", "strategy"), nightly_but(LAYOUTS[:2], LAYOUTS), ids=str)
def test_a_run_resumes_on_another_number_of_ranks_to_the_bit(
    saved: tuple[str, Weights], mesh_shape: tuple[int, ...], strategy: str
) -> None:
    folder, wanted = saved
    for found in run_ranks(torch.Size(mesh_shape).numel(), resume, folder, mesh_shape, strategy):
        assert differing(found, wanted) == []


def trained(num_steps: int = 0) -> tuple[Matrices, Muon]:
    model, optimizer = sharded((dist.get_world_size(),), Placements.optim_grads_params(0))
    train_sharded(model, optimizer, range(num_steps), dist.get_rank())
    return model, optimizer


@on_ranks(2)
def test_a_state_dict_has_torchs_keys_and_resumes_to_the_bit() -> None:
    model, optimizer = trained(2)
    document = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    train_sharded(model, optimizer, range(2, 4), dist.get_rank())
    other, fresh = trained()
    other.load_state_dict(weights)
    fresh.load_state_dict(document)
    train_sharded(other, fresh, range(2, 4), dist.get_rank())
    assert differing(whole_state(other), whole_state(model)) == []
    # A new optimizer, so that the loaded state is visible.
    model, new = trained()
    shown = fully_shard_optimizer(new).state_dict()["state"]
    for state in (document["state"], shown):
        assert {" ".join(sorted(values)) for values in state.values()} == {"exp_avg exp_avg_sq step", "momentum_buffer"}
    assert [group["use_muon"] for group in fresh.param_groups] == [True] * 7 + [False]
    for values, mine in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert all(value is not own for value, own in zip(values.values(), mine.values(), strict=True))


@on_ranks(2)
def test_a_nan_on_one_rank_stops_the_step_on_all_before_any_matrix() -> None:
    model, optimizer = trained(1)
    optimizer.nonfinite = "skip"
    weights, state = copy.deepcopy((whole_state(model), optimizer.state_dict()["state"]))
    model(1).backward()
    gradient = model.layers[0].tall.grad.to_local()
    if gradient.numel():
        gradient[-1, 0] = math.nan
    optimizer.step()
    assert differing(whole_state(model), weights) == []
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(_local(value), _local(state[index][key])), (index, key)
    assert optimizer.num_skipped == 1
    optimizer.nonfinite = "raise"
    with pytest.raises(NonfiniteGradientError, match="tall"):
        optimizer.step()


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@on_ranks(2)
def test_parameters_without_gradient_are_left_alone_and_an_empty_step_is_none() -> None:
    model, optimizer = trained()
    model(dist.get_rank()).backward()
    layer = model.layers[0]
    layer.experts.grad = layer.bias.grad = None
    before = whole_state(model)
    optimizer.step()
    optimizer.zero_grad()
    after = whole_state(model)
    assert set(before) - set(differing(before, after)) == {"layers.0.bias", "layers.0.experts"}
    assert layer.experts not in optimizer.state
    assert layer.bias not in optimizer.state
    optimizer.step()
    assert differing(whole_state(model), after) == []
    assert {float(values["step"]) for values in optimizer.state.values() if "step" in values} == {1.0}


@on_ranks(2)
def test_each_group_has_its_own_rate_that_schedules_change() -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = whole_state(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train_sharded(model, optimizer, range(1), dist.get_rank())
    scheduler.step()
    assert set(before) - set(differing(before, whole_state(model))) == {"layers.0.qkv", "layers.1.qkv"}
    assert [group["lr"] for group in optimizer.param_groups] == [0.0] + [0.01] * 6 + [0.005]


@on_ranks(2)
def test_the_report_counts_what_ranks_share_and_what_is_no_matrix_is_refused() -> None:
    model, optimizer = trained()
    (report,) = explain(optimizer)
    assert (report.num_ranks, report.num_matrices) == (2, 2 * 14)
    assert report.max_flops <= 1.05 * report.bound_flops
    assert "28 matrices" in str(report)
    with pytest.raises(ConfigError, match=r"bias.*use_muon=False"):
        Muon([{"params": [model.layers[0].bias]}])
    with pytest.raises(ConfigError, match=r"experts.*batch_dims"):
        Muon([model.layers[0].experts])
    with pytest.raises(ConfigError, match="SGD"):
        explain(torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
def test_groups_by_rule_train_the_model_that_one_process_trains() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return muon_param_groups(model, views={"*experts": MatrixView(batch_dims=1)}, adamw=("head.weight",))

    model = sharded_model()
    train(model, fully_shard_optimizer(Muon(groups(model), **OPTIONS)), range(3), [dist.get_rank()])
    whole = make_model()
    train(whole, Muon(groups(whole), **OPTIONS), range(3), range(2))
    # A single process rounds gradients differently, and bf16 products turn this into about 2**-9 of an update.
    assert differing(whole_state(model), whole_state(whole), 3e-3) == []


def test_plain_parameters_are_stepped_as_torch_steps_them() -> None:
    weights = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5, 3))]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in weights]
    mine, oracle = Muon(weights, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for _ in range(3):
        for one, other in zip(weights, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        mine.step()
        oracle.step()
    assert all(torch.equal(one, other) for one, other in zip(weights, theirs, strict=True))
    copied = Muon(weights, lr=0.5)
    copied.load_state_dict(oracle.state_dict())
    assert copied.param_groups[0]["lr"] == 0.02
    assert copied.param_groups[0]["use_muon"]
    assert torch.equal(copied.state[weights[0]]["momentum_buffer"], oracle.state[theirs[0]]["momentum_buffer"])


@on_ranks(1)
def test_records_that_were_exchanged_keep_their_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = Muon(muon_param_groups(fully_shard(model, world_mesh())), lr=0.02)
    model(torch.arange(12.0).view(3, 4)).square().mean().backward()
    optimizer.step()
    first, second = optimizer.param_groups[0]["params"]
    wanted = [optimizer.state[param]["momentum_buffer"].full_tensor().clone() for param in (second, first)]
    assert not torch.equal(*wanted)
    optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]
    # A momentum of one leaves the buffer unchanged.
    optimizer.param_groups[0]["momentum"] = 1.0
    optimizer.step()
    for param, value in zip((first, second), wanted, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"].full_tensor(), value)


@on_ranks(1)
def test_a_state_of_another_optimizer_is_refused_by_name() -> None:
    _, optimizer = trained(1)
    document = optimizer.state_dict()
    document["state"][0] = {"exp_avg": torch.zeros(2)}
    model, fresh = trained()
    with pytest.raises(ConfigError, match="momentum_buffer"):
        fresh.load_state_dict(document)
    del model


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": -1.0}, "momentum"),
        ({"ns_steps": 100}, "ns_steps=100"),
        ({"adjust_lr_fn": "rms"}, "rms"),
        ({"nonfinite": "stop"}, "stop"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Muon([nn.Parameter(torch.zeros(2, 3))], **options)


@on_ranks(1)
def test_an_unsharded_foreign_dtensor_is_refused() -> None:
    module = nn.Linear(3, 4)
    torch.distributed.fsdp.fully_shard(module)
    with pytest.raises(ConfigError, match="fully_shard did not make"):
        Muon([module.weight])
    fully_shard(nn.Linear(2, 2))
