"""The state of Muon: shown as torch's, saved and resumed on other ranks; gradients that are clipped, absent or NaN."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import (
    ConfigError,
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
from tests.functional.muon_model import (
    Matrices,
    Whole,
    make_matrices,
    param_groups,
    shard_matrices,
    train_sharded,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import make_mesh, make_model, world_mesh
from tests.harness.oracle import differing, shard_model, train, whole_state

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
# Checkpoints resume on other numbers of ranks, so all of these train on the numbers of ranks 0 and 1.
NUM_SOURCES = 2
Weights = dict[str, torch.Tensor]


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
    """Train and save; return what of the state is not laid out as its parameter."""
    model, optimizer = sharded((2,), Placements.optim_grads_params(0))
    train_on_two(model, optimizer, range(2))
    save_checkpoint(model, optimizer, folder)
    return [
        key
        for parameter, values in optimizer.state.items()
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
    """A checkpoint after two steps, and the weights after four in one process."""
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


def two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scenario in (state_dicts, clipping, nonfinite, absent, schedule, reports, tiny_gpt):
        found[scenario.__name__] = scenario()
    return found


def state_dicts() -> dict[str, Any]:
    """Load an optimizer's state dict into another one, and torch's own state into this one."""
    model, optimizer = sharded((2,), Placements.optim_grads_params(0))
    train_sharded(model, optimizer, range(2), dist.get_rank())
    document = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    train_sharded(model, optimizer, range(2, 4), dist.get_rank())
    other, fresh = sharded((2,), Placements.optim_grads_params(0))
    other.load_state_dict(weights)
    fresh.load_state_dict(document)
    train_sharded(other, fresh, range(2, 4), dist.get_rank())
    keys = [sorted(values) for values in document["state"].values()]
    return {
        "resumed": differing(whole_state(other), whole_state(model)),
        "keys": sorted({" ".join(each) for each in keys}),
        "groups": [group["use_muon"] for group in fresh.param_groups],
        "shares memory": any(
            value is mine
            for values, mine_values in zip(fresh.state.values(), optimizer.state.values(), strict=True)
            for value, mine in zip(values.values(), mine_values.values(), strict=True)
        ),
    }


def clipping() -> dict[str, Any]:
    results = []
    for is_inside in (True, False):
        model, optimizer = sharded((2,), Placements.optim_grads_params(0))
        model(3 + dist.get_rank()).backward()
        if not is_inside:
            # The norm of both is a power of two away from the limit, so that the factor is exact.
            optimizer.step(max_norm=math.inf)
            norm = optimizer.grad_norm
            results.append(norm.item())
            continue
        optimizer.step(max_norm=1.0)
        results.append(optimizer.grad_norm.item())
        squares = sum(p.grad.full_tensor().square().sum().item() for p in model.parameters() if p.grad is not None)
        results.append(math.sqrt(squares))
    return {"norms": results}


def nonfinite() -> dict[str, Any]:
    """Step on a NaN in the rows that one rank has of a matrix: nothing changes anywhere, or it is raised by name."""
    model, optimizer = sharded((2,), Placements.optim_grads_params(0))
    train_sharded(model, optimizer, range(1), dist.get_rank())
    optimizer.nonfinite = "skip"
    before = copy.deepcopy((whole_state(model), optimizer.state_dict()["state"]))
    model(1).backward()
    gradient = model.layers[0].tall.grad
    assert isinstance(gradient, DTensor)
    if gradient.to_local().numel():
        gradient.to_local()[-1, 0] = math.nan
    optimizer.step()
    changed = differing(whole_state(model), before[0])
    momentum = [
        key
        for index, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
        if not torch.equal(_local(value), _local(before[1][index][key]))
    ]
    optimizer.nonfinite = "raise"
    with pytest.raises(NonfiniteGradientError, match="tall"):
        optimizer.step()
    return {"changed": changed, "momentum": momentum, "skipped": optimizer.num_skipped}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def absent() -> dict[str, Any]:
    model, optimizer = sharded((2,), Placements.optim_grads_params(0))
    model(dist.get_rank()).backward()
    layer = model.layers[0]
    layer.experts.grad = layer.bias.grad = None
    before = whole_state(model)
    optimizer.step()
    optimizer.zero_grad()
    after = whole_state(model)
    states = [optimizer.state.get(parameter) for parameter in (layer.experts, layer.bias)]
    steps = [float(values["step"]) for values in optimizer.state.values() if "step" in values]
    optimizer.step()
    return {
        "unchanged": sorted(set(before) - set(differing(before, after))),
        "states": states,
        "steps": steps,
        "after an empty step": differing(whole_state(model), after),
        "counters after": [float(v["step"]) for v in optimizer.state.values() if "step" in v] == steps,
    }


def schedule() -> dict[str, Any]:
    """Give matrices of one group another rate, and change all rates by a scheduler."""
    model, optimizer = sharded((2,), Placements.optim_grads_params(0))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = whole_state(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train_sharded(model, optimizer, range(1), dist.get_rank())
    scheduler.step()
    after = whole_state(model)
    return {
        "unchanged": sorted(set(before) - set(differing(before, after))),
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def reports() -> dict[str, Any]:
    model, optimizer = sharded((2,), Placements.optim_grads_params(0))
    (report,) = explain(optimizer)
    with pytest.raises(ConfigError, match=r"bias.*use_muon=False"):
        Muon([{"params": [model.layers[0].bias]}])
    with pytest.raises(ConfigError, match=r"experts.*batch_dims"):
        Muon([model.layers[0].experts])
    with pytest.raises(ConfigError, match="SGD"):
        explain(torch.optim.SGD(model.parameters(), lr=0.1))
    return {"plain": report.to_dict(), "page": str(report)}


def tiny_gpt() -> list[str]:
    """Train the usual test model with groups made by rule, through ``fully_shard_optimizer``, and compare."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return muon_param_groups(model, views={"*experts": MatrixView(batch_dims=1)}, adamw=("head.weight",))

    model = shard_model(make_model(), world_mesh())
    train(model, fully_shard_optimizer(Muon(groups(model), **OPTIONS)), range(3), [dist.get_rank()])
    whole = make_model()
    train(whole, Muon(groups(whole), **OPTIONS), range(3), range(2))
    # Gradients of one process round otherwise, and bf16 products make that some 2**-9 of an update.
    return differing(whole_state(model), whole_state(whole), 3e-3)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, two_ranks)


def test_a_state_dict_has_torchs_keys_and_resumes_to_the_bit(found: list[dict[str, Any]]) -> None:
    for rank in found:
        shown = rank["state_dicts"]
        assert shown["resumed"] == []
        assert shown["keys"] == ["exp_avg exp_avg_sq step", "momentum_buffer"]
        assert shown["groups"] == [True] * 7 + [False]
        assert not shown["shares memory"]


def test_the_norm_is_that_of_all_gradients_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        clipped, by_hand, measured = rank["clipping"]["norms"]
        assert clipped == measured == pytest.approx(by_hand, rel=1e-6)


def test_a_nan_on_one_rank_stops_the_step_on_all_before_any_matrix(found: list[dict[str, Any]]) -> None:
    assert [rank["nonfinite"] for rank in found] == [{"changed": [], "momentum": [], "skipped": 1}] * 2


def test_parameters_without_gradient_are_left_alone_and_an_empty_step_is_none(found: list[dict[str, Any]]) -> None:
    for rank in found:
        shown = rank["absent"]
        assert shown["unchanged"] == ["layers.0.bias", "layers.0.experts"]
        assert shown["states"] == [None, None]
        assert set(shown["steps"]) == {1.0}
        assert shown["after an empty step"] == []
        assert shown["counters after"]


def test_each_group_has_a_rate_of_its_own_that_schedules_change(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["schedule"]["unchanged"] == ["layers.0.qkv", "layers.1.qkv"]
        assert rank["schedule"]["rates"] == [0.0] + [0.01] * 6 + [0.005]


def test_the_report_counts_what_ranks_share(found: list[dict[str, Any]]) -> None:
    for rank in found:
        plain = rank["reports"]["plain"]
        assert (plain["num_ranks"], plain["num_matrices"]) == (2, 2 * 16)
        assert plain["redundant_flops"] == pytest.approx(2 * plain["mean_flops"])
        assert plain["max_flops"] <= 1.05 * plain["bound_flops"]
        assert "32 matrices" in rank["reports"]["page"]


def test_groups_by_rule_train_the_model_that_one_process_trains(found: list[dict[str, Any]]) -> None:
    assert [rank["tiny_gpt"] for rank in found] == [[], []]


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


def test_a_state_of_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    del tmp_path
    assert run_ranks(1, load_foreign_state) == [True]


def load_foreign_state() -> bool:
    model, optimizer = sharded((1,), Placements.optim_grads_params(0))
    train_sharded(model, optimizer, range(1), 0)
    document = optimizer.state_dict()
    document["state"][0] = {"exp_avg": torch.zeros(2)}
    _, fresh = sharded((1,), Placements.optim_grads_params(0))
    with pytest.raises(ConfigError, match="momentum_buffer"):
        fresh.load_state_dict(document)
    return True


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
def test_an_unsharded_dtensor_of_somebody_else_is_refused() -> None:
    module = nn.Linear(3, 4)
    torch.distributed.fsdp.fully_shard(module)
    with pytest.raises(ConfigError, match="fully_shard did not make"):
        Muon([module.weight])
    fully_shard(nn.Linear(2, 2))


def run_examples() -> int:
    """Run the examples of docs/muon.md, one after the other; return how many matrices were made semi-orthogonal."""
    page = Path(__file__).parents[2] / "docs" / "muon.md"
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, str(page), "exec"), names)  # what is under test is the text
    optimizer, model = names["optimizer"], names["model"]
    model(torch.arange(8)).square().mean().backward()
    before = model[1].weight.full_tensor()
    optimizer.step()
    assert (model[1].weight.full_tensor() - before).abs().max() > 0.01, "the hook scales by 0.9 after the step"
    return int(optimizer.num_orthogonalized)


def test_the_examples_of_the_page_run_on_two_ranks() -> None:
    assert sum(run_ranks(2, run_examples)) == 2 * 4
