"""State of the flat AdamW goes to ``torch.optim.AdamW`` and back: state dicts, their helpers, and checkpoints."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

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
from torch.distributed.tensor import distribute_tensor

from megatron_fsdp import ConfigError, Placements, fully_shard, fully_shard_optimizer
from megatron_fsdp.optim.adamw import AdamW
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import covering, nightly_but
from tests.harness.models import Model, inputs, make_mesh, make_model
from tests.harness.oracle import differing, shard_model, train, whole_state

State: TypeAlias = dict[str, Any]
Make: TypeAlias = Callable[..., torch.optim.Optimizer]
FULL_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def torch_adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.AdamW(parameters, foreach=False, **options))


MAKERS: dict[str, Make] = {"ours": AdamW, "torch's": torch_adamw}
WAYS = [("ours", "torch's"), ("torch's", "ours"), ("ours", "ours")]


def sharded(make: Make, seed: int = 0, strategy: str = "optim_grads_params") -> tuple[Model, torch.optim.Optimizer]:
    """Return a sharded model and an optimizer over its trainable parameters."""
    mesh = make_mesh((2, dist.get_world_size() // 2) if strategy == "hfsdp" else (dist.get_world_size(),))
    model = shard_model(make_model(seed), mesh, strategy)
    return model, make([p for p in model.parameters() if p.requires_grad], lr=0.01)


def mine() -> list[int]:
    return [dist.get_rank()]


def moments_of(model: Model, optimizer: torch.optim.Optimizer) -> State:
    """Return the optimizer's state as whole tensors; every rank calls it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}: {key}": value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


LAYOUTS = [("optim_grads_params", 3), ("optim", 2), ("hfsdp", 4)]
RESUMED = [(*way, *layout) for way in WAYS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("saver", "loader", "strategy", "num_ranks"), nightly_but(covering(RESUMED, strength=1), RESUMED)
)
@on_ranks(lambda num_ranks: num_ranks)
def test_a_state_dict_resumes_bit_for_bit(saver: str, loader: str, strategy: str, num_ranks: int) -> None:
    model, optimizer = sharded(MAKERS[saver], 0, strategy)
    train(model, optimizer, range(2), mine())
    other, other_optimizer = sharded(MAKERS[loader], 5, strategy)
    # Into an optimizer that has state of its own already.
    train(other, other_optimizer, range(3), mine())
    other.load_state_dict(model.state_dict())
    # PyTorch's load_state_dict takes tensors over as they are, so that both optimizers would write into them.
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    right_after = differing(moments_of(other, other_optimizer), moments_of(model, optimizer))
    train(model, optimizer, range(2, 4), mine())
    train(other, other_optimizer, range(2, 4), mine())
    assert right_after == []
    assert differing(whole_state(other), whole_state(model)) == []


@on_ranks(2)
def test_two_optimizers_never_share_the_state_that_one_loaded_from_the_other() -> None:
    model, optimizer = sharded(AdamW)
    train(model, optimizer, range(2), mine())
    before = moments_of(model, optimizer)
    other, other_optimizer = sharded(AdamW, 5)
    other_optimizer.load_state_dict(optimizer.state_dict())
    train(other, other_optimizer, range(2), mine())
    moved = bool(differing(moments_of(other, other_optimizer), before, 1e-3))
    assert (moved, differing(moments_of(model, optimizer), before)) == (True, [])


@pytest.mark.parametrize(("saver", "loader"), WAYS)
@on_ranks(3)
def test_the_full_state_of_rank_0_resumes_bit_for_bit(saver: str, loader: str) -> None:
    model, optimizer = sharded(MAKERS[saver])
    train(model, optimizer, range(2), mine())
    weights = get_model_state_dict(model, options=FULL_ON_RANK_0)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=FULL_ON_RANK_0))
    other, other_optimizer = sharded(MAKERS[loader], 5)
    set_model_state_dict(other, weights, options=FROM_RANK_0)
    set_optimizer_state_dict(other, other_optimizer, state, options=FROM_RANK_0)
    train(model, optimizer, range(2, 4), mine())
    train(other, other_optimizer, range(2, 4), mine())
    assert differing(whole_state(other), whole_state(model)) == []


@on_ranks(3)
def test_state_that_torch_cut_lands_in_the_rows_of_its_parameters() -> None:
    model, optimizer = sharded(AdamW)
    train(model, optimizer, range(2), mine())
    # A state dict holds the optimizer's own dictionaries.
    state = copy.deepcopy(optimizer.state_dict())
    wanted = moments_of(model, optimizer)
    for values in state["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            value = values[key]
            values[key] = distribute_tensor(value.full_tensor(), value.device_mesh, [*value.placements])
    other, other_optimizer = sharded(AdamW, 5)
    other_optimizer.load_state_dict(state)
    found = moments_of(other, other_optimizer)
    other.load_state_dict(model.state_dict())
    train(model, optimizer, range(2, 3), mine())
    train(other, other_optimizer, range(2, 3), mine())
    assert (differing(found, wanted), differing(whole_state(other), whole_state(model))) == ([], [])


def save_with_dcp(path: str, saver: str) -> State:
    model, optimizer = sharded(MAKERS[saver])
    train(model, optimizer, range(2), mine())
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save(state, checkpoint_id=path)
    return whole_state(model)


def load_with_dcp(path: str, loader: str, num_savers: int) -> tuple[State, State]:
    """Load into a fresh model and optimizer; return the weights right after, and after one step on all data."""
    if loader == "whole":
        model = make_model(5)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=0.01
        )
    else:
        model, optimizer = sharded(MAKERS[loader], 5)
    state: State = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = whole_state(model)
    train(model, optimizer, range(2, 3), range(num_savers))
    return loaded, whole_state(model)


MOVES = [("ours", "ours", 2), ("ours", "torch's", 2), ("torch's", "ours", 2), ("ours", "whole", 1), ("ours", "ours", 4)]


@pytest.mark.parametrize(("saver", "loader", "num_loaders"), nightly_but([MOVES[0], MOVES[2], MOVES[3]], MOVES))
def test_what_three_ranks_saved_with_dcp_trains_on(saver: str, loader: str, num_loaders: int, tmp_path: Path) -> None:
    saved = run_ranks(3, save_with_dcp, str(tmp_path / "checkpoint"), saver)[0]
    model = make_model()
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01), range(3), range(3))
    for right_after, later in run_ranks(num_loaders, load_with_dcp, str(tmp_path / "checkpoint"), loader, 3):
        assert differing(right_after, saved) == []
        assert differing(later, model.state_dict(), 1e-5) == []


def resume_bf16_moments() -> tuple[set[torch.dtype], list[str], list[str], set[torch.dtype]]:
    def make(parameters: Any, **options: Any) -> AdamW:
        return AdamW(parameters, moments_dtype=torch.bfloat16, **options)

    model, optimizer = sharded(make)
    train(model, optimizer, range(2), mine())
    state = copy.deepcopy(optimizer.state_dict())
    other, other_optimizer = sharded(make, 5)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(state)
    stock, stock_optimizer = sharded(torch_adamw, 5)
    stock_optimizer.load_state_dict(copy.deepcopy(state))
    wanted = moments_of(model, optimizer)
    found = differing(moments_of(other, other_optimizer), wanted)
    train(model, optimizer, range(2, 4), mine())
    train(other, other_optimizer, range(2, 4), mine())
    kinds = {value.dtype for name, value in wanted.items() if ": exp_avg" in name}
    loaded = {value.dtype for name, value in moments_of(stock, stock_optimizer).items() if ": exp_avg" in name}
    return kinds, found, differing(whole_state(other), whole_state(model)), loaded


def test_bf16_moments_resume_bit_for_bit_and_load_into_torchs_as_fp32() -> None:
    wanted = ({torch.bfloat16}, [], [], {torch.float32})
    assert run_ranks(3, resume_bf16_moments) == [wanted] * 3


@on_ranks(2)
def test_the_state_of_other_optimizers_is_refused_before_anything_changes() -> None:
    messages = []
    for other in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    ):
        model, optimizer = sharded(AdamW)
        train(model, optimizer, range(1), mine())
        before = moments_of(model, optimizer)
        donor, donor_optimizer = sharded(lambda p, lr, other=other: other(p))
        train(donor, donor_optimizer, range(1), mine())
        try:
            optimizer.load_state_dict(donor_optimizer.state_dict())
        except ConfigError as error:
            messages.append(str(error))
        assert differing(moments_of(model, optimizer), before) == []
        train(model, optimizer, range(1), mine())
    sgd, amsgrad = messages
    assert "['momentum_buffer']; wanted ['step', 'exp_avg', 'exp_avg_sq']" in sgd
    assert "amsgrad=True" in amsgrad


def swap_records(optimizer: torch.optim.Optimizer, one: torch.Tensor, other: torch.Tensor) -> None:
    state = optimizer.state
    state[one], state[other] = state[other], state[one]


def swap_first_moments(optimizer: torch.optim.Optimizer, one: torch.Tensor, other: torch.Tensor) -> None:
    a, b = optimizer.state[one], optimizer.state[other]
    a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]


def swap_by_loading(optimizer: torch.optim.Optimizer, one: torch.Tensor, other: torch.Tensor) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    a, b = (next(i for i, each in enumerate(parameters) if each is parameter) for parameter in (one, other))
    document = optimizer.state_dict()
    document["state"][a], document["state"][b] = document["state"][b], document["state"][a]
    optimizer.load_state_dict(document)


SWAPS = {"records": swap_records, "first moments": swap_first_moments, "entries of a state dict": swap_by_loading}


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("swap", SWAPS)
@on_ranks(2)
def test_state_exchanged_between_parameters_is_taken_over_with_both_values(strategy: str, swap: str) -> None:
    torch.manual_seed(0)
    oracle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = copy.deepcopy(oracle)
    mesh = make_mesh((dist.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh, getattr(Placements, strategy)())
    for each, make, ranks in (
        (model, AdamW, mine()),
        (oracle, torch.optim.AdamW, list(range(dist.get_world_size()))),
    ):
        optimizer = make(each.parameters(), lr=0.05)
        for step in range(4):
            for rank in ranks:
                (each(inputs(rank, step, 4, 8)).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                SWAPS[swap](optimizer, each[0].weight, each[2].weight)
    assert differing(whole_state(model), whole_state(oracle), 1e-5) == []
