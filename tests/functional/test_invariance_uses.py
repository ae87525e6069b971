"""``MixedPrecisionPolicy(reduction="invariant")`` in the hands of strangers: the plain loop, signs of zeros too."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import FsdpModule, MixedPrecisionPolicy, Placements, fully_shard
from tests.functional.test_invariance import NUM_MICROBATCHES, counted
from tests.harness import run_ranks
from tests.harness.models import make_mesh
from tests.harness.oracle import units_of, whole

NUM_STEPS = 3
WIDTH = 5


class MinusZero(torch.autograd.Function):
    """Zero, with a gradient of -0.0."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, -0.0)


class Block(nn.Module):
    """A layer of odd sizes, and a gain of one element, which most ranks hold nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
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

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.entry.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        # Of a unit that no loss reaches.
        self.idle = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, call: Callable[..., torch.Tensor], number: int) -> torch.Tensor:
        x = self.entry(x)
        for index, block in enumerate(self.blocks):
            x = call(block, x, number, index)
        return self.head(x)


class Broken(RuntimeError):
    """What a backward raises here."""


class Fail(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise Broken


def plainly(block: nn.Module, x: torch.Tensor, number: int, index: int) -> torch.Tensor:
    return block(x)


def block_left_out(block: nn.Module, x: torch.Tensor, number: int, index: int) -> torch.Tensor:
    """Microbatches 0, 1, 4, 5, ... leave out the middle block, and nobody uses the last one after the sixth."""
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
    """What is done on which mesh, by which strategy.

    Attributes:
        use: of ``USES``. what: "", "frozen", "broken" (a backward raises, and the step begins anew).
    """

    use: str = "plainly"
    what: str = ""
    mesh: tuple[int, ...] = (1,)
    strategy: str = "optim_grads_params"


def loss_of(model: nn.Module, run: Run, step: int, number: int) -> torch.Tensor:
    """Return a sum over as many samples as the microbatch's number says."""
    x = torch.randn(1 + number % 4, WIDTH, generator=torch.Generator().manual_seed(100 * step + number))
    output: torch.Tensor = model(x, USES[run.use], number)
    return output.square().sum()


def made(run: Run) -> Net:
    torch.manual_seed(3)
    model = Net()
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
                leaves[name].append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = counted(leaves[name]) * (1 / NUM_MICROBATCHES) if name in used else None
        found.append(state(model, optimizer))
    return found


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the bits of gradients, then take a step and return those of weights and moments too."""
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
    handle = module.register_forward_hook(lambda module, inputs, output: Fail.apply(output))
    try:
        yield
    finally:
        handle.remove()


def engine(run: Run) -> list[dict[str, torch.Tensor]]:
    model, axes = made(run), tuple(range(len(run.mesh)))
    policy = MixedPrecisionPolicy(reduction="invariant", fuse_weight_gradients=run.what == "fused")
    for part in (*model.blocks, model.idle, model):
        fully_shard(part, make_mesh(run.mesh), getattr(Placements, run.strategy)(*axes), mp_policy=policy)
    for unit in units_of(model):
        unit.set_gradient_divide_factor(NUM_MICROBATCHES)
    assert isinstance(model, FsdpModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    size, rank, found = dist.get_world_size(), dist.get_rank(), []
    rounds = NUM_MICROBATCHES // size
    for step in range(NUM_STEPS):
        if run.what == "broken":
            model.set_is_last_backward(False)
            for turn in range(step):
                loss_of(model, run, step, turn).backward()
            with breaking(model.blocks[1].up), pytest.raises(Broken):
                loss_of(model, run, step, 2).backward()
            optimizer.zero_grad()
        for turn in range(rounds):
            model.set_is_last_backward(turn == rounds - 1)
            loss_of(model, run, step, turn * size + rank).backward()
        found.append(state(model, optimizer))
    return found


SHARDED = [((1,), "optim_grads_params"), ((2,), "optim_grads_params"), ((3,), "optim_grads_params"), ((3,), "no_shard"),
           ((4,), "optim"), ((2,), "optim_grads"), ((2, 2), "hsdp"), ((2, 2), "hfsdp")]  # fmt: skip
CASES = [
    *((use, "") for use in USES),
    ("plainly", "frozen"),
    ("block_left_out", "broken"),
    ("block_left_out", "frozen"),
    ("layer_left_out", "fused"),
]


# Each use on three ranks, where most shards of a gain are empty, and on one other mesh; all of them nightly.
GRID = [(*case, *mesh) for case in CASES for mesh in SHARDED]
QUICK = [(*case, *SHARDED[2]) for case in CASES]
QUICK += [(*case, *SHARDED[3 + number % 5]) for number, case in enumerate(CASES)]
ALL = [pytest.param(*run, marks=pytest.mark.slow) for run in GRID if run not in QUICK]
_plain = functools.cache(plain)


@pytest.mark.parametrize(("use", "what", "mesh", "strategy"), [*QUICK, *ALL])
def test_gradients_weights_and_moments_are_those_of_the_plain_loop_to_the_bit(
    use: str, what: str, mesh: tuple[int, ...], strategy: str
) -> None:
    wanted = run_ranks(1, engine, Run(use, what))[0] if what == "fused" else _plain(Run(use, what))
    for found in run_ranks(torch.Size(mesh).numel(), engine, Run(use, what, mesh, strategy)):
        for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert mine.keys() == theirs.keys(), step
            assert [name for name, value in mine.items() if not torch.equal(value, theirs[name])] == [], step
