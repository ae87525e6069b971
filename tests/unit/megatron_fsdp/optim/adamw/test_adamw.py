"""The flat AdamW over plain parameters: torch's steps, options and state, without any sharding."""

import argparse
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import bench_optimizer
from megatron_fsdp import ConfigError
from megatron_fsdp.optim.adamw.adamw import AdamW
from megatron_fsdp.optim.grad_norm import total_norm

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all changed": {"lr": 0.1, "betas": (0.3, 0.6), "eps": 1e-3, "weight_decay": 0.3, "maximize": True},
    "no decay": {"weight_decay": 0.0},
    "asked for foreach": {"foreach": True},
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters of ugly shapes and memory orders: scalar, empty, strided, transposed."""
    torch.manual_seed(0)
    shapes = [(), (1,), (0, 3), (7, 5), (3, 1, 2)]
    found = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    found.append(nn.Parameter(torch.randn(4, 6, dtype=dtype).t()))
    found.append(nn.Parameter(torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)))
    return found


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(100 + number)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Gradients need not have the memory order of their parameters.
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
    optimizer.step()


def differing(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> list[str]:
    wrong = []
    for group, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        for index, (p, q) in enumerate(zip(group["params"], other["params"], strict=True)):
            wrong += [] if torch.equal(p, q) else [f"parameter {index}"]
            found, wanted = mine.state[p], theirs.state[q]
            assert list(found) == list(wanted)
            wrong += [f"{index}: {key}" for key in wanted if not torch.equal(found[key], wanted[key])]
            assert all(
                found[key].shape == wanted[key].shape and found[key].dtype is wanted[key].dtype for key in wanted
            )
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_plain_parameters_step_as_with_torch_to_the_bit(name: str, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    mine = AdamW(parameters(dtype), **options)
    theirs = torch.optim.AdamW(parameters(dtype), **options | {"foreach": False})
    for number in range(4):
        step(mine, number)
        step(theirs, number)
    assert differing(mine, theirs) == []


def test_rates_and_betas_may_be_tensors_and_change_in_place() -> None:
    rate = torch.tensor(0.05)
    betas: Any = (torch.tensor(0.5), torch.tensor(0.25))
    mine, theirs = AdamW(parameters(), lr=rate, betas=betas), AdamW(parameters(), lr=0.05, betas=(0.5, 0.25))
    run(mine, range(2))
    run(theirs, range(2))
    rate.fill_(0.5)
    theirs.param_groups[0]["lr"] = 0.5
    run(mine, range(2, 3))
    run(theirs, range(2, 3))
    for p, q in zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_a_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = AdamW([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 4.0
    assert weight.item() < 2.0
    assert optimizer.step() is None


def test_steps_and_state_dicts_call_the_hooks_that_torch_promises() -> None:
    called: list[str] = []
    optimizer = AdamW(parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    step(optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before", "after", "loaded"]


def test_clipping_inside_the_step_equals_clipping_before_it() -> None:
    by_argument, by_default, theirs = AdamW(parameters()), AdamW(parameters(), max_norm=0.5), AdamW(parameters())
    optimizers = by_argument, by_default, theirs
    for number in range(3):
        for optimizer in optimizers:
            torch.manual_seed(number)
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn(parameter.shape)
        norm = nn.utils.clip_grad_norm_(theirs.param_groups[0]["params"], 0.5)
        theirs.step()
        by_argument.step(max_norm=0.5)
        by_default.step()
        for mine in (by_argument, by_default):
            assert mine.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
            assert mine.grad_norm.dtype is torch.float32
    for p, *others in zip(*(optimizer.param_groups[0]["params"] for optimizer in optimizers[::-1]), strict=True):
        for other in others:
            torch.testing.assert_close(other, p, rtol=1e-6, atol=1e-7)


def test_without_gradients_the_norm_is_zero_and_an_infinite_limit_only_measures() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer, plain = AdamW([weight], max_norm=float("inf")), AdamW([other])
    optimizer.step()
    assert optimizer.grad_norm.item() == 0.0
    weight.grad, other.grad = torch.tensor([30.0, 40.0]), torch.tensor([30.0, 40.0])
    optimizer.step()
    plain.step()
    assert optimizer.grad_norm.item() == 50.0
    assert torch.equal(weight, other)
    assert plain.grad_norm is None


def run(optimizer: torch.optim.Optimizer, numbers: range) -> torch.optim.Optimizer:
    for number in numbers:
        step(optimizer, number)
    return optimizer


@pytest.mark.parametrize(("saver", "loader"), [
    (AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW), (torch.optim.Adam, AdamW), (AdamW, AdamW)
])  # fmt: skip
def test_a_state_dict_resumes_to_the_bit(saver: Any, loader: Any) -> None:
    first = run(saver(parameters(), weight_decay=0.0, foreach=False), range(2))
    values = [p.detach().clone() for p in first.param_groups[0]["params"]]
    second = loader([nn.Parameter(value) for value in values], weight_decay=0.0)
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    run(first, range(2, 4))
    run(second, range(2, 4))
    assert differing(second, first) == []


def test_a_copy_made_by_deepcopy_or_pickle_steps_on_its_own_and_keeps_its_options() -> None:
    optimizer = run(AdamW(parameters(), moments_dtype=torch.bfloat16, max_norm=0.1), range(2))
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.moments_dtype, other.max_norm) == (torch.bfloat16, 0.1)
        run(other, range(2, 3))
        assert other.grad_norm is not None
        assert all(map(torch.equal, optimizer.param_groups[0]["params"], before))
        moved = [
            not torch.equal(p, q) for p, q in zip(other.param_groups[0]["params"], before, strict=True) if p.numel()
        ]
        assert all(moved)


def test_moments_of_another_dtype_are_that_also_after_loading_them() -> None:
    optimizer = run(AdamW(parameters(), moments_dtype=torch.bfloat16), range(1))
    assert {values["exp_avg"].dtype for values in optimizer.state.values()} == {torch.bfloat16}
    assert {values["step"].dtype for values in optimizer.state.values()} == {torch.float32}
    other = AdamW(parameters(), moments_dtype=torch.bfloat16)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {values["exp_avg_sq"].dtype for values in other.state.values()} == {torch.bfloat16}
    for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        with torch.no_grad():
            q.copy_(p)
    run(optimizer, range(1, 3))
    run(other, range(1, 3))
    assert differing(other, optimizer) == []


@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
def test_unsupported_options_are_refused_at_construction_in_groups_and_on_load(name: str) -> None:
    refused: dict[str, Any] = {name: True}
    with pytest.raises(ConfigError, match=f"AdamW\\({name}=True\\).*torch.optim.AdamW with fully_shard_optimizer"):
        AdamW(parameters(), **refused)
    optimizer = AdamW(parameters())
    with pytest.raises(ConfigError, match=name):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: True})
    assert len(optimizer.param_groups) == 1
    theirs = run(torch.optim.AdamW(parameters()), range(1)).state_dict()
    theirs["param_groups"][0][name] = True
    with pytest.raises(ConfigError, match=name):
        optimizer.load_state_dict(theirs)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("name", "value"), [("amsgrad", True), ("differentiable", True), ("decoupled_weight_decay", False)]
)
def test_unsupported_options_set_in_a_group_later_are_refused_by_the_next_step(name: str, value: bool) -> None:
    optimizer = run(AdamW(parameters()), range(1))
    optimizer.param_groups[0][name] = value
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"AdamW\\({name}={value}\\)"):
            run(optimizer, range(1, 2))
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}])
def test_impossible_hyperparameters_are_refused_as_by_torch(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        AdamW(parameters(), **bad)


def test_moments_of_integers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"moments_dtype=torch\.int8"):
        AdamW(parameters(), moments_dtype=torch.int8)


def test_sparse_gradients_and_complex_parameters_are_refused_with_the_way_out() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3).to_sparse()
    with pytest.raises(ConfigError, match=r"layout torch\.sparse_coo.*SparseAdam"):
        AdamW([weight]).step()
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight.grad = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"complex64.*view_as_real"):
        AdamW([weight]).step()


def test_a_gradient_scaler_unscales_before_the_step_even_with_fused() -> None:
    for fused in (None, True):
        optimizer = AdamW(parameters(), fused=fused)
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)


@pytest.mark.parametrize("has_groups", [False, True])
def test_a_step_calls_fewer_operators_than_torchs_and_few_besides_launches(
    has_groups: bool,
) -> None:
    arguments = argparse.Namespace(units=3, width=4, rounds=1, weight_decay_groups=has_groups)
    rows = bench_optimizer.run(arguments)
    calls = {row.case["step"]: row.samples.median for row in rows if row.metric == "operator calls"}
    times = ("host time", "host time with zero_grad")
    assert {row.metric for row in rows} == {*times, *(f"{time} over peer's" for time in times), "operator calls"}
    # Each of the three units has one call that counts its steps; the table of hyperparameters takes the rest.
    assert calls["flat, launches left out"] <= 3 + 5
    assert calls["flat, launches left out"] < calls["flat"]
    assert has_groups or max(calls["flat"], calls["stock, foreach"]) < calls["DTensors, foreach"]


@pytest.mark.parametrize("order", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_of_millions_of_elements_has_the_digits_of_its_dtype(order: float, dtype: torch.dtype) -> None:
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = torch.linalg.vector_norm(gradient.double(), order)
    found = total_norm([((), [gradient, gradient[:0]])], order, torch.device("cpu"), is_invariant=False)
    assert found.item() == pytest.approx(wanted.item(), rel=3e-6)
