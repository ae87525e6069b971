"""A loss may read what a unit keeps beside its outputs; a backward that comes to the unit by that alone is refused.

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
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import WIDTH, Block, CheckpointedStack, Stack, inputs
from tests.harness.oracle import Case, compare
from tests.harness.twins import sharded

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


def aux_kept_from_evaluation(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The attributes of the first microbatch are detached ones when the second runs."""
    with torch.no_grad():
        model(inputs(rank, 100 + step))
    kept = aux_of(model)
    return main_and_aux(model, rank, step) * (1 + kept.detach())


def checkpointed() -> nn.Module:
    return CheckpointedStack(*(Routed() for _ in range(3)))


CASES: dict[str, Case] = {
    "an auxiliary loss of frozen weights": Case(routed_and_frozen, main_and_aux),
    "an auxiliary loss kept from an evaluation": Case(routed, aux_kept_from_evaluation),
    "an auxiliary loss in recomputed layers": Case(checkpointed, main_and_aux, is_guarded=False),
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


def aux_alone(model: nn.Module) -> torch.Tensor:
    model(inputs(dist.get_rank(), 0))
    return aux_of(model)


def hooked_alone(model: nn.Module) -> torch.Tensor:
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
    for reshard in (True, False):
        model = routed()
        shard_all(model, reshard, is_fused=False)
        loss = lose(model)
        if reshard:
            with pytest.raises(RuntimeError, match="is at version 1000000000; expected version 0"):
                loss.backward()
        else:
            loss.backward()
