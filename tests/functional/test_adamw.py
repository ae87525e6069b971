"""The flat AdamW takes the steps of ``torch.optim.AdamW``, on any strategy, and shows the same state."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, fully_shard_optimizer
from megatron_fsdp.optim.adamw import AdamW
from tests.functional.adamw_comparison import differing_state, groups_of, torch_adamw, two_groups
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import (
    WIDTH,
    Block,
    Model,
    Stack,
    draw_tokens,
    inputs,
    loss_of,
    make_mesh,
    make_model,
    world_mesh,
)
from tests.harness.oracle import differing, shard_model, train, whole, whole_state

BF16, FP32 = torch.bfloat16, torch.float32
State: TypeAlias = dict[str, Any]
Make: TypeAlias = Callable[..., torch.optim.Optimizer]

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16 compute": MixedPrecisionPolicy(BF16, FP32),
    "bf16 gradients": MixedPrecisionPolicy(BF16, main_grads_dtype=BF16),
}
LAYOUTS = [
    ("optim_grads_params", (1,)), ("optim_grads_params", (3,)), ("optim_grads", (2,)), ("optim", (3,)),
    ("no_shard", (2,)), ("hsdp", (2, 2)), ("hfsdp", (2, 2)),
]  # fmt: skip


def run_with(make: Make, strategy: str, mesh: tuple[int, ...], policy: str) -> tuple[Model, torch.optim.Optimizer]:
    """Train with two param groups and a schedule that changes both rates in every step."""
    model = shard_model(make_model(), make_mesh(mesh), strategy, POLICIES[policy])
    optimizer = make(two_groups(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(4):
        train(model, optimizer, range(step, step + 1), [dist.get_rank()])
        schedule.step()
    return model, optimizer


@pytest.mark.parametrize(("strategy", "mesh"), nightly_but([LAYOUTS[1], LAYOUTS[4]], LAYOUTS), ids=str)
@on_ranks(lambda mesh: torch.Size(mesh).numel())
def test_weights_state_and_state_dict_equal_those_of_torch_to_the_bit_in_every_precision(
    strategy: str, mesh: tuple[int, ...]
) -> None:
    wrong = {}
    for policy in POLICIES:
        model, optimizer = run_with(AdamW, strategy, mesh, policy)
        other, oracle = run_with(torch_adamw, strategy, mesh, policy)
        wrong[policy] = differing(whole_state(model), whole_state(other)) + differing_state(optimizer, oracle)
    assert wrong == {name: [] for name in POLICIES}


@on_ranks(2)
def test_fully_shard_optimizer_on_top_of_it_changes_nothing() -> None:
    found = []
    for wrap in (lambda optimizer: optimizer, fully_shard_optimizer):
        model = shard_model(make_model(), world_mesh(), policy=POLICIES["bf16 gradients"])
        train(model, wrap(AdamW(two_groups(model), lr=0.01)), range(3), [dist.get_rank()])
        found.append(whole_state(model))
    assert differing(*found) == []


def train_sharded() -> State:
    model = shard_model(make_model(), world_mesh())
    train(model, AdamW(two_groups(model), lr=0.01), range(5), [dist.get_rank()])
    return whole_state(model)


def test_a_sharded_run_equals_the_whole_model_with_torchs_adamw() -> None:
    model = make_model()
    train(model, torch.optim.AdamW(two_groups(model), lr=0.01), range(5), range(3))
    for found in run_ranks(3, train_sharded):
        assert differing(found, model.state_dict(), 1e-5) == []


class Weight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.parametrize("weights", [FP32, BF16], ids=str)
@pytest.mark.parametrize("moments", [FP32, BF16], ids=str)
@on_ranks(2)
def test_16_bit_weights_and_moments_are_rounded_once_a_step(weights: torch.dtype, moments: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Weight(weights)
    weight = model.weight.detach().double()
    exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.1, moments_dtype=moments)
    for step in range(1, 4):
        x = [inputs(rank, step, 5, WIDTH).to(weights) for rank in range(dist.get_world_size())]
        model(x[dist.get_rank()]).sum().backward()
        gradient = whole(model.weight.grad, model.weight).double()
        optimizer.step()
        optimizer.zero_grad()
        exp_avg = 0.9 * exp_avg + 0.1 * gradient
        exp_avg_sq = 0.999 * exp_avg_sq + 0.001 * gradient.square()
        size = exp_avg / (1 - 0.9**step) / ((exp_avg_sq / (1 - 0.999**step)).sqrt() + 1e-8)
        weight = (weight * (1 - 0.05 * 0.1) - 0.05 * size).to(weights).double()
        exp_avg, exp_avg_sq = exp_avg.to(moments).double(), exp_avg_sq.to(moments).double()
    state = optimizer.state[model.weight]
    pairs = [(model.weight, weight), (state["exp_avg"], exp_avg), (state["exp_avg_sq"], exp_avg_sq)]
    results = [
        (found.dtype, float(((whole(found, found) - wanted) / wanted.abs().clamp(min=1e-3)).abs().max()))
        for found, wanted in pairs
    ]
    assert [dtype for dtype, _ in results] == [weights, moments, moments]
    for dtype, error in results:
        # A value close to a tie may go either way, as the oracle's own arithmetic is not fp32.
        assert error <= (2**-7 if BF16 in (dtype, weights, moments) else 1e-5)


@pytest.mark.parametrize("strategy", ["optim_grads", "optim", "no_shard"])
@on_ranks(2)
def test_compute_weights_at_rest_are_those_just_stepped_before_any_forward(strategy: str) -> None:
    model = shard_model(make_model(), world_mesh(), strategy, POLICIES["bf16 compute"])
    before = whole_state(model)
    train(model, AdamW(two_groups(model), lr=0.1), range(1), [dist.get_rank()])
    assert len(differing(whole_state(model), before, 0.01)) > 10
    is_stale = [
        not torch.equal(
            group.model_weight.slice_view(group.main_weight.placements).local_buffer,
            group.main_weight.local_buffer.bfloat16(),
        )
        for group in groups_of(model)
        if group.requires_grad
    ]
    assert is_stale == [False] * len(is_stale)
    assert len(is_stale) == 3


def clip_and_step(strategy: str, mesh: tuple[int, ...], fused: bool) -> tuple[list[float], list[float], State]:
    """Return the norms of four steps, how much gradients moved while they were applied, and the weights."""
    torch.manual_seed(0)
    model = shard_model(make_model(), make_mesh(mesh), strategy)
    outside = nn.Linear(WIDTH, WIDTH)
    optimizer = AdamW([*two_groups(model), {"params": outside.parameters()}], lr=0.05)
    norms, moved = [], []
    for step in range(4):
        tokens = draw_tokens(dist.get_rank(), step)
        loss_of(model(tokens), tokens).backward()
        outside(inputs(0, step)).square().mean().backward()
        # Between the smallest and the largest norm, so that some steps are clipped and others are not.
        if fused:
            before = [whole(p.grad, p) for p in model.parameters()]
            optimizer.step(max_norm=0.5)
            moved.append(
                max(float((whole(p.grad, p) - g).abs().max()) for p, g in zip(model.parameters(), before, strict=True))
            )
            norms.append(optimizer.grad_norm.item())
        else:
            norms.append(clip_grad_norm_(nn.ModuleList([model, outside]), 0.5).item())
            optimizer.step()
        optimizer.zero_grad()
    return norms, moved, whole_state(model) | {f"outside.{k}": v for k, v in whole_state(outside).items()}


CLIPPED = [("optim_grads_params", (3,)), ("optim", (2,)), ("hsdp", (2, 2))]


@pytest.mark.parametrize(("strategy", "mesh"), nightly_but(CLIPPED[1:], CLIPPED), ids=str)
def test_clipping_inside_the_step_equals_clip_grad_norm_before_it(strategy: str, mesh: tuple[int, ...]) -> None:
    num_ranks = torch.Size(mesh).numel()
    fused = run_ranks(num_ranks, clip_and_step, strategy, mesh, True)
    apart = run_ranks(num_ranks, clip_and_step, strategy, mesh, False)
    assert any(norm > 0.55 for norm in apart[0][0])
    for (norms, moved, weights), (wanted_norms, _, wanted) in zip(fused, apart, strict=True):
        assert norms == fused[0][0]
        assert norms == pytest.approx(wanted_norms, rel=1e-6)
        assert moved == [0.0] * 4
        assert differing(weights, wanted, 2e-6) == []


@on_ranks(2)
def test_the_norm_is_that_of_the_optimizers_own_parameters() -> None:
    model = shard_model(make_model(), world_mesh())
    tokens = draw_tokens(dist.get_rank())
    loss_of(model(tokens), tokens).backward()
    optimizer = AdamW([p for p in model.parameters() if p.ndim > 1], lr=0.1, max_norm=float("inf"))
    optimizer.step()
    assert optimizer.grad_norm is not None
    wanted = sum(float(whole(p.grad, p).square().sum()) for p in model.parameters() if p.ndim > 1) ** 0.5
    found = optimizer.grad_norm.item()
    assert found == pytest.approx(wanted, rel=1e-6)


def where_state_lies() -> tuple[bool, bool, int]:
    """Tell whether moments follow each other in one buffer, whether a change of them counts, and their bytes a rank."""
    torch.manual_seed(0)
    model = Stack(Block(), Block(hidden=5))
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(inputs(dist.get_rank(), 0)).square().mean().backward()
    optimizer.step()
    locals_ = [optimizer.state[p]["exp_avg"].to_local() for p in model.parameters()]
    held = [local for local in locals_ if local.numel()]
    span = max(t.data_ptr() + t.nbytes for t in held) - min(t.data_ptr() for t in held)
    before = whole_state(model)
    with torch.no_grad():
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].fill_(1e6)
    optimizer.step()
    moved = min(float((whole_state(model)[name] - value).abs().min()) for name, value in before.items())
    (group,) = groups_of(model)
    return span <= group.main_weight.nbytes, moved > 1.0, sum(local.nbytes for local in held)


def test_moments_are_parts_of_one_buffer_and_what_is_written_into_them_counts() -> None:
    num_elements = sum(p.numel() for p in Stack(Block(), Block(hidden=5)).parameters())
    results = run_ranks(3, where_state_lies)
    assert [(is_one, counts) for is_one, counts, _ in results] == [(True, True)] * 3
    assert sum(num_bytes for _, _, num_bytes in results) == 4 * num_elements
