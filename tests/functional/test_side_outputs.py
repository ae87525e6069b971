"""Gradients equal a whole model's when the loss reaches a unit by anything that it made, returned or not.

What a module returns in other ways than as a tensor is among the uses of ``random_use_cases``.
"""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Block, CheckpointedStack, Stack, inputs, squared
from tests.harness.oracle import Case, compare
from tests.harness.twins import Twins, sharded

Reshard = bool | int | None


def shard_all(model: nn.Module, reshard: Reshard = None, *, is_fused: bool = True) -> None:
    policy = MixedPrecisionPolicy(fuse_weight_gradients=is_fused)
    sharded(model, reshard_after_forward=reshard, mp_policy=policy)


class Routed(Block):
    aux: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = self.router(self.norm(x)).softmax(-1).square().sum()
        return super().forward(x)


def routed() -> nn.Module:
    return Stack(*(Routed() for _ in range(3)), nn.Linear(WIDTH, 5))


def routed_and_frozen() -> nn.Module:
    model = routed()
    for layer in model.layers:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("router" not in name and "up" not in name)
    return model


def aux_of(model: nn.Module) -> torch.Tensor:
    found = [0.1 * index * module.aux for index, module in enumerate(model.modules()) if isinstance(module, Routed)]
    return torch.stack(found).sum()


def main_and_aux(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step)).square().mean() + aux_of(model)


def aux_after_main(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    return model(inputs(rank, step)).square().mean(), aux_of(model)


def aux_before_main(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    main, aux = aux_after_main(model, rank, step)
    return aux, main


def aux_kept_from_evaluation(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The attributes of the first microbatch are detached ones when the second runs."""
    with torch.no_grad():
        model(inputs(rank, 100 + step))
    kept = aux_of(model)
    return main_and_aux(model, rank, step) * (1 + kept.detach())


def checkpointed() -> nn.Module:
    return CheckpointedStack(*(Routed() for _ in range(3)))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3)
        self.lstm = nn.LSTM(15, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.RMSNorm(4)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x.unsqueeze(1)).flatten(1).unsqueeze(1)
        hidden, _ = self.lstm(x)
        attended, _ = self.attention(hidden, hidden, hidden)
        normal = self.norm(attended)
        self.kept = [x, hidden, attended, normal]
        return x.flatten(1)[:, :WIDTH]


def mixed() -> nn.Module:
    return Stack(Mixed(), Block())


def kept_one_by_one(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    model(inputs(rank, step))
    (mixed,) = (module for module in model.modules() if isinstance(module, Mixed))
    return tuple(tensor.square().mean() for tensor in mixed.kept)


CASES: dict[str, Case] = {
    "an auxiliary loss backwarded after the main one": Case(routed, aux_after_main),
    "an auxiliary loss backwarded before the main one": Case(routed, aux_before_main),
    "an auxiliary loss of frozen weights": Case(routed_and_frozen, main_and_aux),
    "an auxiliary loss kept from an evaluation": Case(routed, aux_kept_from_evaluation),
    "an auxiliary loss in recomputed layers": Case(checkpointed, main_and_aux, is_guarded=False),
    "what convolutions, LSTMs, attention and norms make": Case(mixed, kept_one_by_one),
}

WAYS: dict[str, Callable[[nn.Module], None]] = {
    "by default": shard_all,
    "resharded after forward, without fused gradients": partial(shard_all, reshard=True, is_fused=False),
    "kept after forward": partial(shard_all, reshard=False),
}


# By default, which releases weights after forward, each case; the other two ways by turns.
QUICK = {name: ("by default", list(WAYS)[1 + place % 2]) for place, name in enumerate(CASES)}


@pytest.mark.parametrize(
    ("name", "ways"), nightly_but(QUICK.items(), [*QUICK.items(), *((name, tuple(WAYS)) for name in CASES)])
)
@on_ranks(2, timeout=60)
def test_a_loss_reaches_weights_by(name: str, ways: tuple[str, ...]) -> None:
    results = {}
    for way in ways:
        case = CASES[name]
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            results[way] = compare(Case(case.build, case.loss, shard=WAYS[way], steps=2, is_guarded=case.is_guarded))
    assert all(result.is_exact for result in results.values()), results


_OUTSIDE: list[torch.Tensor] = []


class Weighted(nn.Module):
    """Uses its own weights in operators, and leaves what lies between them where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(WIDTH, 5)), nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.first
        _OUTSIDE.append(hidden.sin() * self.first[0, :5])
        return torch.tanh(hidden @ self.second)


def backward_from_outside(reshard: Reshard) -> str:
    model = Stack(Weighted(), Weighted(), Block())
    shard_all(model, reshard)
    _OUTSIDE.clear()
    model(inputs(dist.get_rank(), 0))
    try:
        torch.stack(_OUTSIDE).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        _OUTSIDE.clear()
    return "no error"


def test_a_way_that_nobody_sees_is_an_error_before_released_weights_are_read() -> None:
    for message in run_ranks(2, backward_from_outside, True):
        assert "is at version 1000000000; expected version 0" in message


def test_it_is_none_where_weights_are_kept() -> None:
    assert run_ranks(2, backward_from_outside, False) == ["no error"] * 2


def loss_of_norm(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return a loss of what a hook takes from the norm of the second block alone."""
    taken: list[torch.Tensor] = []
    handle = model.layers[1].norm.register_forward_hook(lambda module, args, output: taken.append(output))
    model(inputs(rank, step))
    handle.remove()
    return taken.pop().square().mean()


@on_ranks(2)
def test_what_a_hook_takes_later_leads_backward_into_the_unit() -> None:
    twins, worst = Twins(), []
    for step in range(3):
        squared(twins.model, dist.get_rank(), step).backward()
        twins.zero_grad()
    for step in range(3, 5):
        twins.backward(step, loss_of_norm)
        worst.append(twins.gradients_apart())
        twins.zero_grad()
    assert max(worst) < 1e-6
