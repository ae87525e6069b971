"""Units of several modules of which a forward runs some, and the others later: a loss in chunks, a head of its own."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer import observe_collectives
from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.oracle import STRATEGIES, ZERO
from tests.harness.twins import Twins

WIDTH, NUM_CHUNKS, NUM_STEPS = 7, 3, 2


class Headed(nn.Module):
    """Layers, a norm and a head, of which a call runs as many as it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, *parts: str) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for part in parts:
            module = getattr(self, part.removesuffix(" in chunks"))
            x = torch.cat([module(chunk) for chunk in chunks(x)]) if part.endswith("chunks") else module(x)
        return x


def chunks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.chunk(NUM_CHUNKS)


def one_loss(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, "norm")
    sum(model.head(chunk).square().sum() for chunk in chunks(hidden)).backward()


def recomputed(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, "norm")

    def loss_of(chunk: torch.Tensor) -> torch.Tensor:
        return model.head(chunk).square().sum()

    losses = [checkpoint(loss_of, chunk, use_reentrant=bool(i % 2)) for i, chunk in enumerate(chunks(hidden))]
    torch.stack(losses).sum().backward()


def a_backward_for_each_chunk(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, "norm")
    leaf = hidden.detach().requires_grad_()
    for chunk in chunks(leaf):
        model.head(chunk).square().sum().backward()
    hidden.backward(leaf.grad)


def unsynchronized_but_for_the_last(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, "norm")
    leaf = hidden.detach().requires_grad_()
    sync: Callable[[bool], None] = getattr(model, "set_requires_gradient_sync", lambda _: None)
    sync(False)
    for chunk in chunks(leaf):
        model.head(chunk).square().sum().backward()
    sync(True)
    hidden.backward(leaf.grad)


def the_head_after_the_rest(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, "norm")
    leaf = hidden.detach()
    hidden.square().sum().backward()
    for chunk in chunks(leaf):
        model.head(chunk).square().sum().backward()


def both_in_chunks(model: Any, x: torch.Tensor) -> None:
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    for chunk in chunks(leaf):
        model.head(model.norm(chunk)).square().sum().backward()
    hidden.backward(leaf.grad)


def inside(*parts: str) -> Callable[[Any, torch.Tensor], None]:
    return lambda model, x: model(x, *parts).square().sum().backward()


def after_an_evaluation(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model.head(model(x, "norm"))
    one_loss(model, x)


def two_forwards(model: Any, x: torch.Tensor) -> None:
    first, second = model(x, "norm"), model(2 * x, "norm")
    model.head(second).square().sum().backward()
    model.head(first).square().sum().backward()


def by_turns(model: Any, x: torch.Tensor) -> None:
    for run in (inside("norm", "head"), one_loss, inside("norm"), inside()):
        run(model, x)


CASES: dict[str, Callable[[Any, torch.Tensor], None]] = {
    **{
        case.__name__: case
        for case in (
            one_loss, recomputed, a_backward_for_each_chunk, unsynchronized_but_for_the_last, the_head_after_the_rest,
            both_in_chunks, after_an_evaluation, two_forwards, by_turns,
        )
    },
    "norm alone": inside("norm"),
    "norm twice": inside("norm", "norm", "head"),
    "head in chunks inside": inside("norm", "head in chunks"),
    "neither": inside(),
}  # fmt: skip


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(17 * rank + step))


def shard(model: Headed, strategy: str, **options: Any) -> Headed:
    units: Iterable[Any] = (*model.layers, [model.norm, model.head], model)
    for unit in units:
        fully_shard(unit, placements=STRATEGIES[strategy], **options)
    return model


@pytest.mark.parametrize("strategy", nightly_but(ZERO[1::2], ZERO[1:]))
@on_ranks(2)
def test_gradients_are_a_plain_models_whichever_modules_of_a_unit_a_forward_runs(strategy: str) -> None:
    worst = {}
    for name, case in CASES.items():
        # Of weights that rest whole, none is released after forward.
        for reshards in (None, True, False) if strategy == "optim_grads_params" else (None,):
            twins, off = Twins(Headed, strategy, shard, reshard_after_forward=reshards), 0.0
            optimizers = twins.optimizers(torch.optim.SGD, lr=0.02)
            for step in range(NUM_STEPS):
                case(twins.model, inputs(dist.get_rank(), step))
                for rank in range(dist.get_world_size()):
                    case(twins.plain, inputs(rank, step))
                for parameter in twins.plain.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= dist.get_world_size()
                off = max(off, twins.gradients_apart())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            worst[name, reshards] = off
    assert len(worst) >= len(CASES) == 13
    assert {key: off for key, off in worst.items() if off > 1e-5} == {}


@on_ranks(2)
def test_each_module_of_a_unit_casts_its_inputs_and_outputs_when_it_is_called_by_itself() -> None:
    wanted = [torch.float64] + [torch.bfloat16, torch.float64] * NUM_CHUNKS
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model = shard(Headed(), "optim_grads_params", mp_policy=policy)
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(args[0].dtype))
    hidden = model(inputs(dist.get_rank(), 0), "norm")
    seen.append(hidden.dtype)
    for chunk in chunks(hidden):
        seen.append(model.head(chunk).dtype)
    assert seen == wanted


@on_ranks(2)
def test_a_loss_in_chunks_takes_one_reduction_for_each_unit_however_many_chunks_there_are() -> None:
    model = shard(Headed(), "optim_grads_params")
    counts: dict[str, int] = {}

    def count(call: Any) -> None:
        counts[call.kind] = counts.get(call.kind, 0) + 1

    one_loss(model, inputs(dist.get_rank(), 0))
    model.zero_grad()
    with observe_collectives(count):
        one_loss(model, inputs(dist.get_rank(), 1))
    assert counts["reduce_scatter"] == 3
    # Two layers in forward and backward; norm and head for the norm, for all chunks, and for the norm's backward.
    assert counts["all_gather"] == 7
