"""Twenty programs whose ranks run different parts; each trains like the plain model on the data of all ranks.

``python -m tests.functional.megatron_fsdp.uneven.programs --seeds 500`` runs as many random routes.
``python -m tests.functional.megatron_fsdp.uneven.programs --fsdp2`` prints how PyTorch's FSDP2 ends in each program.
"""

import argparse
import random
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2_shard
from torch.utils.checkpoint import checkpoint

from dbuffer.events import listen
from megatron_fsdp import join, microbatch, unsharded
from tests.harness import RankError, run_ranks
from tests.harness.failures import FailureKind, RankFailure
from tests.harness.models import Block, inputs
from tests.harness.twins import Twins, sharded

__all__ = ["PROGRAMS", "Route", "Routed", "random_routes", "run_program", "run_programs", "shard", "train"]

Route = list[int]
Routes = Callable[[int, int], Route]
NUM_STEPS = 2


class Routed(nn.Module):
    """Parts between parameters of the root; each call names the parts to run."""

    def __init__(self, num_parts: int, checkpoints: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.parts = nn.ModuleList(Block() for _ in range(num_parts))
        self.head = nn.Linear(7, 3)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        """Return (rows, 3)."""
        x = self.embed(x)
        size = self.checkpoints or 1
        for begin in range(0, len(route), size):
            segment = route[begin : begin + size]
            x = checkpoint(self.run, x, segment, use_reentrant=False) if self.checkpoints else self.run(x, segment)
        out: torch.Tensor = self.head(x)
        return out

    def run(self, x: torch.Tensor, segment: Route) -> torch.Tensor:
        """Run some parts."""
        for number in segment:
            x = self.parts[number](x)
        return x


class Experts(nn.Module):
    """Experts that are units inside a unit, which has its own router."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(7, 7)
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(num_experts))

    def forward(self, x: torch.Tensor, chosen: Route) -> torch.Tensor:
        """Return (rows, 7)."""
        x = self.router(x)
        return x + sum((self.experts[number](x) for number in chosen), start=torch.zeros(()))


class Mixture(nn.Module):
    """Two layers of three experts. A route's numbers below 3 are experts of the first layer."""

    def __init__(self, checkpoints: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(7, 3)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        """Return (rows, 3)."""
        x = self.embed(x)
        for place, layer in enumerate(self.layers):
            chosen = [number - 3 * place for number in route if number // 3 == place]
            x = checkpoint(layer, x, chosen, use_reentrant=False) if self.checkpoints else layer(x, chosen)
        out: torch.Tensor = self.head(x)
        return out


def units_of(model: Any) -> list[nn.Module]:
    """Return the modules that become units, in the order of their calls."""
    if hasattr(model, "parts"):
        return list(model.parts)
    return [part for layer in model.layers for part in (*layer.experts, layer)]


def shard(model: Any, strategy: str, **options: Any) -> Any:
    """Make each part, each expert and each layer a unit, in an order that all ranks share."""
    sharded(model, strategy, units=units_of, **options)
    model.set_forward_order()
    return model


def shard_with_fsdp2(model: Any, strategy: str) -> None:
    """Make the same units with PyTorch's FSDP2."""
    for part in (*units_of(model), model):
        fsdp2_shard(part, reshard_after_forward=strategy == "optim_grads_params")


# ---------------------------------------------------------------- which units a rank runs


def on_some(rank: int, step: int) -> Route:
    return [0, 1, 2, 3] if rank == 0 else [2, 3]


def alternating(rank: int, step: int) -> Route:
    return [0, 1, 2, 3] if (rank + step) % 2 else [2, 3]


def none_at_first(rank: int, step: int) -> Route:
    return [0, 1, 2, 3] if step >= 2 and rank == 1 else [2, 3]


def two_towers(rank: int, step: int) -> Route:
    return [[0, 1], [2, 3], [0, 1, 2, 3], []][(rank + step) % 4]


def early_exit(rank: int, step: int) -> Route:
    return list(range(1 + (2 * rank + step) % 4))


def never(rank: int, step: int) -> Route:
    return [0, 3]


def layer_drop(rank: int, step: int) -> Route:
    return [number for number in range(4) if random.Random(f"{rank} {step}").random() < 0.5]


def nothing_on_one(rank: int, step: int) -> Route:
    return [] if rank == step % 2 else [0, 1, 2, 3]


def one_each(rank: int, step: int) -> Route:
    return [(rank + step) % 4]


def all_but_one(rank: int, step: int) -> Route:
    return [number for number in range(4) if number != (rank + step) % 4]


def few_experts(rank: int, step: int) -> Route:
    return [number for number in range(6) if random.Random(f"{rank} {step}").random() < 0.4]


def no_expert_on_one(rank: int, step: int) -> Route:
    return [] if rank == 0 else [0, 2, 4]


def an_expert_for_nobody(rank: int, step: int) -> Route:
    return [rank % 2, 3 + (rank + step) % 2]


# ---------------------------------------------------------------- uses


def loss_of(model: Any, rank: int, step: int, route: Route, width: int = 5) -> torch.Tensor:
    """Return the loss of a rank's batch on a route."""
    found: torch.Tensor = model(inputs(rank, step, 2, width), route).square().mean()
    return found


def train(twins: Twins, routes: Routes, steps: int = NUM_STEPS) -> None:
    """Train with two microbatches a step on the routes of each rank, with a validation loss in between."""

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        return loss_of(model, rank, step, routes(rank, step))

    optimizers = twins.optimizers(torch.optim.AdamW, lr=1e-2)
    rank = dist.get_rank()
    for step in range(steps):
        for number in range(2):
            with microbatch(twins.model, is_last=number == 1) if hasattr(twins.model, "parameter_groups") else _NONE:
                twins.backward(2 * step + number, loss)
        step_and_compare(twins, optimizers, (step, routes(rank, 2 * step), routes(rank, 2 * step + 1)))
        with torch.no_grad():
            torch.testing.assert_close(loss(twins.model, rank, 50 + step), loss(twins.plain, rank, 50 + step))
    assert twins.weights_apart() < 1e-5


_NONE = nullcontext()


def step_and_compare(twins: Twins, optimizers: Sequence[torch.optim.Optimizer], where: object) -> None:
    """Compare gradients, and step both."""
    assert twins.gradients_apart() < 1e-6, where
    twins.step(optimizers)


def frozen_tower(twins: Twins) -> None:
    for model in twins:
        model.parts[:2].requires_grad_(False)
    train(twins, alternating)


def called_again(twins: Twins) -> None:
    twins.model.parts[1].set_reshard_after_forward(False)
    train(twins, lambda rank, step: [[1, 2, 1, 3, 1], [0, 1], [2, 3], [1, 1]][(rank + step) % 4])


def order_given(twins: Twins) -> None:
    twins.model.set_forward_order([twins.model.parts[number] for number in (3, 2, 1, 0)])
    train(twins, lambda rank, step: [3, 1, 0] if (rank + step) % 2 else [2, 1])


def uneven_evaluation(twins: Twins) -> None:
    rank = dist.get_rank()
    train(twins, layer_drop, 1)
    with torch.no_grad(), unsharded(twins.model):
        for number in range(1 + 2 * rank):
            mine, wanted = (loss_of(model, rank, number, layer_drop(rank, number)) for model in twins)
            torch.testing.assert_close(mine, wanted)
    train(twins, layer_drop, 1)


def generation(twins: Twins) -> None:
    rank = dist.get_rank()
    with torch.no_grad(), unsharded(twins.model):
        texts = [torch.ones(2, 5), torch.ones(2, 5)]
        for _ in range(2 + rank):
            for number, model in enumerate(twins):
                texts[number] = torch.cat([model(texts[number], [0, 1, 2, 3]), torch.ones(2, 2)], 1)
    torch.testing.assert_close(*texts)
    train(twins, alternating, 2)


def uneven_batches(twins: Twins) -> None:
    """Rank r has r + 1 batches; a step follows each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers = twins.optimizers(torch.optim.AdamW, lr=1e-2)
    with join(twins.model, list(range(rank + 1))) as joined:
        for step, number in enumerate(joined):
            loss_of(twins.model, rank, number, layer_drop(rank, number)).backward()
            with_data = range(step, world)
            for other in with_data:
                (loss_of(twins.plain, other, step, layer_drop(other, step)) / len(with_data)).backward()
            step_and_compare(twins, optimizers, step)


def uneven_microbatches(twins: Twins) -> None:
    """Rank r has r + 1 microbatches of one step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizers = twins.optimizers(torch.optim.AdamW, lr=1e-2)
    for step in range(2):
        with join(twins.model, list(range(rank + 1)), mean_over="all ranks") as joined:
            for number in joined:
                with microbatch(twins.model, is_last=joined.is_last):
                    loss_of(twins.model, rank, 10 * step + number, alternating(rank, number)).backward()
        for other in range(world):
            for number in range(other + 1):
                (loss_of(twins.plain, other, 10 * step + number, alternating(other, number)) / world).backward()
        step_and_compare(twins, optimizers, step)


@dataclass(frozen=True)
class Program:
    """A program: routes to train on, or a function of both models."""

    build: Callable[[int], nn.Module]
    routes: Routes | None = None
    do: Callable[[Twins], None] | None = None


def _routed(checkpoints: int) -> nn.Module:
    return Routed(4, checkpoints)


PROGRAMS: dict[str, Program] = {
    **{
        each.__name__: Program(_routed, each)
        for each in (on_some, alternating, none_at_first, two_towers, early_exit, never, layer_drop)
    },
    **{each.__name__: Program(_routed, each) for each in (nothing_on_one, one_each, all_but_one)},
    **{each.__name__: Program(Mixture, each) for each in (few_experts, no_expert_on_one, an_expert_for_nobody)},
    **{
        each.__name__: Program(_routed, do=each)
        for each in (
            frozen_tower,
            called_again,
            order_given,
            uneven_evaluation,
            generation,
            uneven_batches,
            uneven_microbatches,
        )
    },
}


def run_program(name: str, strategy: str, checkpoints: int, shard: Callable[..., Any] = shard) -> None:
    """Run one program, and check that all ranks issued their collectives in one order."""
    program = PROGRAMS[name]
    twins = Twins(lambda: program.build(checkpoints), strategy, shard)
    issued: list[str] = []

    def note(action: str, subject: Any) -> None:
        if action in ("gather", "reduce"):
            issued.append(f"{action} {subject.name}")

    with listen(note):
        if program.do is not None:
            program.do(twins)
        elif program.routes is not None:
            train(twins, program.routes)
    # A rank that recomputes several units gathers them all before it reduces the first one. A rank that skips them
    # gathers none. Gathers and reductions are each in one order, on their own communicators.
    spans_units = checkpoints > 1 or (checkpoints == 1 and program.build is Mixture)
    for kinds in [("gather", "reduce")] if not spans_units else [("gather",), ("reduce",)]:
        mine = [each for each in issued if each.startswith(kinds)]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        for rank, others in enumerate(found):
            assert others == mine, (name, rank, first_difference(mine, others))


def first_difference(mine: list[str], others: list[str]) -> tuple[int, list[str], list[str]]:
    """Return the first position at which two orders differ, and the collectives around it in each."""
    place = next((n for n, (one, other) in enumerate(zip(mine, others, strict=False)) if one != other), len(mine))
    around = slice(max(place - 3, 0), place + 4)
    return place, mine[around], others[around]


def run_programs(strategy: str, checkpoints: int, names: Sequence[str] = tuple(PROGRAMS)) -> None:
    """Run programs one after the other."""
    for name in names:
        try:
            run_program(name, strategy, checkpoints)
        except AssertionError as error:
            raise AssertionError(f"program {name}") from error


def random_routes(seeds: Sequence[int], strategy: str) -> None:
    """Train on routes that each rank draws from one seed after the other.

    In FP64, because AdamW divides a gradient by its size: in FP32, in one of a few hundred seeds, the rounding error of
    a nearly zero gradient decides over a whole step.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        _random_routes(seeds, strategy)
    finally:
        torch.set_default_dtype(before)


def _random_routes(seeds: Sequence[int], strategy: str) -> None:
    for seed in seeds:

        def routes(rank: int, step: int, seed: int = seed) -> Route:
            draw = random.Random(f"{seed} {rank} {step}")
            return [number for number in range(6 if seed % 2 else 4) if draw.random() < draw.random()]

        build: Callable[[int], nn.Module] = Mixture if seed % 2 else _routed
        twins = Twins(lambda build=build, seed=seed: build(seed // 2 % 3), strategy, shard)  # type: ignore[misc]
        try:
            train(twins, routes, 2)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {strategy}") from error


# ---------------------------------------------------------------- commands


def fsdp2_ends() -> Iterator[tuple[str, str]]:
    """Yield FSDP2's result for each program with routes: ZeRO-3, two ranks, no checkpoints."""
    for name, program in PROGRAMS.items():
        if program.routes is not None:
            try:
                run_ranks(2, run_with_fsdp2, name, timeout=20, fresh=True)
                yield name, "trains"
            except RankError as error:
                yield name, "; ".join(sorted({in_short(failure) for failure in error.failures}))


def in_short(failure: RankFailure) -> str:
    """Return how a rank failed, in one line."""
    if failure.kind is FailureKind.STUCK:
        return "a rank waits for ever"
    if failure.exit_code is not None and failure.exit_code < 0:
        return f"a process ends by {signal.Signals(-failure.exit_code).name}"
    kind = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception))\b", failure.report, re.MULTILINE)[-1]
    return "a rank has other numbers than the plain model" if kind == "AssertionError" else f"a rank raises {kind}"


def run_with_fsdp2(name: str) -> None:
    """Run a program's routes with FSDP2."""
    program = PROGRAMS[name]
    twins = Twins(lambda: program.build(0), "optim_grads_params", shard_with_fsdp2)
    assert program.routes is not None
    train(twins, program.routes)


def main() -> None:
    """Run the programs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="how many random routes to train on")
    parser.add_argument("--fsdp2", action="store_true", help="how FSDP2 ends in each program")
    given = parser.parse_args()
    kinds = [(2, "optim_grads_params"), (3, "optim_grads_params"), (2, "optim"), (3, "optim_grads"), (4, "hsdp")]
    for number, (world, strategy) in enumerate(kinds):
        seeds = range(number, given.seeds, len(kinds))
        if seeds:
            run_ranks(world, random_routes, seeds, strategy, timeout=3000)
            print(f"{len(seeds)} seeds on {world} ranks, {strategy}: all as the plain model", flush=True)
    for name, end in fsdp2_ends() if given.fsdp2 else ():
        print(f"{name}: {end}", flush=True)


if __name__ == "__main__":
    # Import the module by the name that ranks import, not as __main__.
    from tests.functional.megatron_fsdp.uneven import programs

    programs.main()
