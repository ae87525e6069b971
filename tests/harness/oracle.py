"""The oracle: the same model, whole and in one process, trained on the data of every rank.

``compare`` trains a ``Case`` both ways: it says how to build and shard a model, and the loss of a rank at a step.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import Flat, Partial, Replicate
from megatron_fsdp import (
    FsdpModule,
    Placements,
    fully_shard,
    load_checkpoint,
)
from tests.harness.models import Model, Stack, draw_tokens, loss_of, make_mesh, make_model
from tests.harness.storage_guard import guard_released_storage

_REPLICATED, _SUMS, _CUT = (Replicate(), Replicate()), (Partial(), Partial()), (Flat(), Flat())
# By their names in tests; all but the last two are classmethods of ``Placements``.
STRATEGIES = {
    "no_shard": Placements.no_shard(0),
    "optim": Placements.optim(0),
    "optim_grads": Placements.optim_grads(0),
    "optim_grads_params": Placements.optim_grads_params(0),
    "hsdp": Placements.hsdp(0, 1),
    "hfsdp": Placements.hfsdp(0, 1),
    "no_shard on two axes": Placements((0, 1), _REPLICATED, _SUMS, _REPLICATED),
    "optim_grads_params on two axes": Placements((0, 1), _CUT, _CUT, _CUT),
}
ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a ``Model`` and the layers of a ``Stack``, whose other parts their root owns; then the model.

    For another model, yield every child, and every entry of a child that is a list.
    """
    own = model.blocks if isinstance(model, Model) else model.layers if isinstance(model, Stack) else None
    for child in model.children() if own is None else [own]:
        yield from child if isinstance(child, nn.ModuleList) else (child,)
    yield model


def sharded(
    model: nn.Module,
    strategy: str | None = None,
    *,
    units: Callable[[Any], Iterable[Any]] | None = None,
    **options: Any,
) -> Any:
    """Make units of ``parts_of`` a model, or of the given modules and the model, and return the model.

    Args:
        strategy: a key of ``STRATEGIES``, over all ranks (halves of them first, of two axes); by default what
            ``fully_shard`` does by default.
        units: returns the modules of a model that become units before the model does; a list becomes one unit.
        options: of ``fully_shard``; "mesh" may be a shape.
    """
    mesh = options.pop("mesh", None)
    if strategy is not None:
        options["placements"] = STRATEGIES[strategy]
        size = dist.get_world_size()
        mesh = mesh or ((2, size // 2) if len(STRATEGIES[strategy].dp_axes) == 2 else (size,))
    if mesh is not None:
        options["mesh"] = make_mesh(mesh) if isinstance(mesh, tuple) else mesh
    for part in parts_of(model) if units is None else (*units(model), model):
        fully_shard(part, **options)
    return model


def sharded_model(strategy: str = "optim_grads_params", seed: int = 0, **options: Any) -> Model:
    """Make the token model from a seed and shard it as ``sharded`` does."""
    model: Model = sharded(make_model(seed), strategy, **options)
    return model


def units_of(model: nn.Module) -> list[FsdpModule]:
    """Return all sharded modules, outermost first."""
    return [module for module in model.modules() if isinstance(module, FsdpModule)]


def token_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of the token model on one rank's data."""
    tokens = draw_tokens(rank, step)
    return loss_of(model(tokens), tokens)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    steps: Iterable[int] = range(3),
    ranks: Iterable[int] | None = None,
    *,
    loss: Callable[[Any, int, int], torch.Tensor] = token_loss,
    max_norm: float | None = None,
) -> list[float]:
    """Take a step per entry of ``steps`` on the mean of ``loss(model, rank, step)`` over ``ranks``; return the means.

    Args:
        optimizer: if None, the gradients of all steps stay in the model.
        ranks: by default this rank for a sharded model, and all ranks for the whole model.
        max_norm: to clip to, by torch's function.
    """
    if ranks is None:
        ranks = [dist.get_rank()] if units_of(model) else range(dist.get_world_size())
    ranks, losses = list(ranks), []
    for step in steps:
        losses.append(0.0)
        for rank in ranks:
            found = loss(model, rank, step) / len(ranks)
            found.backward()
            losses[-1] += found.item()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def resumed(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: str, steps: Iterable[int]
) -> dict[str, torch.Tensor]:
    """Load a checkpoint, ``train`` on, and return the whole state that this ends in."""
    load_checkpoint(model, optimizer, path)
    train(model, optimizer, steps)
    return whole_state(model)


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all entries of the state dict as whole tensors; on a sharded model, every rank calls it."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def differing(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float = 0.0
) -> list[str]:
    """Return the names that only one side has, and those whose values are further apart than ``tolerance``."""
    return [
        name
        for name in found.keys() | wanted.keys()
        if name not in found
        or name not in wanted
        or found[name].shape != wanted[name].shape
        or not (found[name] - wanted[name]).abs().max() <= tolerance
    ]


def whole(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a full copy of a tensor that may be sharded; zeros for None."""
    if tensor is None:
        return torch.zeros(like.shape)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# ---------------------------------------------------------------- any model, against its whole copy


Losses: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model to train sharded and whole.

    Attributes:
        build: makes the model.
        loss: of one rank's data at one step, ``loss(model, rank, step)``; runs forward. If it returns several losses,
            each has its own backward, in this order, and graphs are kept.
        shard: applies ``fully_shard`` in place.
        prepare: called on each of the two models at the start of a step, before forward.
        optimizer: over the parameters that require gradients.
        steps: optimizer steps to train.
        is_guarded: whether use of released storage is an error; the guard keeps torch.compile from compiling.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Losses]
    shard: Callable[[nn.Module], object] = sharded
    prepare: Callable[[nn.Module, int], None] | None = None
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None
    steps: int = 3
    is_guarded: bool = True


@dataclass(frozen=True)
class Comparison:
    """How far a sharded run was from the oracle.

    Attributes:
        worst_gradient: largest |difference| of any gradient at any step; a missing one counts as zeros.
        worst_weight: largest |difference| of any weight after the last step.
        least_movement: the smallest change over training of any tensor that the oracle changed; shows that there was
            something to compare.
        disagreement: largest difference between this rank's own gradient and the oracle's: 0 would mean that a
            reduction left out could go unnoticed.
    """

    worst_gradient: float
    worst_weight: float
    least_movement: float
    disagreement: float

    @property
    def is_exact(self) -> bool:
        """True if there were gradients and weights to compare, and they agree to fp32 rounding."""
        is_telling = self.least_movement > 1e-4 and self.disagreement > 1e-4
        return is_telling and self.worst_gradient < 2e-6 and self.worst_weight < 2e-6


def compare(case: Case) -> Comparison:
    """Train a case sharded and whole; call it on every rank of a process group."""
    torch.manual_seed(0)
    oracle = case.build()
    model = copy.deepcopy(oracle)
    initial = [parameter.detach().clone() for parameter in oracle.parameters()]
    case.shard(model)
    make = case.optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizers = [make(p for p in m.parameters() if p.requires_grad) for m in (model, oracle)]
    worst_gradient = disagreement = 0.0
    for step in range(case.steps):
        for m in (model, oracle):
            if case.prepare is not None:
                case.prepare(m, step)
        alone = _lonely_gradients(case, oracle, step)
        with guard_released_storage() if case.is_guarded else nullcontext():
            _backward(case.loss(model, dist.get_rank(), step))
        for rank in range(dist.get_world_size()):
            _backward(case.loss(oracle, rank, step), 1 / dist.get_world_size())
        ours = [whole(p.grad, p) for p in model.parameters()]
        theirs = [whole(p.grad, p) for p in oracle.parameters()]
        worst_gradient = max(worst_gradient, _worst(ours, theirs))
        disagreement = max(disagreement, _worst(alone, theirs))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours = [whole(p, p) for p in model.parameters()]
    theirs = [whole(p, p) for p in oracle.parameters()]
    moved = [_worst([new], [old]) for new, old in zip(theirs, initial, strict=True)]
    return Comparison(worst_gradient, _worst(ours, theirs), min((m for m in moved if m), default=0.0), disagreement)


def _backward(losses: Losses, scale: float = 1.0) -> None:
    *earlier, last = losses if isinstance(losses, tuple) else (losses,)
    for loss in earlier:
        (loss * scale).backward(retain_graph=True)
    (last * scale).backward()


def _lonely_gradients(case: Case, oracle: nn.Module, step: int) -> list[torch.Tensor]:
    _backward(case.loss(oracle, dist.get_rank(), step))
    gradients = [whole(parameter.grad, parameter) for parameter in oracle.parameters()]
    oracle.zero_grad()
    return gradients


def _worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(ours, theirs, strict=True))
