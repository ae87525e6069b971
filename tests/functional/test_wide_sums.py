"""16 bits on the wire, sums in FP32: ``accumulate_dtype`` sends as little and rounds as FP32 does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import CollectiveCall, Flat, memory_meter, observe_collectives
from megatron_fsdp import ConfigError, MixedPrecisionPolicy, Placements, explain, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.models import make_mesh

NARROW = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
WIDE = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, accumulate_dtype=torch.float32)
LAYOUTS = {"optim_grads": (3,), "optim_grads_params": (4,), "hsdp": (2, 2), "hfsdp": (2, 2)}


class Scaled(nn.Module):
    """Its gradients are its inputs, which bf16 holds without an error; two dtypes, so two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(37, 11))
        self.other = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + (self.other * y).sum()


def sharded(strategy: str, mesh: tuple[int, ...], policy: MixedPrecisionPolicy) -> Scaled:
    model = Scaled()
    axes = (0, 1) if len(mesh) == 2 else (0,)
    fully_shard(model, make_mesh(mesh), getattr(Placements, strategy)(*axes), mp_policy=policy)
    return model


def drawn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(37, 11, generator=generator), torch.randn(5, 3, generator=generator)
    return x.bfloat16().float(), y.bfloat16().double()


def errors(strategy: str, mesh: tuple[int, ...], policy: MixedPrecisionPolicy, microbatches: int) -> list[float]:
    """Return the relative errors of both gradients after some microbatches."""
    model = sharded(strategy, mesh, policy)
    for _ in range(microbatches):
        model(*drawn(dist.get_rank())).backward()
    found = []
    for index, parameter in enumerate(model.parameters()):
        assert isinstance(parameter.grad, DTensor)
        size = dist.get_world_size()
        wanted = microbatches * sum(drawn(rank)[index].double() for rank in range(size)) / size
        assert isinstance(wanted, torch.Tensor)
        found.append(float((parameter.grad.full_tensor().double() - wanted).norm() / wanted.norm()))
    return found


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_sums_over_ranks_are_rounded_as_fp32_ones_under(strategy: str, microbatches: int) -> None:
    mesh = LAYOUTS[strategy]
    for wide in run_ranks(torch.Size(mesh).numel(), errors, strategy, mesh, WIDE, microbatches):
        assert max(wide) < 2e-7
    if mesh != (2, 2):
        # With two terms of 8 bits a sum has 9, which are few to lose; three and four lose more.
        for narrow in run_ranks(torch.Size(mesh).numel(), errors, strategy, mesh, NARROW, microbatches):
            assert max(narrow) > 1e-3


def sizes(policy: MixedPrecisionPolicy) -> list[tuple[str, int]]:
    model = sharded("optim_grads_params", (3,), policy)
    calls: list[CollectiveCall] = []
    with observe_collectives(calls.append):
        model(*drawn(dist.get_rank())).backward()
    return [(call.kind, call.num_bytes) for call in calls]


def test_as_many_bytes_travel_in_as_many_collectives() -> None:
    assert run_ranks(3, sizes, WIDE) == run_ranks(3, sizes, NARROW)


@pytest.mark.parametrize("slots", [None, "by_size"])
@on_ranks(2)
def test_the_second_buffer_is_what_explain_says(slots: str | None) -> None:
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    model = nn.Sequential(*layers)
    policy = MixedPrecisionPolicy(torch.float32, torch.bfloat16, accumulate_dtype=torch.float32)
    for module in (*layers, model):
        fully_shard(module, mp_policy=policy)
    meter = memory_meter()
    before = held = 0
    model.set_slot_pool(slots)
    for _ in range(3):
        before = meter.current_bytes
        loss = model(torch.randn(2, 64)).sum()
        meter.reset_peak()
        loss.backward()
        held = meter.peak_bytes
        model.zero_grad()
    report = explain(model)
    whole = held - before + (report.slot_bytes if slots else 0)
    held = whole
    predicted = report.backward_peak.num_bytes
    left = meter.current_bytes - before
    assert (held, left) == (predicted, 0)


@on_ranks(2)
def test_what_it_cannot_do_is_refused_by_name() -> None:
    messages = []
    both = Placements((0, 1), (Flat(), Flat()), (Flat(), Flat()), (Flat(), Flat()))
    try:
        fully_shard(Scaled(), make_mesh((2, 1)), both, mp_policy=WIDE)
    except ConfigError as error:
        messages.append(str(error))
    model = sharded("optim_grads_params", (2,), WIDE)
    try:
        model.set_custom_reduce_scatter(lambda *_: None)
    except ConfigError as error:
        messages.append(str(error))
    two_axes, function = messages
    assert "accumulate_dtype=torch.float32" in two_axes
    assert "exactly one axis" in two_axes
    assert "unit 'Scaled': a custom reduce-scatter adds up by itself" in function
