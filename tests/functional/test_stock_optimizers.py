"""PyTorch's optimizers over sharded parameters: any strategy and dtype, state of one in another, and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from megatron_fsdp import CheckpointError, MixedPrecisionPolicy, fully_shard_optimizer, load_checkpoint, save_checkpoint
from tests.functional.adamw_comparison import differing_state, two_groups
from tests.functional.checkpoint_cases import message_of
from tests.functional.test_adamw import POLICIES
from tests.functional.test_flat_step import not_flat
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, make_mesh, make_model
from tests.harness.oracle import differing, shard_model, train, whole_state


def stock(kind: type[Optimizer], model: Model) -> Optimizer:
    options: dict[str, Any] = {"momentum": 0.9} if issubclass(kind, torch.optim.SGD) else {}
    groups = [{key: value for key, value in group.items() if key != "betas"} for group in two_groups(model)]
    return fully_shard_optimizer(kind(groups, lr=0.01, foreach=None, **options))


def trained(
    kind: type[Optimizer], strategy: str, mesh: tuple[int, ...], policy: MixedPrecisionPolicy | None
) -> tuple[Model, Optimizer]:
    model = shard_model(make_model(), make_mesh(mesh), strategy, policy)
    optimizer = stock(kind, model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(3):
        train(model, optimizer, range(step, step + 1), [dist.get_rank()])
        schedule.step()
    return model, optimizer


def compare(strategy: str, mesh: tuple[int, ...], policy: MixedPrecisionPolicy | None = None) -> list[str]:
    """Train on flat memory and parameter by parameter; then let each go on with the other's state."""
    kinds = torch.optim.SGD, not_flat(torch.optim.SGD)
    (mine, optimizer), (theirs, oracle) = (trained(kind, strategy, mesh, policy) for kind in kinds)
    wrong = differing(whole_state(mine), whole_state(theirs)) + differing_state(optimizer, oracle)
    states = optimizer.state_dict(), oracle.state_dict()
    again = [stock(kind, model) for kind, model in zip(kinds, (mine, theirs), strict=True)]
    for model, other, state in zip((mine, theirs), again, reversed(states), strict=True):
        other.load_state_dict(state)
        train(model, other, range(3, 5), [dist.get_rank()])
    return wrong + differing(whole_state(mine), whole_state(theirs)) + differing_state(*again)


LAYOUTS = [("optim_grads", (2,)), ("optim", (3,)), ("no_shard", (2,)), ("hsdp", (2, 2)), ("hfsdp", (2, 2))]


@pytest.mark.parametrize(("strategy", "mesh"), nightly_but([("optim", (3,)), ("hsdp", (2, 2))], LAYOUTS))
def test_every_strategy_takes_the_steps_that_go_parameter_by_parameter(strategy: str, mesh: tuple[int, ...]) -> None:
    num_ranks = torch.Size(mesh).numel()
    assert run_ranks(num_ranks, compare, strategy, mesh) == [[]] * num_ranks


def test_gradients_of_another_dtype_are_cast_for_a_step() -> None:
    assert run_ranks(2, compare, "optim_grads_params", (2,), POLICIES["bf16 gradients"]) == [[]] * 2


def momenta(model: Model, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: values["momentum_buffer"].full_tensor() for p, values in optimizer.state.items()}


def save(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = trained(torch.optim.SGD, "optim_grads_params", (3,), None)
    save_checkpoint(model, optimizer, path)
    return whole_state(model), momenta(model, optimizer)


def load(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    model = shard_model(make_model(1), make_mesh((2,)))
    message = message_of(CheckpointError, lambda: load_checkpoint(model, stock(torch.optim.Adagrad, model), path))
    optimizer = stock(torch.optim.SGD, model)
    load_checkpoint(model, optimizer, path)
    return whole_state(model), momenta(model, optimizer), message


def test_a_checkpoint_loads_on_another_number_of_ranks_but_not_into_another_kind(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    weights, buffers = run_ranks(3, save, path)[0]
    for found, found_buffers, message in run_ranks(2, load, path):
        assert differing(found, weights) == []
        assert differing(found_buffers, buffers) == []
        assert "of SGD, which Adagrad has not" in message
