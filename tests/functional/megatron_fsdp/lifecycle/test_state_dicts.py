"""PyTorch's own ways to save and load work on sharded models: state dicts, full and sharded, and their checkpoints."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_fsdp import AdamW, StateError, fully_shard_optimizer, load_checkpoint, save_checkpoint
from megatron_fsdp.lifecycle.module import unit_of
from tests.functional.checkpoint_cases import full_optimizer_state
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, make_model
from tests.harness.oracle import differing, sharded, sharded_model, token_loss, train, whole_state

# torch's own types for a state dict are too wide to be of use here.
State = dict[str, Any]
FULL = StateDictOptions(full_state_dict=True)
FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
NUM_RANKS = 3


@on_ranks(NUM_RANKS)
def test_a_full_state_dict_has_the_names_and_tensors_of_the_whole_model() -> None:
    wanted = make_model().state_dict()
    model = sharded_model()
    everywhere: State = dict(get_model_state_dict(model, options=FULL))
    assert differing(everywhere, wanted) == []
    assert list(everywhere) == list(wanted)
    assert not any(isinstance(value, DTensor) for value in everywhere.values())
    on_rank_0: State = dict(get_model_state_dict(model, options=FULL_ON_RANK_0))
    assert differing(on_rank_0, {} if dist.get_rank() else wanted) == []


# Loaders: each loads ``wanted``, the state dict of another whole model, into a sharded model.
Loader = Callable[[Model, State], object]


def canonical(model: Model, wanted: State) -> State:
    """Return ``wanted``; for each DTensor of the model, the tensor is cut by ``distribute_tensor``, as torch cuts."""
    return {
        name: distribute_tensor(wanted[name], mine.device_mesh, mine.placements)
        if isinstance(mine, DTensor)
        else wanted[name]
        for name, mine in model.state_dict().items()
    }


def sharded_like(model: Model, wanted: State) -> Model:
    """Return a sharded model of the same strategy with the values of ``wanted``."""
    other = make_model(seed=99)
    other.load_state_dict(wanted)
    spec = unit_of(model).groups[0].spec
    return sharded(other, mesh=spec.mesh, placements=spec.placements)


LOADERS: dict[str, Loader] = {
    "set_model_state_dict, full on every rank": lambda model, wanted: set_model_state_dict(model, wanted, options=FULL),
    "set_model_state_dict, full on rank 0": lambda model, wanted: set_model_state_dict(
        model, wanted if dist.get_rank() == 0 else {}, options=FROM_RANK_0
    ),
    "set_model_state_dict, sharded": lambda model, wanted: set_model_state_dict(
        model, get_model_state_dict(sharded_like(model, wanted))
    ),
    "load_state_dict, sharded": lambda model, wanted: model.load_state_dict(sharded_like(model, wanted).state_dict()),
    "load_state_dict, whole tensors assigned": lambda model, wanted: model.load_state_dict(wanted, assign=True),
    "load_state_dict, canonical DTensors assigned": lambda model, wanted: model.load_state_dict(
        canonical(model, wanted), assign=True
    ),
    "load_state_dict, canonical DTensors copied": lambda model, wanted: model.load_state_dict(canonical(model, wanted)),
}


# Loaders alternate between the two meshes.
MESHES = (("optim_grads_params", (3,)), ("hfsdp", (2, 2)))
QUICK = [(name, *MESHES[place % 2]) for place, name in enumerate(LOADERS)]


@pytest.mark.parametrize(
    ("name", "strategy", "mesh_shape"), nightly_but(QUICK, [(name, *mesh) for name in LOADERS for mesh in MESHES])
)
@on_ranks(lambda mesh_shape: torch.Size(mesh_shape).numel())
def test_a_model_in_use_takes_over_values_and_trains_on_from_them(
    name: str, strategy: str, mesh_shape: tuple[int, ...]
) -> None:
    other = make_model(seed=1)
    wanted = whole_state(other)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), range(1))
    model = sharded_model(strategy, mesh=mesh_shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(1))
    # PyTorch's own loaders write into the given dictionary.
    LOADERS[name](model, dict(wanted))
    assert differing(whole_state(model), wanted) == []
    train(model, optimizer, range(1))
    assert differing(whole_state(model), other.state_dict(), 1e-6) == []


ADAMW = {"foreach": {"foreach": True}, "one by one": {"foreach": False}, "fused": {"fused": True}}


def sharded_adamw(seed: int, options: Mapping[str, Any]) -> tuple[Model, torch.optim.Optimizer]:
    model = sharded_model(seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def whole_adamw(num_steps: int, num_ranks: int) -> tuple[Model, torch.optim.Optimizer]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(num_steps), range(num_ranks))
    return model, optimizer


def flat(optimizer_state: Mapping[str, Any]) -> State:
    return {
        f"{name}: {key}": value
        for name, values in optimizer_state.get("state", {}).items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("kind", nightly_but(["foreach"], ADAMW))
@on_ranks(NUM_RANKS)
def test_the_full_optimizer_state_equals_the_whole_models_and_resumes_bit_for_bit(kind: str) -> None:
    wanted = flat(get_optimizer_state_dict(*whole_adamw(2, NUM_RANKS)))
    options = ADAMW[kind]
    model, optimizer = sharded_adamw(0, options)
    train(model, optimizer, range(2))
    weights = get_model_state_dict(model, options=FULL_ON_RANK_0)
    # PyTorch returns the 0-d step counters themselves, not copies.
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL_ON_RANK_0))
    other, other_optimizer = sharded_adamw(5, options)
    set_model_state_dict(other, weights, options=FROM_RANK_0)
    moments = copy.deepcopy(flat(state))
    set_optimizer_state_dict(other, other_optimizer, state, options=FROM_RANK_0)
    train(model, optimizer, range(2, 4))
    train(other, other_optimizer, range(2, 4))
    if dist.get_rank() == 0:
        assert differing(moments, wanted, 1e-6) == []
    assert differing(whole_state(other), whole_state(model)) == []


@on_ranks(NUM_RANKS)
def test_a_sharded_run_goes_on_from_a_whole_models_state() -> None:
    whole, whole_optimizer = whole_adamw(2, NUM_RANKS)
    state = copy.deepcopy(get_optimizer_state_dict(whole, whole_optimizer))
    model, optimizer = sharded_adamw(5, {})
    weights: State = whole_state(whole)
    set_model_state_dict(model, weights, options=FULL)
    set_optimizer_state_dict(model, optimizer, state, options=FULL)
    train(model, optimizer, range(2, 4))
    train(whole, whole_optimizer, range(2, 4))
    assert differing(whole_state(model), whole.state_dict(), 1e-5) == []


@pytest.mark.parametrize(("strategy", "mesh_shape"), MESHES, ids=str)
@on_ranks(lambda mesh_shape: torch.Size(mesh_shape).numel())
def test_torchs_spec_cache_tells_our_cuts_from_torchs(strategy: str, mesh_shape: tuple[int, ...]) -> None:
    model: Any = sharded_model(strategy, mesh=mesh_shape)
    cut_by_torch = canonical(model, make_model().state_dict())
    for name, parameter in model.named_parameters():
        assert parameter._spec != cut_by_torch[name]._spec, name
        assert cut_by_torch[name]._spec != parameter._spec, name


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01, moments_dtype=torch.bfloat16),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
}


def build(kind: str, seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    model = sharded_model(seed=seed)
    return model, fully_shard_optimizer(KINDS[kind](model.parameters()))


def load_by_the_recipe(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load(state, checkpoint_id=path)
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("kind", nightly_but(["SGD", "AdamW"], ["Adam", "AdamW", "SGD"]))
@on_ranks(3)
def test_moments_and_steps_come_back_into_a_new_optimizer_bit_for_bit(kind: str, tmp_path: Path) -> None:
    # On three ranks, some ranks have no rows of the smaller parameters.
    path = str(tmp_path / "step")
    model, optimizer = build(kind)
    train(model, optimizer, range(2))
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    other, other_optimizer = build(kind, seed=1)
    load_by_the_recipe(other, other_optimizer, path)
    assert differing(full_optimizer_state(other, other_optimizer), full_optimizer_state(model, optimizer)) == []
    train(model, optimizer, range(2, 4))
    train(other, other_optimizer, range(2, 4))
    assert differing(whole_state(other), whole_state(model)) == []
    # A frozen parameter has no state.
    assert len(other_optimizer.state) == len(list(make_model().parameters())) - 1


@pytest.mark.parametrize("kind", nightly_but(["Adam"], ["Adam", "SGD", "NAdam"]))
@on_ranks(2)
def test_state_created_by_state_dict_changes_no_step_and_no_checkpoint(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    model, optimizer = build(kind)
    other, other_optimizer = build(kind)
    other_optimizer.load_state_dict(other_optimizer.state_dict())
    train(model, optimizer, range(2))
    train(other, other_optimizer, range(2))
    assert differing(whole_state(other), whole_state(model)) == []
    fresh, fresh_optimizer = build(kind)
    save_checkpoint(fresh, fresh_optimizer, path)
    load_checkpoint(other, other_optimizer, path)
    assert differing(whole_state(other), whole_state(fresh)) == []
    assert len(other_optimizer.state) == 0


@on_ranks(1)
def test_an_optimizer_whose_new_state_is_not_zeros_says_that_nothing_was_read(tmp_path: Path) -> None:
    # NAdam's product of momenta starts at one.
    path = str(tmp_path / "step")
    texts: list[str] = []
    handler: Any = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    model, optimizer = build("NAdam")
    train(model, optimizer, range(1))
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    other, other_optimizer = build("NAdam")
    logger = logging.getLogger("megatron_fsdp")
    logger.addHandler(handler)
    load_by_the_recipe(other, other_optimizer, path)
    logger.removeHandler(handler)
    (text,) = texts
    assert "NAdam: the state dict of an optimizer that has not stepped came back, with no state in it" in text
    assert "use megatron_fsdp.load_checkpoint" in text


@on_ranks(2)
def test_zero_state_of_a_new_optimizers_state_dict_is_freed_with_it() -> None:
    model = sharded_model()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    shown = [value for values in optimizer.state_dict()["state"].values() for value in values.values()]
    left = [weakref.ref(value) for value in shown]
    assert left
    del shown
    gc.collect()
    assert not any(reference() is not None for reference in left)
    assert not optimizer.state


@on_ranks(2)
def test_a_state_dict_in_a_backward_of_the_unit_is_refused() -> None:
    model = sharded_model()
    model.blocks[0].project.register_full_backward_hook(lambda *_: model.state_dict() and None)
    loss = token_loss(model, dist.get_rank(), 0)
    with pytest.raises(StateError, match=r"unit '.*': state_dict\(\) in a backward of the unit.*fix: "):
        loss.backward()
