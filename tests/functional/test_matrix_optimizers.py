"""Optimizers of torch.optim, some of which look at whole matrices: sharded runs equal whole ones."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from megatron_fsdp import fully_shard_optimizer
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, make_model
from tests.harness.oracle import differing, shard_model, train, whole_state

NUM_STEPS = 3
LAYOUTS = {"three ranks": ("optim_grads_params", (3,)), "hybrid": ("hfsdp", (2, 2))}
Optimizers = dict[str, tuple[str, Mapping[str, Any]]]

MATRIX: Optimizers = {
    "Adafactor": ("Adafactor", {"lr": 0.01}),
    "Adafactor one by one": ("Adafactor", {"lr": 0.01, "foreach": False}),
    "Adafactor foreach": ("Adafactor", {"lr": 0.01, "foreach": True, "weight_decay": 0.1}),
}
ELEMENT_WISE: Optimizers = {
    f"{name}, foreach={foreach}": (name, {**options, "foreach": foreach})
    for name, options in {
        "AdamW": {"lr": 0.01},
        "Adagrad": {"lr": 0.05, "lr_decay": 0.1},
        "Adadelta": {"lr": 1.0},
        "Adamax": {"lr": 0.01},
        "NAdam": {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
        "RAdam": {"lr": 0.01},
        "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
        "Rprop": {"lr": 0.01},
        "ASGD": {"lr": 0.05},
        "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    }.items()
    for foreach in (True, False)
}
FUSED: Optimizers = {
    "Adagrad, fused": ("Adagrad", {"lr": 0.05, "fused": True}),
    "SGD, fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "AdamW, fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "Adam, fused, amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "fused": True}),
}
MUON: Optimizers = {
    "Muon": ("Muon", {"lr": 0.02}),
    "Muon, RMS of AdamW": ("Muon", {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
}
ALL = {**MATRIX, **ELEMENT_WISE, **FUSED}
# Every other one of the element-wise optimizers over lists of tensors, the others one tensor at a time.
QUICK = (*MATRIX, *list(ELEMENT_WISE)[::4], *list(ELEMENT_WISE)[3::4], *FUSED)


def make_optimizer(name: str, model: Model) -> torch.optim.Optimizer:
    kind, options = {**ALL, **MUON}[name]
    is_for_matrices = name in MATRIX or name in MUON
    parameters = [p for p in model.parameters() if p.requires_grad and (not is_for_matrices or p.ndim == 2)]
    return getattr(torch.optim, kind)(parameters, **options)


def run(name: str, model: Model, ranks: list[int]) -> dict[str, torch.Tensor]:
    train(model, make_optimizer(name, model), range(NUM_STEPS), ranks)
    return whole_state(model)


def train_sharded_with_each(
    names: list[str], strategy: str, mesh_shape: tuple[int, ...]
) -> dict[str, dict[str, torch.Tensor]]:
    mesh = make_mesh(mesh_shape)
    return {name: run(name, shard_model(make_model(), mesh, strategy), [dist.get_rank()]) for name in names}


@functools.cache
def trained(layout: str, is_quick: bool) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return the weights that every rank has after training with each optimizer that is quick or not."""
    strategy, mesh_shape = LAYOUTS[layout]
    names = [name for name in ALL if (name in QUICK) is is_quick]
    return run_ranks(torch.Size(mesh_shape).numel(), train_sharded_with_each, names, strategy, mesh_shape)


@pytest.mark.parametrize(
    ("layout", "name"), nightly_but([("three ranks", name) for name in QUICK], itertools.product(LAYOUTS, ALL))
)
def test_weights_equal_the_whole_models_with(layout: str, name: str) -> None:
    ranks = trained(layout, name in QUICK)
    wanted = run(name, make_model(), list(range(len(ranks))))
    for weights in ranks:
        assert differing(weights[name], wanted, 1e-5) == []


def step_on_given_gradients(name: str, model: Model) -> dict[str, torch.Tensor]:
    """Step on gradients drawn from a seed: those of a backward may differ in the last bit and round to another bf16."""
    optimizer = make_optimizer(name, model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        for parameter in optimizer.param_groups[0]["params"]:
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                gradient = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim)
            parameter.grad = torch.zeros_like(parameter).copy_(gradient)
        optimizer.step()
    return whole_state(model)


@pytest.mark.parametrize("name", MUON)
@pytest.mark.parametrize("layout", nightly_but(["hybrid"], LAYOUTS))
@on_ranks(lambda layout: torch.Size(LAYOUTS[layout][1]).numel())
def test_orthogonal_updates_equal_the_whole_models_with(layout: str, name: str) -> None:
    strategy, mesh_shape = LAYOUTS[layout]
    wanted = step_on_given_gradients(name, make_model())
    weights = step_on_given_gradients(name, shard_model(make_model(), make_mesh(mesh_shape), strategy))
    assert differing(weights, wanted, 1e-5) == []


def search(model: Model, ranks: list[int]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for rank in ranks:
            tokens = draw_tokens(rank)
            loss = loss_of(model(tokens), tokens) / len(ranks)
            loss.backward()
            losses.append(loss.detach())
        total = torch.stack(losses).sum()
        if len(ranks) == 1 and dist.is_initialized():
            dist.all_reduce(total, dist.ReduceOp.AVG)
        return total

    for _ in range(2):
        optimizer.step(closure)
    return whole_state(model)


@on_ranks(3)
def test_a_line_search_over_all_parameters_as_one_vector_equals_the_whole_models() -> None:
    wanted = search(make_model(), [0, 1, 2])
    weights = search(shard_model(make_model(), make_mesh((3,))), [dist.get_rank()])
    assert differing(weights, wanted, 1e-4) == []


@pytest.mark.parametrize("name", ["Muon", "SGD, foreach=False", "RMSprop, foreach=True", "Adadelta, foreach=False"])
@on_ranks(3)
def test_state_has_the_rows_of_its_parameters_with(name: str) -> None:
    model = shard_model(make_model(), make_mesh((3,)))
    optimizer = fully_shard_optimizer(make_optimizer(name, model))
    train(model, optimizer, range(2), [dist.get_rank()])
    assert (
        [
            f"{key} of {tuple(parameter.shape)}"
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
            if value.shape == parameter.shape and not (isinstance(value, DTensor) and value._spec is parameter._spec)
        ]
    ) == []
