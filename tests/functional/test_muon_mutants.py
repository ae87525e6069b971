"""Faults that were published about sharded Muon, put back in: the comparison with whole matrices finds each."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import Muon, Placements
from megatron_fsdp.optim import muon
from megatron_fsdp.optim.exchange import Exchange
from megatron_fsdp.optim.matrix_group import MatrixGroup
from megatron_fsdp.optim.newton_schulz import Iteration, scale_factor
from tests.functional.muon_model import (
    NUM_MICROBATCHES,
    Matrices,
    Whole,
    make_matrices,
    param_groups,
    seed_of,
    shard_matrices,
    train_sharded,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.models import make_mesh
from tests.harness.oracle import differing, whole_state

# They try the tests, not the library.
pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
NUM_STEPS = 2


def sgd_instead() -> AbstractContextManager[Any]:
    return mock.patch.object(Iteration, "__call__", lambda self, matrices, works=(): matrices)


def scale_by_local_shape() -> AbstractContextManager[Any]:

    def local(rows: int, columns: int, mode: str | None) -> float:
        return scale_factor(-(-rows // dist.get_world_size()), columns, mode)

    return mock.patch.object(muon, "scale_factor", local)


@contextmanager
def twice_on_replicas() -> Iterator[None]:
    original = MatrixGroup.apply

    def apply(self: MatrixGroup, *arguments: Any) -> None:
        for _ in range(1 + (dist.get_rank() >= 2)):
            original(self, *arguments)

    with mock.patch.object(MatrixGroup, "apply", apply):
        yield


def replicas_left_out() -> AbstractContextManager[Any]:
    return mock.patch.object(Exchange, "_share_with_replicas", return_value=None)


def pieces_left_out() -> AbstractContextManager[Any]:
    return mock.patch.object(Exchange, "_take_back", return_value=None)


def decay_forgotten() -> AbstractContextManager[Any]:
    original = muon.StepRows

    def rows(groups: Any, factors: Any) -> Any:
        return original([{**group, "weight_decay": 0.0} for group in groups], factors)

    return mock.patch.object(muon, "StepRows", rows)


FAULTS: dict[str, tuple[tuple[int, ...], str, Callable[[], AbstractContextManager[Any]]]] = {
    "none": ((2,), "optim_grads_params", nullcontext),
    "sgd": ((2,), "optim_grads_params", sgd_instead),
    "local shape": ((2,), "optim_grads_params", scale_by_local_shape),
    "pieces": ((2,), "optim_grads_params", pieces_left_out),
    "no decay": ((2,), "optim_grads_params", decay_forgotten),
    "none on replicas": ((2, 2), "hsdp", nullcontext),
    "twice": ((2, 2), "hsdp", twice_on_replicas),
    "replicas": ((2, 2), "hsdp", replicas_left_out),
}


def train_with_faults(mesh_shape: tuple[int, ...]) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    mesh = make_mesh(mesh_shape)
    for name, (shape, strategy, fault) in FAULTS.items():
        if shape == mesh_shape:
            placements = getattr(Placements, strategy)(*range(len(shape)))
            with fault():
                model = shard_matrices(make_matrices(), mesh, placements)
                train_sharded(model, Muon(param_groups(model), **OPTIONS), range(NUM_STEPS), dist.get_rank())
            found[name] = whole_state(model)
    if len(mesh_shape) == 1:
        found["each microbatch"] = step_each_microbatch(mesh_shape)
    return found


def step_each_microbatch(mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Make every microbatch's gradient semi-orthogonal, at half the rate, as an optimizer inside backward does."""
    model = shard_matrices(make_matrices(), make_mesh(mesh_shape), Placements.optim_grads_params(0))
    optimizer = Muon(param_groups(model), **{**OPTIONS, "lr": OPTIONS["lr"] / NUM_MICROBATCHES})
    for step in range(NUM_STEPS):
        for index in range(NUM_MICROBATCHES):
            model(seed_of(dist.get_rank(), step, index)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return whole_state(model)


@pytest.fixture(scope="module", params=[(2,), (2, 2)], ids=str)
def compared(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    num_ranks = torch.Size(request.param).numel()
    whole = Whole(OPTIONS)
    whole.train(range(NUM_STEPS), range(num_ranks))
    ranks = run_ranks(num_ranks, train_with_faults, request.param)
    return {
        name: sorted({entry for rank in ranks for entry in differing(rank[name], whole.weights())}) for name in ranks[0]
    }


def test_every_fault_and_nothing_else_is_found(compared: dict[str, list[str]]) -> None:
    assert {name for name, wrong in compared.items() if not wrong} == {
        name for name in compared if name.startswith("none")
    }
    assert len(compared) >= 3


@on_ranks(1)
def test_a_step_without_gradients_counts_nowhere() -> None:

    def counted(self: Muon) -> Any:
        binding = original(self)
        for group in binding.states:
            group.steps += 1
        return binding

    original = Muon._bound
    counts = []
    for fault in (nullcontext(), mock.patch.object(Muon, "_bound", counted)):
        model: Matrices = shard_matrices(make_matrices(), make_mesh((1,)), Placements.optim_grads_params(0))
        optimizer = Muon(param_groups(model), **OPTIONS)
        train_sharded(model, optimizer, range(1), 0)
        with fault:
            optimizer.step()
        counts.append(max(float(values["step"]) for values in optimizer.state.values() if "step" in values))
    assert counts == [1.0, 2.0]
