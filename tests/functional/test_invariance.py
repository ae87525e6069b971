"""The same bits on any number of ranks: ``MixedPrecisionPolicy(reduction="invariant")``."""

import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import (
    MixedPrecisionPolicy,
    Placements,
    StateError,
    clip_grad_norm_,
    fully_shard,
    microbatch,
    no_sync,
)
from megatron_fsdp.optim.exact_norm import exact_norm
from megatron_fsdp.runtime.grads.invariant_reduction import BinaryCounter
from tests.harness import RankError, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import make_mesh
from tests.harness.oracle import units_of, whole

NUM_MICROBATCHES, NUM_STEPS = 12, 20
WIRES = {"fp32": None, "bf16": torch.bfloat16}


class Odd(nn.Module):
    """Layers of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 13)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(13, 31), nn.GELU(), nn.Linear(31, 13)) for _ in range(2))
        self.norm = nn.LayerNorm(13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) @ self.embedding.weight.T


@dataclass(frozen=True, slots=True)
class Run:
    """How a model is trained: on which mesh, by which strategy, with what on the wire."""

    mesh: tuple[int, ...]
    strategy: str = "optim_grads_params"
    wire: str = "fp32"
    num_steps: int = NUM_STEPS


def loss_of(model: nn.Module, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + number)
    tokens = torch.randint(0, 29, (3, 8), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sharded(run: Run) -> nn.Module:
    torch.manual_seed(7)
    model = Odd()
    axes = (0, 1) if len(run.mesh) == 2 else (0,)
    policy = MixedPrecisionPolicy(reduce_dtype=WIRES[run.wire], reduction="invariant")
    for part in (*model.layers, model):
        fully_shard(part, make_mesh(run.mesh), getattr(Placements, run.strategy)(*axes), mp_policy=policy)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(NUM_MICROBATCHES)
    return model


def accumulate(model: nn.Module, step: int) -> None:
    """Run this rank's microbatches of a step: backward t of rank r is number t * W + r."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rounds = NUM_MICROBATCHES // size
    for turn in range(rounds):
        with microbatch(model, is_last=turn == rounds - 1):
            loss_of(model, step, turn * size + rank).backward()


def wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter, **optimizer.state[parameter]}.items():
            found[f"{name}.{key}"] = whole(value, value).detach().clone()
    return found


def trained(run: Run) -> dict[str, torch.Tensor]:
    model = sharded(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for step in range(run.num_steps):
        accumulate(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model, optimizer)


def clipped(run: Run) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], float]:
    """Return the norms of all steps, the model, and the norm of the first gradients from their exact sum of squares."""
    model = sharded(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    norms, wanted = [], 0.0
    for step in range(run.num_steps):
        accumulate(model, step)
        if step == 0:
            wholes_of = [whole(parameter.grad, parameter) for parameter in model.parameters()]
            wanted = math.sqrt(math.fsum(value**2 for each in wholes_of for value in each.flatten().tolist()))
        norms.append(clip_grad_norm_(model, 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return norms, wholes(model, optimizer), wanted


CLIPPED = [Run((3,)), Run((2, 2), "hsdp"), Run((4,), "optim"), Run((2,)), Run((4,), "no_shard"), Run((2, 2), "hfsdp")]
# By day those of the first three, and fewer steps.
DAY_AND_NIGHT = pytest.mark.parametrize("runs", nightly_but([3], [3, 6]))


@DAY_AND_NIGHT
def test_norms_and_what_they_clip_are_those_of_one_rank_to_the_last_bit(runs: int) -> None:
    num_steps = Run((1,)).num_steps if runs == 6 else 6
    norms, wanted, exact = run_ranks(1, clipped, Run((1,), num_steps=num_steps))[0]
    assert norms[0].item() == torch.tensor(exact).item()
    assert norms[0] > 0.1
    for run in CLIPPED[:runs]:
        for found, values, _ in run_ranks(torch.Size(run.mesh).numel(), clipped, replace(run, num_steps=num_steps)):
            assert torch.equal(torch.stack(found), torch.stack(norms)), run
            assert_equal(values, wanted)


def clipped_by_torch(run: Run) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = sharded(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    norms = []
    for step in range(run.num_steps):
        accumulate(model, step)
        each = [torch.linalg.vector_norm(parameter.grad) for parameter in model.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=None if step % 2 else False)
        norms += [whole(value, value).clone() for value in [norm, *each]]
        optimizer.step()
        optimizer.zero_grad()
    return norms, wholes(model, optimizer)


@DAY_AND_NIGHT
def test_the_norm_that_pytorch_clips_by_is_that_of_one_rank_to_the_last_bit(runs: int) -> None:
    norms, wanted = run_ranks(1, clipped_by_torch, Run((1,), num_steps=4))[0]
    assert norms[0] > 0.1
    for run in CLIPPED[:runs]:
        for found, values in run_ranks(torch.Size(run.mesh).numel(), clipped_by_torch, replace(run, num_steps=4)):
            assert torch.equal(torch.stack(found), torch.stack(norms)), run
            assert_equal(values, wanted)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_says_which(bad: float) -> None:
    found = exact_norm([([], [torch.tensor([1.0, bad, -2.0]), torch.zeros(0)])], 2.0, torch.device("cpu"))
    assert torch.equal(found, torch.tensor(bad)) or (math.isnan(bad) and bool(found.isnan()))


def counted(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the binary counter's order, said another way: powers of two, halves first."""
    if len(leaves) == 1:
        return leaves[0]
    block = 1 << (len(leaves).bit_length() - 1)
    if block == len(leaves):
        return counted(leaves[: block // 2]) + counted(leaves[block // 2 :])
    return counted(leaves[:block]) + counted(leaves[block:])


@functools.cache
def trained_plainly(wire: str) -> dict[str, torch.Tensor]:
    """Train without the engine, each microbatch's gradients for themselves."""
    torch.manual_seed(7)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for step in range(NUM_STEPS):
        leaves: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
        for number in range(NUM_MICROBATCHES):
            loss_of(model, step, number).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                leaves[name].append(parameter.grad.to(WIRES[wire] or torch.float32).float())
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = counted(leaves[name]) * (1 / NUM_MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model, optimizer)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []


SIZES = [(size, wire) for size in (1, 2, 3, 4) for wire in WIRES]


@pytest.mark.parametrize(("size", "wire"), nightly_but([SIZES[2], SIZES[4], SIZES[5], SIZES[7]], SIZES))
def test_weights_and_moments_are_those_of_one_process_to_the_last_bit(size: int, wire: str) -> None:
    wanted = trained_plainly(wire)
    for found in run_ranks(size, trained, Run((size,), wire=wire)):
        assert_equal(found, wanted)


TWO_AXES = [Run(mesh, strategy) for strategy in ("hsdp", "hfsdp") for mesh in ((2, 2), (1, 4), (4, 1))]


RUNS = [
    (run, wire)
    for run in (Run((3,), "no_shard"), Run((4,), "optim"), Run((3,), "optim_grads"), *TWO_AXES)
    for wire in WIRES
]


# Each strategy with one dtype on the wire, by turns.
@pytest.mark.parametrize(("run", "wire"), nightly_but([*RUNS[:6:3], *RUNS[4:7:2], RUNS[13]], RUNS))
def test_every_strategy_has_them(run: Run, wire: str) -> None:
    wanted = trained_plainly(wire)
    for found in run_ranks(torch.Size(run.mesh).numel(), trained, Run(run.mesh, run.strategy, wire)):
        assert_equal(found, wanted)


def trained_with_gradients_taken(run: Run) -> dict[str, torch.Tensor]:
    model = sharded(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    taken = []
    for step in range(run.num_steps):
        accumulate(model, step)
        optimizer.step()
        # Of the unit whose gradients are reduced first.
        taken.append(dict(model.named_parameters())["layers.1.2.weight"].grad)
        optimizer.zero_grad()
    return wholes(model, optimizer)


def test_gradients_that_somebody_keeps_change_no_bit() -> None:
    wanted = trained_plainly("fp32")
    for found in run_ranks(2, trained_with_gradients_taken, Run((2,))):
        assert_equal(found, wanted)


def trained_without_sync() -> None:
    model = sharded(Run((2,)))
    with no_sync(model):
        loss_of(model, 0, 0).backward()


def trained_undivided() -> None:
    model = nn.Linear(3, 3)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduction="invariant"))
    model(torch.ones(3)).sum().backward()


def trained_with_a_change() -> None:
    model = sharded(Run((2,)))
    loss_of(model, 0, 0).backward()
    next(model.parameters()).grad = None
    loss_of(model, 0, 1).backward()


def hooked() -> None:
    units_of(sharded(Run((2,))))[0].set_all_reduce_hook(torch.Tensor.zero_)


def test_a_hook_on_sums_is_refused_by_name() -> None:
    with pytest.raises(RankError, match="a hook on reduced gradients have an order"):
        run_ranks(2, hooked)


def stepped_by_the_fused_kernel() -> None:
    model = sharded(Run((2,)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accumulate(model, 0)
    optimizer.step()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (trained_without_sync, "adds up microbatches on a rank before others' are seen"),
        (trained_undivided, "call set_gradient_divide_factor"),
        (stepped_by_the_fused_kernel, r"AdamW\(fused=True\) on CPU"),
        (trained_with_a_change, "dropped, between two microbatches"),
    ],
)
def test_what_would_cost_the_order_is_refused_by_name(function: object, words: str) -> None:
    assert callable(function)
    with pytest.raises(RankError, match=words) as found:
        run_ranks(2, function)
    assert StateError.__name__ in str(found.value)


def test_zeros_that_nobody_packed_count_as_positive_ones() -> None:
    counters = [BinaryCounter(torch.float32) for _ in range(2)]
    for leaf in (torch.tensor([-0.0]), None, torch.tensor([-0.0])):
        counters[0].push(leaf)
        counters[1].push(torch.zeros(1) if leaf is None else leaf)
    assert [written(counter).signbit().item() for counter in counters] == [False, False]
    counters[0].clear()
    counters[0].push(torch.tensor([-0.0]))
    assert written(counters[0]).signbit().item()


def written(counter: BinaryCounter) -> torch.Tensor:
    total = torch.empty(1)
    counter.write(total, 0.5)
    return total
