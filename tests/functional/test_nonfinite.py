"""NaN and infinity in gradients: all ranks skip or stop alike, and the first parameter is named."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import AdamW, ConfigError, NonfiniteGradientError, check_gradients, clip_grad_norm_
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, make_model
from tests.harness.oracle import shard_model, whole_state

LAYOUTS = {"zero 3": ("optim_grads_params", (3,)), "zero 1": ("optim", (2,)), "hfsdp": ("hfsdp", (2, 2))}


def sharded(layout: str) -> Model:
    strategy, shape = LAYOUTS[layout]
    return shard_model(make_model(), make_mesh(shape), strategy)


def backward(model: Model, step: int, *, is_spoiled: bool = False, value: float = float("nan")) -> None:
    """Compute gradients; rank 1 alone spoils those of the last block's experts and gain."""
    hooks: list[Any] = []

    def spoil(block: nn.Module, _inputs: object) -> None:
        for weight in (block.experts, block.gain):
            assert isinstance(weight, torch.Tensor)
            hooks.append(weight.register_hook(lambda gradient: torch.full_like(gradient, value)))

    if is_spoiled and dist.get_rank() == 1:
        hooks.append(model.blocks[1].register_forward_pre_hook(spoil))
    tokens = draw_tokens(dist.get_rank(), step)
    loss_of(model(tokens), tokens).backward()
    for hook in hooks:
        hook.remove()


def train_with_adamw(layout: str, nonfinite: str, spoiled: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], int]:
    model = sharded(layout)
    optimizer = AdamW(model.parameters(), lr=0.01, max_norm=1.0, nonfinite=nonfinite)
    for step in range(4):
        if step in spoiled and nonfinite == "leave out":
            continue
        backward(model, step, is_spoiled=step in spoiled)
        optimizer.step()
        optimizer.zero_grad()
    counts = {int(values["step"]) for values in optimizer.state.values()}
    assert counts == {4 - optimizer.num_skipped}
    return whole_state(model), optimizer.num_skipped


def train_without(layout: str, left_out: tuple[int, ...]) -> dict[str, torch.Tensor]:
    model = sharded(layout)
    optimizer = AdamW(model.parameters(), lr=0.01, max_norm=1.0)
    for step in range(4):
        if step not in left_out:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return whole_state(model)


@pytest.mark.parametrize(("layout", "spoiled"), [("zero 3", (0,)), ("zero 1", (1, 3)), ("hfsdp", (1, 3))])
def test_a_skipped_step_leaves_weights_and_moments_as_if_it_had_not_been(layout: str, spoiled: tuple[int, ...]) -> None:
    num_ranks = torch.Size(LAYOUTS[layout][1]).numel()
    wanted = run_ranks(num_ranks, train_without, layout, spoiled)
    for (weights, skipped), other in zip(
        run_ranks(num_ranks, train_with_adamw, layout, "skip", spoiled), wanted, strict=True
    ):
        assert skipped == len(spoiled)
        assert [name for name in weights if not torch.equal(weights[name], other[name])] == []


def stop(layout: str, value: float) -> tuple[str, str, bool]:
    """Return what AdamW and ``check_gradients`` raise, and whether weights are as before."""
    model = sharded(layout)
    before = whole_state(model)
    optimizer = AdamW(model.parameters(), lr=0.01, nonfinite="raise")
    backward(model, 0, is_spoiled=True, value=value)
    found = []
    with pytest.raises(NonfiniteGradientError) as caught:
        optimizer.step()
    found.append(str(caught.value))
    with pytest.raises(NonfiniteGradientError) as caught:
        check_gradients(model, clip_grad_norm_(model, float("inf")))
    found.append(str(caught.value))
    after = whole_state(model)
    return found[0], found[1], all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_stops_before_anything_changes_and_names_the_first_parameter(layout: str) -> None:
    num_ranks = torch.Size(LAYOUTS[layout][1]).numel()
    for from_adamw, from_check, is_unchanged in run_ranks(num_ranks, stop, layout, float("nan")):
        assert is_unchanged
        assert (
            "gradient norm nan: NaN in the gradient of parameter 'blocks.1.experts', and of 1 more of 17. "
            in from_check
        )
        assert "NaN in the gradient of unit 'blocks.1': parameter 'experts', and of 1 more of 17. " in from_adamw


def test_infinity_is_told_from_nan() -> None:
    for _, from_check, _ in run_ranks(2, stop, "zero 1", float("inf")):
        assert "gradient norm inf: infinity in the gradient of parameter 'blocks.1.experts'" in from_check


@on_ranks(3)
def test_a_norm_that_overflows_is_said_to_overflow() -> None:
    model = sharded("zero 3")
    backward(model, 0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(3e38)
    with pytest.raises(NonfiniteGradientError) as caught:
        check_gradients(model, clip_grad_norm_(model, float("inf")))
    text = str(caught.value)
    assert "every element is finite, but the sum" in text


@on_ranks(3)
def test_steps_are_skipped_by_hand_with_a_warning_and_finite_gradients_cost_no_collective() -> None:
    caplog_level = logging.WARNING
    model = sharded("zero 3")
    records: list[str] = []
    handler = logging.Handler(caplog_level)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("megatron_fsdp.optim.nonfinite").addHandler(handler)
    backward(model, 0, is_spoiled=True)
    bad = check_gradients(model, clip_grad_norm_(model, 1.0), "skip")
    model.zero_grad()
    backward(model, 1)
    norm = clip_grad_norm_(model, 1.0)
    calls: list[CollectiveCall] = []
    with observe_collectives(calls.append):
        good = check_gradients(model, norm, "skip")
    logging.getLogger("megatron_fsdp.optim.nonfinite").removeHandler(handler)
    num_calls = len(calls)
    warnings = records
    assert (bad, good, num_calls) == (False, True, 0)
    (warning,) = warnings
    assert warning.startswith("step skipped on all ranks: gradient norm nan: NaN in the gradient of parameter 'bl")


def test_a_policy_that_does_not_exist_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="wanted one of 'ignore', 'skip', 'raise'"):
        AdamW(model.parameters(), nonfinite="stop")
    with pytest.raises(ConfigError, match="wanted one of 'ignore', 'skip', 'raise'"):
        check_gradients(model, torch.tensor(1.0), "stop")
    assert check_gradients(model, torch.tensor(float("nan")), "ignore")
