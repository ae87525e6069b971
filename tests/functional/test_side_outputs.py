"""Gradients equal a whole model's when the loss reaches a unit by anything that it made, returned or not.

What a module returns in other ways than as a tensor is among the uses of ``random_use_cases``.
"""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, CheckpointedStack, Made, Stack, inputs, squared
from tests.harness.oracle import Case, compare
from tests.harness.twins import Twins, sharded


class Routed(Block):
    aux: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = self.router(self.norm(x)).softmax(-1).square().sum()
        return super().forward(x)


def routed(*, is_frozen: bool = False) -> nn.Module:
    model = Stack(*(Routed() for _ in range(3)), nn.Linear(WIDTH, 5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen or "router" in name or "up" in name)
    return model


def main_and_aux(model: nn.Module, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the output, and that of what the layers have kept."""
    main = squared(model, rank, step)
    return main, sum(0.1 * index * each.aux for index, each in enumerate(model.modules()) if isinstance(each, Routed))


def aux_kept_from_evaluation(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The attributes of the first microbatch are detached ones when the second runs."""
    with torch.no_grad():
        _, kept = main_and_aux(model, rank, 100 + step)
    return sum(main_and_aux(model, rank, step)) * (1 + kept)


def mixed() -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.convolution(x.unsqueeze(1)).flatten(1).unsqueeze(1)
        hidden, _ = m.lstm(x)
        attended, _ = m.attention(hidden, hidden, hidden)
        m.kept = [x, hidden, attended, m.norm(attended)]
        return x.flatten(1)[:, :WIDTH]

    parts = {
        "convolution": nn.Conv1d(1, 3, 3), "lstm": nn.LSTM(15, 4, batch_first=True),
        "attention": nn.MultiheadAttention(4, 2, batch_first=True), "norm": nn.RMSNorm(4),
    }  # fmt: skip
    return Stack(Made(forward, **parts), Block())


def kept_one_by_one(model: Any, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    model(inputs(rank, step))
    return tuple(tensor.square().mean() for tensor in model.layers[0].kept)


CASES: dict[str, Case] = {
    "an auxiliary loss backwarded after the main one": Case(routed, main_and_aux),
    "an auxiliary loss backwarded before the main one": Case(routed, lambda *args: main_and_aux(*args)[::-1]),
    "an auxiliary loss of frozen weights": Case(
        partial(routed, is_frozen=True), lambda *args: sum(main_and_aux(*args))
    ),
    "an auxiliary loss kept from an evaluation": Case(routed, aux_kept_from_evaluation),
    "an auxiliary loss in recomputed layers": Case(
        lambda: CheckpointedStack(*(Routed() for _ in range(3))),
        lambda *args: sum(main_and_aux(*args)),
        is_guarded=False,
    ),
    "what convolutions, LSTMs, attention and norms make": Case(mixed, kept_one_by_one),
}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(fuse_weight_gradients=False)},
    {"reshard_after_forward": False},
)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout=60)
def test_a_loss_reaches_weights_by(name: str) -> None:
    # By default, which releases weights after forward, each case; the other two ways by turns.
    for way in (WAYS[0], WAYS[1 + list(CASES).index(name) % 2]):
        case = CASES[name]
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            shard = partial(sharded, **way)
            found = compare(Case(case.build, case.loss, shard=shard, steps=2, is_guarded=case.is_guarded))
        assert found.is_exact, (way, found)


@pytest.mark.parametrize("is_released", [True, False])
@on_ranks(2)
def test_a_way_that_nobody_sees_is_an_error_before_released_weights_are_read(is_released: bool) -> None:
    outside: list[torch.Tensor] = []

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        """Use its own weights in operators, and leave what lies between them where nobody looks."""
        hidden = x @ m.first
        outside.append(hidden.sin() * m.first[0, :5])
        return torch.tanh(hidden @ m.second)

    def weighted() -> nn.Module:
        first, second = nn.Parameter(torch.randn(WIDTH, 5)), nn.Parameter(torch.randn(5, WIDTH))
        return Made(forward, first=first, second=second)

    model = sharded(Stack(weighted(), weighted(), Block()), reshard_after_forward=is_released)
    model(inputs(dist.get_rank(), 0))
    loss = torch.stack(outside).sum()
    outside.clear()
    if is_released:
        with pytest.raises(RuntimeError, match="is at version 1000000000; expected version 0"):
            loss.backward()
    else:
        loss.backward()


def loss_of_norm(model: Any, rank: int, step: int) -> torch.Tensor:
    """Return a loss of what a hook takes from the norm of the second block alone."""
    taken: list[torch.Tensor] = []
    handle = model.layers[1].norm.register_forward_hook(lambda module, args, output: taken.append(output))
    model(inputs(rank, step))
    handle.remove()
    return taken.pop().square().mean()


@on_ranks(2)
def test_what_a_hook_takes_later_leads_backward_into_the_unit() -> None:
    twins = Twins()
    for step in range(3):
        squared(twins.model, dist.get_rank(), step).backward()
        twins.zero_grad()
    for step in range(3, 5):
        twins.backward(step, loss_of_norm)
        apart = twins.gradients_apart()
        assert apart < 1e-6
        twins.zero_grad()
