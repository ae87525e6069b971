"""PyTorch's own tools work on sharded models as they are: gathering, clipping, optimizers, state dicts, loading."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from megatron_fsdp import MixedPrecisionPolicy
from tests.functional.models import (
    Model,
    draw_tokens,
    loss_of,
    make_mesh,
    make_model,
    shard_model,
    train,
    whole_state,
    world_mesh,
)
from tests.functional.training import History, Recipe, disagreements, train_replicated, train_sharded
from tests.harness import run_ranks

State = dict[str, torch.Tensor]
FULL = StateDictOptions(full_state_dict=True)
FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
NUM_RANKS = 3


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float = 0.0) -> list[str]:
    """Return the names that only one side has, and those whose values are further apart than ``tolerance``."""
    names = list(found.keys() ^ wanted.keys())
    return names + [
        name
        for name in found.keys() & wanted.keys()
        if found[name].shape != wanted[name].shape or not (found[name] - wanted[name]).abs().max() <= tolerance
    ]


# ---------------------------------------------------------------------- full_tensor


def gather_parameters_and_gradients(strategy: str, mesh_shape: tuple[int, ...]) -> tuple[State, State]:
    model = shard_model(make_model(), make_mesh(mesh_shape), strategy)
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    tokens = draw_tokens(dist.get_rank())
    loss_of(model(tokens), tokens).backward()
    model.reshard()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value.detach() for name, value in before.items()}, gradients


def whole_gradients(num_ranks: int) -> State:
    model = make_model()
    for rank in range(num_ranks):
        tokens = draw_tokens(rank)
        (loss_of(model(tokens), tokens) / num_ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("strategy", "mesh_shape"),
    [
        ("no_shard", (3,)),
        ("optim", (3,)),
        ("optim_grads", (3,)),
        ("optim_grads_params", (1,)),
        ("optim_grads_params", (3,)),
        ("optim_grads_params", (4,)),
        ("hsdp", (2, 2)),
        ("hfsdp", (2, 2)),
        ("hfsdp", (1, 3)),
    ],
    ids=str,
)
def test_full_tensor_gives_every_rank_the_whole_parameters_and_gradients(
    strategy: str, mesh_shape: tuple[int, ...]
) -> None:
    num_ranks = torch.Size(mesh_shape).numel()
    wanted = dict(make_model().named_parameters())
    for parameters, gradients in run_ranks(num_ranks, gather_parameters_and_gradients, strategy, mesh_shape):
        assert differing(parameters, wanted) == []
        assert differing(gradients, whole_gradients(num_ranks), 1e-6) == []


# ---------------------------------------------------------------------- clip_grad_norm_

NORMS = [(2.0, True), (2.0, False), (1.0, None)]
MAX_NORM = 0.125


def clip_with_torch(norm_type: float, foreach: bool | None) -> tuple[float, State]:
    model = shard_model(make_model(), world_mesh())
    tokens = draw_tokens(dist.get_rank())
    loss_of(model(tokens), tokens).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type, foreach=foreach)
    assert isinstance(norm, DTensor)
    return norm.full_tensor().item(), {
        name: parameter.grad.full_tensor() for name, parameter in model.named_parameters() if parameter.requires_grad
    }


@pytest.mark.parametrize(("norm_type", "foreach"), NORMS)
def test_torch_finds_the_norm_of_the_whole_gradient_and_scales_it(norm_type: float, foreach: bool | None) -> None:
    wanted = whole_gradients(NUM_RANKS)
    wanted_norm = nn.utils.get_total_norm(wanted.values(), norm_type)
    scaled = {name: value * (MAX_NORM / wanted_norm) for name, value in wanted.items()}
    for norm, gradients in run_ranks(NUM_RANKS, clip_with_torch, norm_type, foreach):
        assert norm == pytest.approx(wanted_norm.item(), rel=1e-6)
        assert differing(gradients, scaled, 1e-6) == []


# ---------------------------------------------------------------------- optimizers

OPTIMIZERS = {
    "AdamW foreach": ("AdamW", {"lr": 0.01, "foreach": True}),
    "AdamW one by one": ("AdamW", {"lr": 0.01, "foreach": False}),
    "AdamW fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "Adam amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "SGD momentum foreach": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD momentum one by one": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": False}),
    "SGD momentum fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


def recipes_for(name: str) -> tuple[Recipe, Recipe]:
    """Return the same run without and with ``fully_shard_optimizer``."""
    optimizer, options = OPTIMIZERS[name]
    recipe = Recipe(mesh_shape=(NUM_RANKS,), num_steps=3, optimizer=optimizer, options=options, is_adapted=False)
    return recipe, replace(recipe, is_adapted=True)


def train_with_each_optimizer() -> dict[str, tuple[History, History]]:
    return {name: tuple(train_sharded(recipe) for recipe in recipes_for(name)) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def trained_with() -> list[dict[str, tuple[History, History]]]:
    return run_ranks(NUM_RANKS, train_with_each_optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_equal_the_replicated_run_with(
    name: str, trained_with: list[dict[str, tuple[History, History]]]
) -> None:
    oracle = train_replicated(recipes_for(name)[0])
    plain, adapted = zip(*(histories[name] for histories in trained_with), strict=True)
    assert disagreements(plain, oracle) == []
    assert disagreements(adapted, oracle) == []


# ---------------------------------------------------------------------- model state dicts


def full_state_dicts() -> tuple[State, State]:
    model = shard_model(make_model(), world_mesh())
    everywhere = get_model_state_dict(model, options=FULL)
    return dict(everywhere), dict(get_model_state_dict(model, options=FULL_ON_RANK_0))


def test_a_full_state_dict_has_the_names_and_tensors_of_the_whole_model() -> None:
    wanted = make_model().state_dict()
    for rank, (everywhere, on_rank_0) in enumerate(run_ranks(NUM_RANKS, full_state_dicts)):
        assert differing(everywhere, wanted) == []
        assert list(everywhere) == list(wanted)
        assert not any(isinstance(value, DTensor) for value in everywhere.values())
        assert differing(on_rank_0, wanted if rank == 0 else {}) == []


def from_every_rank(model: Model, wanted: State) -> None:
    set_model_state_dict(model, wanted, options=FULL)


def from_rank_0(model: Model, wanted: State) -> None:
    set_model_state_dict(model, wanted if dist.get_rank() == 0 else {}, options=FROM_RANK_0)


def from_shards(model: Model, wanted: State) -> None:
    other = make_model(seed=1)
    set_model_state_dict(model, get_model_state_dict(shard_model(other, world_mesh())))


def assigned_canonical(model: Model, wanted: State) -> None:
    model.load_state_dict(_distributed(model, wanted, lambda _: [Shard(0)]), assign=True)


def assigned_like_the_parameters(model: Model, wanted: State) -> None:
    model.load_state_dict(_distributed(model, wanted, lambda parameter: parameter.placements), assign=True)


def _distributed(
    model: Model, wanted: State, placements_of: Callable[[DTensor], Sequence[Placement]]
) -> dict[str, torch.Tensor]:
    """Return ``wanted`` with what is a DTensor in the model as torch's ``distribute_tensor`` cuts it."""
    return {
        name: distribute_tensor(wanted[name], mine.device_mesh, placements_of(mine))
        if isinstance(mine, DTensor)
        else wanted[name]
        for name, mine in model.state_dict().items()
    }


def assigned_plain(model: Model, wanted: State) -> None:
    model.load_state_dict(wanted, assign=True)


def copied_from_shards(model: Model, wanted: State) -> None:
    model.load_state_dict(shard_model(make_model(seed=1), world_mesh()).state_dict())


LOADERS: dict[str, Callable[[Model, State], None]] = {
    "set_model_state_dict, full on every rank": from_every_rank,
    "set_model_state_dict, full on rank 0": from_rank_0,
    "set_model_state_dict, sharded": from_shards,
    "load_state_dict of DTensors cut as torch cuts them, assigned": assigned_canonical,
    "load_state_dict of DTensors distributed by torch, assigned": assigned_like_the_parameters,
    "load_state_dict of whole tensors, assigned": assigned_plain,
    "load_state_dict of another sharded model's, copied": copied_from_shards,
}
