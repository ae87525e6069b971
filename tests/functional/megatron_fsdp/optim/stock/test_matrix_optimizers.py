"""Sharded runs of torch.optim's optimizers, including those that need whole matrices, equal whole runs."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication

from dbuffer.errors import PlacementError
from megatron_fsdp import fully_shard_optimizer
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, make_model
from tests.harness.oracle import differing, sharded_model, train, whole_state

NUM_STEPS = 3
LAYOUTS = {"three ranks": ("optim_grads_params", (3,)), "hybrid": ("hfsdp", (2, 2))}

OPTIMIZERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Adafactor": ("Adafactor", {"lr": 0.01}),
    "Adafactor foreach": ("Adafactor", {"lr": 0.01, "foreach": True, "weight_decay": 0.1}),
    "AdamW": ("AdamW", {"lr": 0.01, "foreach": True}),
    "Adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "foreach": False}),
    "NAdam": ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": True}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "foreach": True}),
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": False}),
}
MUON = {"lr": 0.02}, {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}


def make_optimizer(name: str, model: Model) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    parameters = [p for p in model.parameters() if p.requires_grad and (kind != "Adafactor" or p.ndim == 2)]
    return getattr(torch.optim, kind)(parameters, **options)


def run(name: str, model: Model, ranks: list[int]) -> dict[str, torch.Tensor]:
    train(model, make_optimizer(name, model), range(NUM_STEPS), ranks)
    return whole_state(model)


def train_with_each(strategy: str, mesh_shape: tuple[int, ...]) -> dict[str, dict[str, torch.Tensor]]:
    mesh = make_mesh(mesh_shape)
    return {name: run(name, sharded_model(strategy, mesh=mesh), [dist.get_rank()]) for name in OPTIMIZERS}


@pytest.mark.parametrize("layout", nightly_but(["three ranks"], LAYOUTS))
def test_weights_equal_the_whole_models_with_each_optimizer(layout: str) -> None:
    strategy, mesh_shape = LAYOUTS[layout]
    num_ranks = torch.Size(mesh_shape).numel()
    wanted = {name: run(name, make_model(), list(range(num_ranks))) for name in OPTIMIZERS}
    for weights in run_ranks(num_ranks, train_with_each, strategy, mesh_shape):
        assert {name: found for name in wanted if (found := differing(weights[name], wanted[name], 1e-5))} == {}


def step_on_given_gradients(model: Model, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Step on gradients drawn from a seed: a backward's may differ in the last bit and round to another bf16."""
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.requires_grad and p.ndim == 2], **options)
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


@on_ranks(4)
def test_orthogonal_updates_equal_the_whole_models() -> None:
    for options in MUON:
        wanted = step_on_given_gradients(make_model(), options)
        weights = step_on_given_gradients(sharded_model("hfsdp", mesh=(2, 2)), options)
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
    weights = search(sharded_model(mesh=(3,)), [dist.get_rank()])
    assert differing(weights, wanted, 1e-4) == []


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
@on_ranks(3)
def test_state_has_the_rows_of_its_parameters_with(name: str) -> None:
    model = sharded_model(mesh=(3,))
    optimizer = fully_shard_optimizer(make_optimizer(name, model))
    train(model, optimizer, range(2), [dist.get_rank()])
    state: Any = optimizer.state
    assert [
        f"{key} of {tuple(parameter.shape)}"
        for parameter, values in state.items()
        for key, value in values.items()
        if value.shape == parameter.shape and not (isinstance(value, DTensor) and value._spec is parameter._spec)
    ] == []


State = dict[str, torch.Tensor]
Kind = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Shampoo(torch.optim.Optimizer):
    """Precondition each dimension; the matrices are made at the first gradient, as multiples of the identity."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            sizes = gradient.shape
            if not state:
                for index, size in enumerate(sizes):
                    state[index] = 0.1 * torch.eye(size, out=gradient.new(size, size))
            for index, size in enumerate(sizes):
                gradient = gradient.transpose(0, index).contiguous()
                turned = gradient.size()
                gradient = gradient.view(size, -1)
                state[index].add_(gradient @ gradient.t())
                left, values, right = torch.svd(state[index])
                inverse = left @ values.pow(-1 / len(sizes)).diag() @ right.t()
                gradient = (inverse @ gradient).view(turned).transpose(0, index)
            parameter.add_(gradient, alpha=-0.05)


class Masked(torch.optim.Optimizer):
    """An optimizer with state and a mask that are plain tensors of the parameter's shape."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros(parameter.shape))
            momentum.mul_(0.9).add_(parameter.grad)
            mask = torch.arange(parameter.numel()).view(parameter.shape) % 2
            parameter.add_(momentum * mask, alpha=-0.05)


KINDS: dict[str, Kind] = {"Shampoo": Shampoo, "a plain mask": Masked}


def train_mixed(model: nn.Module, name: str, ranks: list[int], *, is_implicit: bool) -> State:
    optimizer = KINDS[name]([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        for rank in ranks:
            tokens = draw_tokens(rank, step)
            (loss_of(model(tokens), tokens) / len(ranks)).backward()
        if is_implicit:
            with implicit_replication():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


def train_sharded(name: str, is_implicit: bool) -> State | str:
    model = sharded_model()
    try:
        return train_mixed(model, name, [dist.get_rank()], is_implicit=is_implicit)
    except PlacementError as error:
        return str(error)


WAYS = list(product(KINDS, (False, True)))
QUICK_MIXED = [(name, is_implicit) for name, is_implicit in WAYS if name == "a plain mask" or not is_implicit]


@pytest.mark.parametrize(("name", "is_implicit"), nightly_but(QUICK_MIXED, WAYS))
def test_weights_equal_the_whole_models_or_the_plain_tensor_is_refused(name: str, is_implicit: bool) -> None:
    wanted = train_mixed(make_model(), name, [0, 1, 2], is_implicit=False)
    for found in run_ranks(3, train_sharded, name, is_implicit):
        if name == "a plain mask" and not is_implicit:
            assert isinstance(found, str)
            assert "found a plain tensor of shape" in found
            assert "implicit_replication()" in found
        else:
            assert not isinstance(found, str), found
            assert differing(found, wanted, 2e-5) == []
