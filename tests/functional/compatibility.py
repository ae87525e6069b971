"""Code written for ``torch.distributed.fsdp``, run with PyTorch's engine and with this one: what has to agree.

A scenario is such code. It gets the module it would have imported its names from, and says what it saw: losses, whole
weights at the end, and facts about the model on the way. Only whole tensors are compared, because PyTorch cuts the rows
of a parameter evenly and this engine does not.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.harness.models import inputs, three_blocks
from tests.harness.oracle import whole

__all__ = [
    "SCENARIOS", "SINCE_2_15", "Outcome", "Scenario", "available", "blocks", "disagreements", "engine", "has_name",
    "layers", "outcome", "raises", "run_both", "scenario", "shard", "shows_dtensors", "train",
]  # fmt: skip

# Where the names come from: the one line that differs.
ENGINES = {"torch": "torch.distributed.fsdp", "ours": "megatron_fsdp"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a scenario saw on one rank.

    Attributes:
        losses: of this rank's data. weights: whole, by name. facts: anything else that has to be equal.
    """

    losses: tuple[float, ...]
    weights: dict[str, torch.Tensor]
    facts: tuple[object, ...] = ()


SINCE_2_15 = "GradientReductionHandle"
"""A name that PyTorch has from 2.15 on, for scenarios of what it does since."""

Body: TypeAlias = Callable[[Any], Outcome]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Code for both engines.

    Attributes:
        body: the code; its argument has the names of ``torch.distributed.fsdp``.
        num_ranks: it runs on. needs: attributes of that module, dotted, that it uses and older versions lack.
        tolerance: largest difference of a loss or a weight: fp32 rounding, or that of the dtype it computes in.
    """

    body: Body
    num_ranks: int = 2
    needs: str = "fully_shard"
    tolerance: float = 2e-6


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, **options: Any) -> Callable[[Body], Body]:
    """Enter a function under a name; ``options`` are fields of ``Scenario``."""

    def enter(body: Body) -> Body:
        assert name not in SCENARIOS
        SCENARIOS[name] = Scenario(body, **options)
        return body

    return enter


def engine(name: str) -> Any:
    """Return the module that one engine's names are imported from."""
    return importlib.import_module(ENGINES[name])


def has_name(path: str) -> bool:
    """Whether the installed ``torch.distributed.fsdp`` has a name, dotted for an attribute of a class."""
    found: Any = engine("torch")
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is not None


def available() -> list[str]:
    """Return the scenarios that the installed PyTorch has the names for."""
    return [name for name, each in SCENARIOS.items() if has_name(each.needs)]


def run_both(name: str) -> tuple[Outcome, Outcome]:
    """Run a scenario with PyTorch's engine, then with this one; call it on every rank."""
    results = []
    for each in ENGINES:
        torch.manual_seed(0)
        results.append(SCENARIOS[name].body(engine(each)))
    return results[0], results[1]


def disagreements(name: str, theirs: Outcome, ours: Outcome) -> list[str]:
    """Return one line for everything that differs, or that says nothing because it cannot differ."""
    tolerance = SCENARIOS[name].tolerance
    found = [
        f"loss {index}: {a} and {b}"
        for index, (a, b) in enumerate(zip(theirs.losses, ours.losses, strict=True))
        if not abs(a - b) <= tolerance
    ]
    if theirs.weights.keys() != ours.weights.keys():
        return [*found, f"weights: {sorted(theirs.weights)} and {sorted(ours.weights)}"]
    for key, weight in theirs.weights.items():
        worst = float((weight.float() - ours.weights[key].float()).abs().max())
        if weight.dtype != ours.weights[key].dtype or not worst <= tolerance:
            found.append(f"{key} is off by {worst:.3g}; {weight.dtype} and {ours.weights[key].dtype}")
    if theirs.facts != ours.facts:
        found.append(f"facts: {theirs.facts} and {ours.facts}")
    return found


# ---------------------------------------------------------------- what scenarios are made of


def blocks() -> Any:
    """Build three blocks of different sizes, the same ones each time."""
    torch.manual_seed(0)
    return three_blocks()


def layers(model: Any) -> list[Any]:
    """Return the layers of ``blocks()``."""
    return list(model.layers)


def shard(fsdp: Any, **options: Any) -> Any:
    """Build ``blocks()`` and shard each layer and the model, as FSDP2's tutorial does."""
    model = blocks()
    for layer in layers(model):
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(model, **options)
    return model


def train(
    model: nn.Module,
    *,
    steps: int = 3,
    microbatches: int = 1,
    before: Callable[[nn.Module, bool], None] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dtype: torch.dtype = torch.float32,
    loss_of: Callable[[Any, int], torch.Tensor] | None = None,
) -> list[float]:
    """Train on this rank's data and return its losses.

    Args:
        before: called with the model, and whether it is the last, before each microbatch.
        loss_of: the model at a step; its mean square by default.
    """
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for index in range(steps * microbatches):
        is_last = index % microbatches == microbatches - 1
        if before is not None:
            before(model, is_last)
        loss = (
            model(inputs(dist.get_rank(), index).to(dtype)).float().square().mean()
            if loss_of is None
            else loss_of(model, index)
        )
        loss.backward()
        losses.append(loss.item())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def outcome(model: nn.Module, losses: list[float], *facts: object) -> Outcome:
    """Return losses and facts together with the whole weights; every rank calls it."""
    return Outcome(tuple(losses), {name: whole(value, value) for name, value in model.state_dict().items()}, facts)


def shows_dtensors(model: nn.Module) -> tuple[bool, ...]:
    """Whether each parameter is a (sharded) DTensor now, or a plain, whole tensor."""
    return tuple(isinstance(parameter, DTensor) for parameter in model.parameters())


def raises(action: Callable[[], object], *errors: type[Exception]) -> bool:
    """Whether ``action`` raises one of ``errors``."""
    try:
        action()
    except errors:
        return True
    return False
