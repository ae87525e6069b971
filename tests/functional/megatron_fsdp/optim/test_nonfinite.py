"""NaN and infinity in gradients: all ranks skip or stop alike, and the first parameter is named."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import AdamW, ConfigError, NonfiniteGradientError, check_gradients, clip_grad_norm_, fully_shard
from tests.harness import on_ranks
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, squared, three_blocks
from tests.harness.oracle import STRATEGIES, differing, sharded_model, whole_state

LAYOUTS = {"zero 3": ("optim_grads_params", (3,)), "zero 1": ("optim", (2,)), "hfsdp": ("hfsdp", (2, 2))}


def num_ranks(layout: str) -> int:
    return torch.Size(LAYOUTS[layout][1]).numel()


def sharded(layout: str) -> Model:
    strategy, shape = LAYOUTS[layout]
    return sharded_model(strategy, mesh=shape)


def backward(model: Model, step: int, value: Any = None) -> None:
    """Compute gradients; on rank 1 alone, those of the last block's experts and gain are spoiled by a value."""
    hooks: list[Any] = []

    def spoil(block: nn.Module, _inputs: object) -> None:
        for weight in (block.experts, block.gain):
            assert isinstance(weight, torch.Tensor)
            hooks.append(weight.register_hook(lambda gradient: torch.full_like(gradient, value)))

    if value is not None and dist.get_rank() == 1:
        hooks.append(model.blocks[1].register_forward_pre_hook(spoil))
    tokens = draw_tokens(dist.get_rank(), step)
    loss_of(model(tokens), tokens).backward()
    for hook in hooks:
        hook.remove()


def train(layout: str, steps: Sequence[int], spoiled: Sequence[int]) -> dict[str, torch.Tensor]:
    model = sharded(layout)
    optimizer = AdamW(model.parameters(), lr=0.01, max_norm=1.0, nonfinite="skip")
    for step in steps:
        backward(model, step, math.nan if step in spoiled else None)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_skipped == len(spoiled)
    assert {int(values["step"]) for values in optimizer.state.values()} == {len(steps) - len(spoiled)}
    return whole_state(model)


@on_ranks(3)
def test_a_nan_of_one_rank_is_the_infinity_norm_on_all() -> None:
    model = sharded("zero 3")
    backward(model, 0)
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor) and dist.get_rank() == 1:
            parameter.grad.to_local().fill_(math.nan)
    assert math.isnan(clip_grad_norm_(model, 1.0, norm_type=math.inf).item())


@pytest.mark.parametrize(("layout", "spoiled"), [("zero 3", (0,)), ("zero 1", (1, 3)), ("hfsdp", (1, 3))])
@on_ranks(num_ranks)
def test_a_skipped_step_leaves_weights_and_moments_unchanged(layout: str, spoiled: tuple[int, ...]) -> None:
    wanted = train(layout, [step for step in range(4) if step not in spoiled], ())
    assert differing(train(layout, range(4), spoiled), wanted) == []


@pytest.mark.parametrize(("layout", "value"), [*((layout, math.nan) for layout in LAYOUTS), ("zero 1", math.inf)])
@on_ranks(num_ranks)
def test_every_rank_stops_before_anything_changes_and_names_the_first_parameter(layout: str, value: float) -> None:
    model = sharded(layout)
    before = whole_state(model)
    optimizer = AdamW(model.parameters(), lr=0.01, nonfinite="raise")
    backward(model, 0, value)
    what, others = f"{'NaN' if math.isnan(value) else 'infinity'} in the gradient of", ", and of 1 more of 17. "
    with pytest.raises(NonfiniteGradientError, match=f"{what} unit 'blocks.1': parameter 'experts'{others}"):
        optimizer.step()
    with pytest.raises(NonfiniteGradientError, match=f"norm {value}: {what} parameter 'blocks.1.experts'{others}"):
        check_gradients(model, clip_grad_norm_(model, math.inf))
    assert differing(whole_state(model), before) == []


@on_ranks(3)
def test_an_overflowing_norm_is_reported_as_an_overflow() -> None:
    model = sharded("zero 3")
    backward(model, 0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(3e38)
    with pytest.raises(NonfiniteGradientError, match="every element is finite, but the sum"):
        check_gradients(model, clip_grad_norm_(model, math.inf))


@on_ranks(3)
def test_skipping_by_hand_warns_and_finite_gradients_need_no_collective() -> None:
    model = sharded("zero 3")
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_fsdp.optim.nonfinite").addHandler(handler)
    backward(model, 0, math.nan)
    assert not check_gradients(model, clip_grad_norm_(model, 1.0), "skip")
    model.zero_grad()
    backward(model, 1)
    norm = clip_grad_norm_(model, 1.0)
    calls: list[CollectiveCall] = []
    with observe_collectives(calls.append):
        assert check_gradients(model, norm, "skip")
    logging.getLogger("megatron_fsdp.optim.nonfinite").removeHandler(handler)
    assert calls == []
    (warning,) = records
    assert warning.startswith("step skipped on all ranks: gradient norm nan: NaN in the gradient of parameter 'bl")


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks(3)
def test_ranks_stop_alike_where_one_has_nan_in_the_gradient_of_an_ignored_parameter(strategy: str) -> None:
    model: Any = three_blocks()
    model.ignored = nn.Linear(1, 1)
    options: dict[str, Any] = {"mesh": make_mesh((3,)), "placements": STRATEGIES[strategy]}
    fully_shard(model, ignored_params=set(model.ignored.parameters()), **options)
    optimizers = [AdamW(model.parameters(), nonfinite=policy) for policy in ("raise", "skip")]
    squared(model, dist.get_rank(), 0).backward()
    rank = float(dist.get_rank())
    model.ignored.weight.grad = torch.full((1, 1), math.nan if rank == 1 else rank)
    before = whole_state(model)
    assert clip_grad_norm_(model, 1.0).isnan()
    with pytest.raises(NonfiniteGradientError, match=r"NaN in the gradient of parameter 'ignored\.weight'"):
        check_gradients(model, clip_grad_norm_(model, math.inf))
    with pytest.raises(NonfiniteGradientError, match="NaN in the gradient of plain parameter 0"):
        optimizers[0].step()
    optimizers[1].step()
    assert optimizers[1].num_skipped == 1
    assert differing(whole_state(model), before) == []
    # A finite norm is that of the rank with the largest one, on all ranks.
    model.ignored.weight.grad.fill_(100 * rank)
    norms: list[Any] = [None] * 3
    dist.all_gather_object(norms, clip_grad_norm_(model, math.inf).item())
    optimizers[1].step()
    assert optimizers[1].grad_norm is not None
    assert [*norms, optimizers[1].grad_norm.item()] == pytest.approx([200.0] * 4, rel=1e-3)


@on_ranks(2)
def test_ranks_that_freeze_other_ignored_parameters_clip_alike() -> None:
    model: Any = three_blocks()
    model.ignored = nn.Linear(1, 1)
    fully_shard(model, ignored_params=set(model.ignored.parameters()))
    model.ignored.requires_grad_(dist.get_rank() == 1)
    optimizer = AdamW([one for one in model.parameters() if one.requires_grad], max_norm=1.0)
    squared(model, dist.get_rank(), 0).backward()
    if dist.get_rank() == 1:
        model.ignored.weight.grad = torch.full((1, 1), 100.0)
    norms: list[Any] = [None] * 2
    dist.all_gather_object(norms, clip_grad_norm_(model, math.inf).item())
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert [*norms, optimizer.grad_norm.item()] == pytest.approx([100.0] * 3, rel=1e-2)


def test_a_policy_that_does_not_exist_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="fix: give one of 'ignore', 'skip', 'raise'"):
        AdamW(model.parameters(), nonfinite="stop")
    with pytest.raises(ConfigError, match="fix: give one of 'ignore', 'skip', 'raise'"):
        check_gradients(model, torch.tensor(1.0), "stop")
    assert check_gradients(model, torch.tensor(math.nan), "ignore")
