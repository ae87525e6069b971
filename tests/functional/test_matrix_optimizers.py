"""Optimizers of torch.optim, some of which look at whole matrices: sharded runs equal whole ones."""

import functools
import itertools
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
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, make_model, world_mesh
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


State = dict[str, torch.Tensor]
Kind = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Shampoo(torch.optim.Optimizer):
    """Preconditions each dimension; its matrices begin as multiples of the identity.

    Attributes:
        is_plain: whether those matrices are plain tensors, rather than made by the gradient.
    """

    is_plain = False

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            sizes = gradient.shape
            if not state:
                for index, size in enumerate(sizes):
                    identity = torch.eye(size) if self.is_plain else torch.eye(size, out=gradient.new(size, size))
                    state[index] = 0.1 * identity
            for index, size in enumerate(sizes):
                gradient = gradient.transpose(0, index).contiguous()
                turned = gradient.size()
                gradient = gradient.view(size, -1)
                state[index].add_(gradient @ gradient.t())
                left, values, right = torch.svd(state[index])
                inverse = left @ values.pow(-1 / len(sizes)).diag() @ right.t()
                gradient = (inverse @ gradient).view(turned).transpose(0, index)
            parameter.add_(gradient, alpha=-0.05)


class PlainShampoo(Shampoo):
    is_plain = True


class Lamb(torch.optim.Optimizer):
    """Trust ratios between norms and a plain one, and a plain sum of squares that sharded sums are added to."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        one, total = torch.tensor(1.0), torch.zeros(1)
        for parameter in parameters:
            total.add_(parameter.grad.pow(2).sum())
        total = total.sqrt()
        clip = torch.where(total > 0.1, total / 0.1, one)
        for parameter in parameters:
            update = parameter.grad / clip + 0.01 * parameter
            weight_norm, update_norm = parameter.norm(2.0), update.norm(2.0)
            ratio = torch.where(weight_norm > 0, torch.where(update_norm > 0, weight_norm / update_norm, one), one)
            parameter.add_(update.mul_(torch.min(ratio, one)), alpha=-0.05)


class Adaptive(torch.optim.Optimizer):
    """Adaptive gradient clipping: norms of rows, clamped in place."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:

        def norm(x: torch.Tensor) -> torch.Tensor:
            return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)

        for parameter in self.param_groups[0]["params"]:
            largest = norm(parameter).clamp_(min=1e-3).mul_(0.01)
            found = norm(parameter.grad)
            clipped = parameter.grad * (largest / found.clamp(min=1e-6))
            parameter.add_(torch.where(found < largest, parameter.grad, clipped), alpha=-0.05)


class Masked(torch.optim.Optimizer):
    """State and a mask that are plain tensors of the parameter's shape."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros(parameter.shape))
            momentum.mul_(0.9).add_(parameter.grad)
            mask = torch.arange(parameter.numel()).view(parameter.shape) % 2
            parameter.add_(momentum * mask, alpha=-0.05)


KINDS: dict[str, Kind] = {
    "Shampoo": Shampoo, "Shampoo of plain matrices": PlainShampoo, "LAMB": Lamb, "adaptive clipping": Adaptive,
    "a plain mask": Masked,
}  # fmt: skip
# Those that hold plain tensors of several elements.
ASSUMING = ("Shampoo of plain matrices", "a plain mask")


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
    model = shard_model(make_model(), world_mesh())
    try:
        return train_mixed(model, name, [dist.get_rank()], is_implicit=is_implicit)
    except PlacementError as error:
        return str(error)


WAYS = list(product(KINDS, (False, True)))
QUICK_MIXED = [(name, is_implicit) for name, is_implicit in WAYS if name in ASSUMING or not is_implicit]


@pytest.mark.parametrize(("name", "is_implicit"), nightly_but(QUICK_MIXED, WAYS))
def test_weights_equal_the_whole_models_or_the_plain_tensor_is_refused(name: str, is_implicit: bool) -> None:
    wanted = train_mixed(make_model(), name, [0, 1, 2], is_implicit=False)
    for found in run_ranks(3, train_sharded, name, is_implicit):
        if name in ASSUMING and not is_implicit:
            assert isinstance(found, str)
            assert "found a plain tensor of shape" in found
            assert "implicit_replication()" in found
        else:
            assert not isinstance(found, str), found
            assert differing(found, wanted, 2e-5) == []
