"""Weights that travel in 8 bits have the values that the published formulas give, on any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import Row, memory_meter, observe_collectives
from megatron_fsdp import AdamW, FsdpModule, MixedPrecisionPolicy, Placements, explain, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.oracle import whole


class Net(nn.Module):
    """Matrices that blocks of 32 divide, one that they do not, an expert weight, and biases, which travel whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 64, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 64, 32) * 0.1)
        self.last = nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.last(torch.einsum("bi,eij->bj", x, self.experts))


@dataclass(frozen=True)
class Job:
    """How to gather, units besides the root, whether on two axes, whether rows may be cut anywhere."""

    gather: str | None
    units: tuple[str, ...] = ()
    is_hybrid: bool = False
    cuts_rows: bool = False
    dtype: torch.dtype | None = None

    def build(self) -> FsdpModule:
        torch.manual_seed(0)
        model = Net()
        sizes = (2, dist.get_world_size() // 2) if self.is_hybrid else (dist.get_world_size(),)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
        placements = Placements.hsdp(0, 1) if self.is_hybrid else Placements.optim_grads_params(0)
        options: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(self.dtype, gather_dtype=self.gather),
            "granularity": Row() if self.cuts_rows else None,
            "reshard_after_forward": True,
        }
        for name in self.units:
            fully_shard(getattr(model, name), mesh, placements, **options)
        sharded = fully_shard(model, mesh, placements, **options)
        for module in model.modules():
            if isinstance(module, FsdpModule):
                module.set_gradient_divide_factor(1)
        return sharded


def backward(model: nn.Module, step: int) -> float:
    """Only rank 0 has gradients other than zero, so every sum over ranks is exact: its own."""
    torch.manual_seed(step)
    loss = model(torch.randn(5, 64)).square().mean()
    (loss * (dist.get_rank() == 0)).backward()
    return float(loss.detach())


def train(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = job.build()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: whole(p, p).detach().clone() for name, p in model.named_parameters()}


def used_weights(job: Job) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return main weights, and what compute sees in forward and in backward."""
    model = job.build()
    main = {name: whole(p, p).detach().clone() for name, p in model.named_parameters()}
    seen: list[dict[str, torch.Tensor]] = [{}, {}]

    def note(grid: int) -> None:
        seen[grid].update({name: p.detach().clone() for name, p in model.named_parameters()})

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            note(0)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            note(1)
            return gradient

    forward = Net.forward
    try:
        Net.forward = lambda self, x: Probe.apply(forward(self, x))
        model(torch.randn(3, 64)).sum().backward()
    finally:
        Net.forward = forward
    return main, seen[0], seen[1]


def traffic(job: Job) -> tuple[list[str], list[str], int, int]:
    """Return the collectives of one step as observed and as ``explain`` says, and the bytes at rest by both."""
    before = memory_meter().current_bytes
    model = job.build()
    rest = memory_meter().current_bytes - before
    optimizer = AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    calls: list[str] = []
    with observe_collectives(lambda call: calls.append(f"{call.kind} {call.num_bytes}")):
        backward(model, 1)
        optimizer.step()
    report: Any = explain(model)
    said = [f"{each.kind} {each.num_bytes // each.count}" for each in report.collectives for _ in range(each.count)]
    return sorted(calls), sorted(said), rest, report.persistent_bytes


@pytest.mark.parametrize("gather", ["fp8", "mxfp8", "int8_block"])
def test_any_ranks_and_units_train_to_the_same_bits(gather: str) -> None:
    ((losses, weights),) = run_ranks(1, train, Job(gather))
    others = [
        (3, Job(gather, ("second", "first"))),
        # Cut anywhere between rows, also inside of MXFP8's blocks of 32 rows.
        (4, Job(gather, ("first",), is_hybrid=True, cuts_rows=True)),
        (4, Job(gather, cuts_rows=True)),
    ]
    for num_ranks, job in others:
        for found, found_weights in run_ranks(num_ranks, train, job):
            assert found == losses
            assert all(torch.equal(found_weights[name], weight) for name, weight in weights.items())


def e4m3(value: float) -> float:
    """Round one number to E4M3, to nearest even and saturated, from the format's definition."""
    magnitude = min(abs(value), 448.0)
    if magnitude == 0:
        return 0.0
    exponent = max(math.floor(math.log2(magnitude)), -6)
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(magnitude / step) * step, 448.0), value)


def in_blocks(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """OCP MX: blocks of rows x columns share the power of two floor(log2(largest)) - 8."""
    found = torch.empty_like(matrix)
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], columns):
            block = matrix[top : top + rows, left : left + columns]
            scale = 2.0 ** (math.floor(math.log2(float(block.abs().max()))) - 8)
            values = [e4m3(value / scale) * scale for value in block.flatten().tolist()]
            found[top : top + rows, left : left + columns] = torch.tensor(values).view_as(block)
    return found


def as_published(weight: torch.Tensor, gather: str, *, is_backward: bool) -> torch.Tensor:
    if gather == "fp8":
        scale = torch.tensor(448.0) / weight.abs().max()
        values = [e4m3(value) for value in (weight * scale).flatten().tolist()]
        return torch.tensor(values).view_as(weight) / scale
    if gather == "mxfp8":
        if weight.shape[-1] % 32 or weight.shape[-2] % 32:
            return weight
        flat = weight.reshape(-1, weight.shape[-1])
        return in_blocks(flat, *((32, 1) if is_backward else (1, 32))).view_as(weight)
    flat = weight.flatten()
    parts = []
    for start in range(0, len(flat), 256):
        block = flat[start : start + 256]
        scale = block.abs().max() / 127.0
        parts.append(torch.tensor([float(round(value)) for value in (block / scale).tolist()]) * scale)
    return torch.cat(parts).view_as(weight)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gather", ["fp8", "mxfp8", "int8_block"])
@on_ranks(3)
def test_compute_sees_what_the_published_formulas_give(gather: str, dtype: torch.dtype | None) -> None:
    main, *seen = used_weights(Job(gather, cuts_rows=True, dtype=dtype))
    for name, weight in main.items():
        for grid, found in enumerate(seen):
            wanted = weight if weight.ndim < 2 else as_published(weight, gather, is_backward=grid == 1)
            assert torch.equal(found[name], wanted if dtype is None else wanted.to(dtype)), (name, grid)


@pytest.mark.parametrize("gather", ["fp8", "mxfp8", "int8_block"])
@on_ranks(2)
def test_a_gather_takes_a_byte_and_scales_per_element_as_explain_says(gather: str) -> None:
    calls, said, rest, said_rest = traffic(Job(gather, dtype=torch.bfloat16))
    assert (calls, rest) == (said, said_rest)
    largest = max(int(call.split()[1]) for call in calls if call.startswith("all_gather"))
    parameters = list(Net().parameters())
    packed = [p for p in parameters if p.ndim > 1 and not (gather == "mxfp8" and p.shape[-1] % 32)]
    numel = sum(p.numel() for p in packed)
    # The others travel with them, in bf16, in shards that begin at multiples of 16 bytes.
    others = 2 * sum(p.numel() for p in parameters if not any(p is one for one in packed))
    assert numel <= largest - others <= 1.035 * numel + 2 * 16 * len(parameters)


@pytest.mark.parametrize(("gather", "wanted"), [("fp8", 1), ("mxfp8", 1), ("int8_block", 0)])
@on_ranks(3)
def test_magnitudes_of_all_units_travel_in_one_all_reduce_a_step(gather: str, wanted: int) -> None:
    calls, said, *_ = traffic(Job(gather, ("first", "second"), cuts_rows=True, dtype=torch.bfloat16))
    assert calls == said
    assert sum(call.startswith("all_reduce") for call in calls) == wanted


@on_ranks(2)
def test_magnitudes_are_asked_for_again_by_who_changed_since_and_in_every_evaluation() -> None:
    model = Job("fp8", ("first", "second")).build()
    used: list[torch.Tensor] = []

    def change(*_: Any) -> None:
        with torch.no_grad():
            model.second.weight.mul_(4.0)

    model.second.register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
    calls: list[str] = []
    counts = []
    with observe_collectives(lambda call: calls.append(call.kind)):
        for is_changed in (False, True):
            hook = model.first.register_forward_pre_hook(change) if is_changed else None
            for is_training in (True, False):
                before = calls.count("all_reduce")
                with torch.set_grad_enabled(is_training):
                    model(torch.randn(3, 64))
                counts.append(calls.count("all_reduce") - before)
            if hook is not None:
                hook.remove()
    assert counts == [1, 1, 1, 2]
    # A power of two: each as good as the first.
    for times, weight in zip((1, 1, 4, 16), used, strict=True):
        assert torch.equal(weight, used[0] * times)


@on_ranks(2)
def test_weights_that_rest_whole_are_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match=r"gather_dtype='fp8'.*needs weights that rest sharded.*optim_grads_params"):
        fully_shard(Net(), placements=Placements.optim(), mp_policy=MixedPrecisionPolicy(gather_dtype="fp8"))
