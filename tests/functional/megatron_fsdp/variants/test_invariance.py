"""``MixedPrecisionPolicy(reduction="invariant")``: the plain loop's bits on any number of ranks, signs of zeros too."""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dbuffer import CollectiveCall, memory_meter, observe_collectives
from megatron_fsdp import (
    ConfigError,
    MixedPrecisionPolicy,
    StateError,
    explain,
    fully_shard,
    join,
    no_sync,
)
from megatron_fsdp.optim.exact_norm import exact_norm
from megatron_fsdp.variants.invariant_reduction import InvariantReduction
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Headed, RaisesInBackward, make_mesh, squared, three_blocks
from tests.harness.oracle import sharded, units_of, whole
from tests.harness.twins import Twins

NUM_MICROBATCHES, NUM_STEPS = 12, 2
WIDTH = 5
WIRES = {"fp32": None, "bf16": torch.bfloat16}


def counted(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the binary counter's order, computed in another way: by powers of two, halves first."""
    if len(leaves) == 1:
        return leaves[0]
    block = 1 << (len(leaves).bit_length() - 1)
    if block == len(leaves):
        return counted(leaves[: block // 2]) + counted(leaves[block // 2 :])
    return counted(leaves[:block]) + counted(leaves[block:])


class MinusZero(torch.autograd.Function):
    """Zero, with a gradient of -0.0."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, -0.0)


class Block(nn.Module):
    """A layer of odd sizes, and a gain of one element, which most ranks have no part of."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(
        self, x: torch.Tensor, *, uses_spare: bool = False, skips: bool = False, is_zero: bool = False
    ) -> torch.Tensor:
        if skips:
            return x
        if is_zero:
            return x + MinusZero.apply(self.gain)
        y: torch.Tensor = x + self.gain * self.down(torch.tanh(self.up(x)))
        return y + self.spare(y) if uses_spare else y


class Net(nn.Module):
    """An entry whose weight is the head's too, and three blocks."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.entry.weight
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(3))
        # The weight of a unit outside the loss.
        self.idle = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, call: Callable[..., torch.Tensor], number: int) -> torch.Tensor:
        x = self.entry(x)
        for index, block in enumerate(self.blocks):
            x = call(block, x, number, index)
        return self.head(x)


def plainly(block: nn.Module, x: torch.Tensor, number: int, index: int) -> torch.Tensor:
    return block(x)


def block_left_out(block: nn.Module, x: torch.Tensor, number: int, index: int) -> torch.Tensor:
    """Skip the middle block in microbatches 0, 1, 4, 5, ..., and the last block after the sixth microbatch."""
    result: torch.Tensor = block(x, skips=(index == 1 and number % 4 in (0, 1)) or (index == 2 and number > 5))
    return result


def layer_left_out(block: nn.Module, x: torch.Tensor, number: int, index: int) -> torch.Tensor:
    return block(x, uses_spare=number % 3 == index)


def negative_zeros(block: nn.Module, x: torch.Tensor, number: int, index: int) -> torch.Tensor:
    """Gains have gradients of -0.0, that of the middle block in every third microbatch alone."""
    result: torch.Tensor = block(x, is_zero=True, skips=index == 1 and number % 3 != 0)
    return result


def recomputed(block: nn.Module, x: torch.Tensor, number: int, index: int) -> torch.Tensor:
    result: torch.Tensor = checkpoint(block, x, use_reentrant=index == 1)
    return result


USES = {use.__name__: use for use in (plainly, block_left_out, layer_left_out, negative_zeros, recomputed)}


@dataclass(frozen=True, slots=True)
class Run:
    """A kind of training on a mesh, with a strategy and a reduce dtype.

    Attributes:
        use: of ``USES``. what: "", "frozen", "fused", "broken" (a backward raises, and the step begins again), "taken"
            (the caller keeps gradients), "attacked" (every microbatch also takes the gradient of an input) or "wide"
            (matrices are large enough for 8-bit moments).
    """

    use: str = "plainly"
    what: str = ""
    mesh: tuple[int, ...] = (1,)
    strategy: str = "optim_grads_params"
    wire: str = "fp32"


def loss_of(model: nn.Module, run: Run, step: int, number: int) -> torch.Tensor:
    """Return a sum over some samples, as many as the microbatch's number."""
    x = torch.randn(1 + number % 4, WIDTH, generator=torch.Generator().manual_seed(100 * step + number))
    output: torch.Tensor = model(x, USES[run.use], number)
    return output.square().sum()


def made(run: Run) -> Net:
    torch.manual_seed(3)
    model = Net(901) if run.what == "wide" else Net()
    if run.what == "frozen":
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.bias.requires_grad_(False)
        model.entry.bias.requires_grad_(False)
    return model


def plain(run: Run) -> list[dict[str, torch.Tensor]]:
    model = made(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    found = []
    for step in range(NUM_STEPS):
        leaves: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
        used = set()
        for number in range(NUM_MICROBATCHES):
            loss_of(model, run, step, number).backward()
            for name, parameter in model.named_parameters():
                used |= set() if parameter.grad is None else {name}
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                leaves[name].append(gradient.to(WIRES[run.wire] or torch.float32).float())
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = counted(leaves[name]) * (1 / NUM_MICROBATCHES) if name in used else None
        found.append(state(model, optimizer))
    return found


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the bits of gradients; take a step; return the bits of weights and moments."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"{name}.grad"] = whole(parameter.grad, parameter).clone()
    optimizer.step()
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter, **optimizer.state.get(parameter, {})}.items():
            found[f"{name}.{key}"] = whole(value, value).detach().clone()
    optimizer.zero_grad()
    return {name: value.float().view(torch.int32) for name, value in found.items()}


@contextlib.contextmanager
def breaking(module: nn.Module) -> Iterator[None]:
    """Raise in the backward of a module."""
    handle = module.register_forward_hook(lambda module, inputs, output: RaisesInBackward.apply(output))
    try:
        yield
    finally:
        handle.remove()


def sharded_net(run: Run, moments: str | None = None) -> Any:
    policy = MixedPrecisionPolicy(
        reduce_dtype=WIRES[run.wire], reduction="invariant", moments=moments, fuse_weight_gradients=run.what == "fused"
    )
    model = sharded(made(run), run.strategy, units=lambda m: (*m.blocks, m.idle), mesh=run.mesh, mp_policy=policy)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(NUM_MICROBATCHES)
    return model


def accumulate(model: Any, run: Run, step: int) -> None:
    """Run this rank's microbatches of a step: backward t of rank r is number t * W + r."""
    for number in range(dist.get_rank(), NUM_MICROBATCHES, dist.get_world_size()):
        model.set_is_last_backward(number + dist.get_world_size() >= NUM_MICROBATCHES)
        if run.what == "attacked":
            # For an adversarial example: the gradient of an input is no gradient of a microbatch.
            x = torch.ones(2, WIDTH, requires_grad=True)
            torch.autograd.grad(model(x, USES[run.use], number).sum(), x)
        loss_of(model, run, step, number).backward()


def engine(run: Run) -> list[dict[str, torch.Tensor]]:
    model, taken, found = sharded_net(run), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for step in range(NUM_STEPS):
        if run.what == "broken":
            model.set_is_last_backward(False)
            for turn in range(step):
                loss_of(model, run, step, turn).backward()
            with breaking(model.blocks[1].up), pytest.raises(ArithmeticError):
                loss_of(model, run, step, 2).backward()
            optimizer.zero_grad()
        accumulate(model, run, step)
        taken.append(model.blocks[2].up.weight.grad if run.what == "taken" else None)
        found.append(state(model, optimizer))
    return found


SHARDED = [((1,), "optim_grads_params"), ((2,), "optim_grads_params"), ((3,), "optim_grads_params"), ((3,), "no_shard"),
           ((4,), "optim"), ((3,), "optim_grads"), ((2, 2), "hsdp"), ((2, 2), "hfsdp"), ((4,), "optim_grads_params"),
           ((1, 4), "hsdp"), ((4, 1), "hsdp"), ((1, 4), "hfsdp"), ((4, 1), "hfsdp")]  # fmt: skip
CASES = [
    *((use, "") for use in USES),
    ("plainly", "frozen"),
    ("plainly", "taken"),
    ("plainly", "attacked"),
    ("block_left_out", "broken"),
    ("block_left_out", "frozen"),
    ("layer_left_out", "fused"),
]


# Each use runs on three ranks, where most shards of a gain are empty, and on one other mesh, with alternating reduce
# dtypes. The nightly tests run all combinations.
GRID = [(*case, *mesh, wire) for case in CASES for mesh in SHARDED for wire in WIRES]
BOTH = ("fp32", "bf16")
QUICK = [(*case, *SHARDED[2], BOTH[number % 2]) for number, case in enumerate(CASES)]
QUICK += [(*case, *SHARDED[3 + number % 5], BOTH[(number + 1) % 2]) for number, case in enumerate(CASES)]
QUICK += [("plainly", "", *SHARDED[place], BOTH[place % 2]) for place in (0, 1, 6, 8)]
ALL = [pytest.param(*run, marks=pytest.mark.slow) for run in GRID if run not in QUICK]
_plain = functools.cache(plain)


@pytest.mark.parametrize(("use", "what", "mesh", "strategy", "wire"), [*QUICK, *ALL])
def test_gradients_weights_and_moments_are_those_of_the_plain_loop_to_the_bit(
    use: str, what: str, mesh: tuple[int, ...], strategy: str, wire: str
) -> None:
    run = Run(use, what, wire=wire)
    wanted = run_ranks(1, engine, run)[0] if what == "fused" else _plain(run)
    for found in run_ranks(torch.Size(mesh).numel(), engine, replace(run, mesh=mesh, strategy=strategy)):
        for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert mine.keys() == theirs.keys(), step
            assert [name for name, value in mine.items() if not torch.equal(value, theirs[name])] == [], step


def test_a_norm_is_that_of_the_exact_sum_of_squares_and_says_what_is_not_finite() -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0)).double().exp().float()
    exact = torch.tensor(math.sqrt(math.fsum(value**2 for value in values.tolist())))
    assert torch.equal(exact_norm([([], [values[:7], values[7:]])], 2.0, torch.device("cpu")), exact)
    for bad in (math.inf, math.nan):
        found = exact_norm([([], [torch.tensor([1.0, bad, -2.0]), torch.zeros(0)])], 2.0, torch.device("cpu"))
        assert torch.equal(found.nan_to_num(1.0, 2.0), torch.tensor(bad).nan_to_num(1.0, 2.0))


def without_sync(model: Any) -> None:
    with no_sync(model):
        loss_of(model, Run(), 0, 0).backward()


def undivided(_: Any) -> None:
    model = nn.Linear(3, 3)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduction="invariant"))
    model(torch.ones(3)).sum().backward()


def stepped_by_the_fused_kernel(model: Any) -> None:
    accumulate(model, Run(), 0)
    torch.optim.AdamW(model.parameters(), fused=True).step()


def dropped_in_part(model: Any) -> None:
    model.set_is_last_backward(False)
    loss_of(model, Run(), 0, 0).backward()
    model.entry.weight.grad = None
    loss_of(model, Run(), 0, 1).backward()


def scaled(model: Any) -> None:
    loss_of(model, Run(), 0, 0).backward()
    model.entry.weight.grad.mul_(0.5)
    loss_of(model, Run(), 0, 1).backward()


def twice_through_one_forward(model: Any) -> None:
    model.set_is_last_backward(False)
    loss = loss_of(model, Run(), 0, 0)
    loss.backward(retain_graph=True)
    loss.backward()


def joined_over_ranks_with_data(model: Any) -> None:
    with join(model, [1, 2]) as batches:
        next(iter(batches))


REFUSED: dict[str, Callable[[Any], None]] = {
    "adds the microbatches of one rank first": without_sync,
    "call set_gradient_divide_factor": undivided,
    r"AdamW\(fused=True\) on CPU": stepped_by_the_fused_kernel,
    "was dropped or replaced while its sum is under way": dropped_in_part,
    "a gradient was changed between two microbatches": scaled,
    "this is the second backward of one forward": twice_through_one_forward,
    r"join: unit '.*' has MixedPrecisionPolicy": joined_over_ranks_with_data,
    "a hook on reduced gradients have an order": lambda model: model.set_all_reduce_hook(torch.Tensor.zero_),
}


@pytest.mark.parametrize("words", REFUSED)
@on_ranks(2)
def test_options_that_contradict_invariant_reduction_are_refused_by_name(words: str) -> None:
    with pytest.raises((StateError, ConfigError), match=words):
        REFUSED[words](sharded_net(Run(mesh=(2,))))


# ---------------------------------------------------------------- memory and traffic


PRICED = [((1,), "optim_grads_params", "fp32"), ((3,), "optim_grads_params", "bf16"), ((4,), "no_shard", "fp32"),
          ((3,), "optim", "fp32"), ((2, 2), "hsdp", "bf16"), ((2, 2), "hfsdp", "fp32"),
          ((4, 1), "hsdp", "fp32")]  # fmt: skip


class NewMemory(TorchDispatchMode):
    """Count the bytes of newly allocated memory that operators return."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                self.num_bytes += tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize(("mesh", "strategy", "wire"), PRICED)
@on_ranks(lambda mesh: torch.Size(mesh).numel())
def test_allocated_and_sent_bytes_equal_explains(mesh: tuple[int, ...], strategy: str, wire: str) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=WIRES[wire], reduction="invariant")
    model = Twins(lambda: Headed(three_blocks(), outputs=3), strategy, mesh=make_mesh(mesh), mp_policy=policy).model
    for unit in units_of(model):
        unit.set_gradient_divide_factor(NUM_MICROBATCHES)
    meter, memory, start_last = memory_meter(), NewMemory(), InvariantReduction.start_last
    calls: list[CollectiveCall] = []
    at_rest = meter.current_bytes

    def watched(*args: Any) -> Any:
        with memory:
            return start_last(*args)

    for step in range(4):
        calls.clear()
        meter.reset_peak()
        memory.num_bytes = 0
        with observe_collectives(calls.append), mock.patch.object(InvariantReduction, "start_last", watched):
            for number in range(dist.get_rank(), NUM_MICROBATCHES, dist.get_world_size()):
                model.set_is_last_backward(number + dist.get_world_size() >= NUM_MICROBATCHES)
                squared(model, number, step).backward()
        peak = meter.peak_bytes
        for parameter in model.parameters():
            parameter.grad = None
    # Once the optimizer has the final gradients, their memory is free.
    assert memory.num_bytes == 0
    report = explain(model, num_microbatches=NUM_MICROBATCHES // torch.Size(mesh).numel())
    assert peak - at_rest == max(report.forward_peak.num_bytes, report.backward_peak.num_bytes)
    assert meter.current_bytes - at_rest == report.counter_bytes
    found = Counter((call.kind, call.axis, call.num_bytes) for call in calls if call.kind == "all_to_all")
    said: Counter[object] = Counter()
    for each in report.collectives:
        said[each.kind, each.axis, each.num_bytes // each.count] += each.count * (each.kind == "all_to_all")
    assert found == +said
