"""A loss may use tensors that a unit stores outside of its outputs; a backward through only these raises an error.

``random_use.cases`` covers outputs that are not tensors.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from tests.harness import on_ranks
from tests.harness.models import WIDTH, Block, CheckpointedStack, Stack, inputs, squared
from tests.harness.oracle import Case, compare
from tests.harness.twins import sharded


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
    """Return the loss of the output, and the loss of the tensors that the layers kept."""
    main = squared(model, rank, step)
    aux: Any = sum(0.1 * index * each.aux for index, each in enumerate(model.modules()) if isinstance(each, Routed))
    return main, aux


def main_plus_aux(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    total: Any = sum(main_and_aux(model, rank, step))
    return total


def aux_kept_from_evaluation(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Keep detached attributes of the first microbatch when the second one runs."""
    with torch.no_grad():
        _, kept = main_and_aux(model, rank, 100 + step)
    return main_plus_aux(model, rank, step) * (1 + kept)


CASES: dict[str, Case] = {
    "an auxiliary loss of frozen weights": Case(partial(routed, is_frozen=True), main_plus_aux),
    "an auxiliary loss kept from an evaluation": Case(routed, aux_kept_from_evaluation),
    "an auxiliary loss in recomputed layers": Case(
        lambda: CheckpointedStack(*(Routed() for _ in range(3))),
        main_plus_aux,
        is_guarded=False,
    ),
}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(fuse_weight_gradients=False)},
    {"reshard_after_forward": False},
)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_a_loss_reaches_weights_by(name: str) -> None:
    # Each case runs with the default, which releases weights after forward, and with one of the two other ways.
    for way in (WAYS[0], WAYS[1 + list(CASES).index(name) % 2]):
        case = CASES[name]
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            shard = partial(sharded, **way)
            found = compare(Case(case.build, case.loss, shard=shard, steps=2, is_guarded=case.is_guarded))
        assert found.is_exact, (way, found)


def aux_alone(model: nn.Module) -> torch.Tensor:
    return main_and_aux(model, dist.get_rank(), 0)[1]


def hooked_alone(model: Any) -> torch.Tensor:
    taken: list[torch.Tensor] = []
    handle = model.layers[1].norm.register_forward_hook(lambda module, args, output: taken.append(output))
    model(inputs(dist.get_rank(), 0))
    handle.remove()
    return taken.pop().square().mean()


@pytest.mark.parametrize("lose", [aux_alone, hooked_alone])
@on_ranks(2)
def test_released_weights_that_backward_reaches_by_another_way_are_not_read(
    lose: Callable[[nn.Module], torch.Tensor],
) -> None:
    for way in WAYS[1:]:
        policy = MixedPrecisionPolicy(fuse_weight_gradients=False)
        model = sharded(routed(), **{**way, "mp_policy": policy})
        loss = lose(model)
        if way["reshard_after_forward"]:
            with pytest.raises(RuntimeError, match="is at version 1000000000; expected version 0"):
                loss.backward()
        else:
            loss.backward()
