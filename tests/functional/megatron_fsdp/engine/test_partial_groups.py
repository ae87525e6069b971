"""Units of several modules that run at different times: a loss in chunks, a separately called head."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from dbuffer import observe_collectives
from megatron_fsdp import MixedPrecisionPolicy
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Made, inputs
from tests.harness.oracle import ZERO
from tests.harness.twins import Twins, sharded

NUM_CHUNKS, NUM_STEPS = 3, 2


def chunks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.chunk(NUM_CHUNKS)


def headed() -> nn.Module:
    """Return layers, a norm and a head; each call says how many of them to run."""

    def forward(m: Any, x: torch.Tensor, *parts: str) -> torch.Tensor:
        x = torch.tanh(m.second(torch.tanh(m.first(x))))
        for part in parts:
            module = getattr(m, part.removesuffix(" in chunks"))
            x = torch.cat([module(chunk) for chunk in chunks(x)]) if part.endswith("chunks") else module(x)
        return x

    layers = {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
    return Made(forward, **layers, norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 5))


def units(model: Any) -> list[Any]:
    return [model.first, model.second, [model.norm, model.head]]


def one_loss(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, "norm")
    sum(model.head(chunk).square().sum() for chunk in chunks(hidden)).backward()


def recomputed(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, "norm")
    losses = [checkpoint(model.head, chunk, use_reentrant=bool(i % 2)) for i, chunk in enumerate(chunks(hidden))]
    torch.cat(losses).square().sum().backward()


def a_backward_for_each_chunk(
    model: Any, x: torch.Tensor, *, is_synced: bool = True, through_norm: bool = False
) -> None:
    hidden = model(x) if through_norm else model(x, "norm")
    leaf = hidden.detach().requires_grad_()
    sync: Callable[[bool], None] = getattr(model, "set_requires_gradient_sync", lambda _: None)
    sync(is_synced)
    for chunk in chunks(leaf):
        model.head(model.norm(chunk) if through_norm else chunk).square().sum().backward()
    sync(True)
    hidden.backward(leaf.grad)


def the_head_after_the_rest(model: Any, x: torch.Tensor) -> None:
    hidden = model(x, "norm")
    leaf = hidden.detach()
    hidden.square().sum().backward()
    for chunk in chunks(leaf):
        model.head(chunk).square().sum().backward()


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
    "one loss": one_loss,
    "recomputed": recomputed,
    "a backward for each chunk": a_backward_for_each_chunk,
    "unsynchronized but for the last": lambda model, x: a_backward_for_each_chunk(model, x, is_synced=False),
    "both in chunks": lambda model, x: a_backward_for_each_chunk(model, x, through_norm=True),
    "the head after the rest": the_head_after_the_rest,
    "after an evaluation": after_an_evaluation,
    "two forwards": two_forwards,
    "by turns": by_turns,
    "norm alone": inside("norm"),
    "norm twice": inside("norm", "norm", "head"),
    "head in chunks inside": inside("norm", "head in chunks"),
    "neither": inside(),
}


@pytest.mark.parametrize("strategy", nightly_but(ZERO[1::2], ZERO[1:]))
@on_ranks(2)
def test_gradients_are_a_plain_models_whichever_modules_of_a_unit_a_forward_runs(strategy: str) -> None:
    for name, case in CASES.items():
        # Weights that are never sharded are not released after forward.
        for reshards in (None, True, False) if strategy == "optim_grads_params" else (None,):
            twins = Twins(headed, strategy, units=units, reshard_after_forward=reshards)
            optimizers = twins.optimizers(torch.optim.SGD, lr=0.02)
            for step in range(NUM_STEPS):
                case(twins.model, inputs(dist.get_rank(), step, 6, WIDTH))
                for rank in range(2):
                    case(twins.plain, inputs(rank, step, 6, WIDTH))
                for parameter in twins.plain.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= 2
                apart = twins.gradients_apart()
                assert apart < 1e-5, (name, reshards)
                twins.step(optimizers)


@on_ranks(2)
def test_each_module_of_a_unit_casts_its_inputs_and_outputs_when_called_alone() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model = sharded(headed(), units=units, mp_policy=policy)
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda module, args, out: seen.append(args[0].dtype))
    hidden = model(inputs(dist.get_rank(), 0, 6, WIDTH), "norm")
    seen.append(hidden.dtype)
    for chunk in chunks(hidden):
        seen.append(model.head(chunk).dtype)
    assert seen == [torch.float64] + [torch.bfloat16, torch.float64] * NUM_CHUNKS


@on_ranks(2)
def test_a_loss_in_chunks_needs_one_reduction_per_unit_for_any_number_of_chunks() -> None:
    model, counts = sharded(headed(), units=units), Counter[str]()
    one_loss(model, inputs(dist.get_rank(), 0, 6, WIDTH))
    model.zero_grad()
    with observe_collectives(lambda call: counts.update([call.kind])):
        one_loss(model, inputs(dist.get_rank(), 1, 6, WIDTH))
    # Gathers: two layers in forward and in backward; norm and head for the norm, for all chunks, and for the norm's
    # backward.
    assert counts == {"reduce_scatter": 3, "all_gather": 7}
