"""The oracle: the same model, whole and in one process, trained on the data of every rank.

``compare`` trains a ``Case`` both ways: it says how to build and shard a model, and the loss of a rank at a step.
A ``Recipe`` is a longer run of the token model: ``train_sharded``, ``train_replicated``, ``disagreements`` of the two.
"""

import copy
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dbuffer import Flat, Partial, Replicate, guard_released_storage
from megatron_fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    no_sync,
)
from tests.harness.models import NUM_BLOCKS, Model, Stack, draw_tokens, loss_of, make_mesh, make_model

_REPLICATED, _SUMS, _CUT = (Replicate(), Replicate()), (Partial(), Partial()), (Flat(), Flat())
# By what tests call them; the names are classmethods of ``Placements`` but for the last two.
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
# Between the smallest and the largest norm that these runs meet: some steps are clipped, others are not.
MAX_NORM = 0.45


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a ``Model`` and the layers of a ``Stack``, whose other parts their root owns; then the model.

    Of another model every child, and every entry of a child that is a list.
    """
    own = model.blocks if isinstance(model, Model) else model.layers if isinstance(model, Stack) else None
    for child in model.children() if own is None else [own]:
        yield from child if isinstance(child, nn.ModuleList) else (child,)
    yield model


def sharded(model: nn.Module, strategy: str | None = None, **options: Any) -> Any:
    """Make units of ``parts_of`` a model, and return it.

    Args:
        strategy: a key of ``STRATEGIES``, over all ranks (halves of them first, of two axes); by default what
            ``fully_shard`` does by default.
        options: of ``fully_shard``; "mesh" may be a shape.
    """
    mesh = options.pop("mesh", None)
    if strategy is not None:
        options["placements"] = STRATEGIES[strategy]
        size = dist.get_world_size()
        mesh = mesh or ((2, size // 2) if len(STRATEGIES[strategy].dp_axes) == 2 else (size,))
    if mesh is not None:
        options["mesh"] = make_mesh(mesh) if isinstance(mesh, tuple) else mesh
    for part in parts_of(model):
        fully_shard(part, **options)
    return model


def sharded_model(strategy: str = "optim_grads_params", seed: int = 0, **options: Any) -> Model:
    """Make the token model from a seed and shard it as ``sharded`` does."""
    model: Model = sharded(make_model(seed), strategy, **options)
    return model


def shard_model(
    model: Model, mesh: DeviceMesh, strategy: str = "optim_grads_params", policy: MixedPrecisionPolicy | None = None
) -> Model:
    """Make every block a unit, and a unit of the rest; ``strategy`` is a key of ``STRATEGIES``."""
    sharded(model, strategy, mesh=mesh, mp_policy=policy)
    return model


def shard_each(model: nn.Module) -> None:
    """Make a unit of every direct child (of every entry, for a ModuleList), and one of the model."""
    sharded(model)


def shard_layers(model: nn.Module, **options: Any) -> None:
    """Shard every layer of a ``Stack`` with the same options, and the stack with the mesh and placements among them."""
    assert isinstance(model, Stack)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, options.get("mesh"), options.get("placements"))


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
        optimizer: None to leave the gradients of all steps in the model.
        ranks: by default this one for a sharded model, and all of them for the whole model beside it.
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
    """Return a full copy of a tensor that may be sharded; zeros where there is none."""
    if tensor is None:
        return torch.zeros(like.shape)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# ---------------------------------------------------------------- any model, beside its whole copy


Losses: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One model to train both ways.

    Attributes:
        build: makes the model.
        loss: of one rank's data at one step, ``loss(model, rank, step)``; it runs forward. Of several losses one
            backward each is run, in their order, on graphs that are kept.
        shard: applies ``fully_shard`` in place.
        prepare: called on each of the two models at the start of a step, before forward.
        optimizer: over the parameters that require gradients.
        steps: optimizer steps to train.
        is_guarded: whether use of released storage is an error; the guard keeps torch.compile from compiling.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Losses]
    shard: Callable[[nn.Module], None] = shard_each
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
        """Whether gradients and weights agree to fp32 rounding, and had something to agree on."""
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


# ---------------------------------------------------------------- long runs of the token model


class Clip(enum.Enum):
    """Whose function clips the gradients."""

    OURS = "megatron_fsdp.clip_grad_norm_"
    STOCK = "torch.nn.utils.clip_grad_norm_"


class Accumulation(enum.Enum):
    """How the microbatches of a step are told apart, if at all."""

    MICROBATCH = "microbatch()"
    UNANNOUNCED = "backward alone"
    NO_SYNC = "no_sync() but for the last"


class ZeroGrad(enum.Enum):
    """What happens to gradients between steps."""

    TO_NONE = "set_to_none=True"
    TO_ZERO = "set_to_none=False"
    NEVER = "kept, so that steps accumulate"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run.

    Attributes:
        strategy: a key of ``STRATEGIES``. mesh_shape: its product is the number of ranks.
        num_microbatches: of a step. num_blocks: of the model. optimizer: class in ``torch.optim``. options: its own.
        is_adapted: whether ``fully_shard_optimizer`` is called. own_dtype: of the parameters before sharding.
    """

    strategy: str = "optim_grads_params"
    mesh_shape: tuple[int, ...] = (2,)
    num_steps: int = 20
    num_microbatches: int = 2
    num_blocks: int = NUM_BLOCKS
    clip: Clip = Clip.OURS
    accumulation: Accumulation = Accumulation.MICROBATCH
    zero_grad: ZeroGrad = ZeroGrad.TO_NONE
    optimizer: str = "AdamW"
    options: Mapping[str, object] = field(default_factory=lambda: {"lr": 0.01, "weight_decay": 0.1})
    is_adapted: bool = True
    policy: MixedPrecisionPolicy | None = None
    own_dtype: torch.dtype = torch.float32

    @property
    def num_ranks(self) -> int:
        """The number of data-parallel ranks."""
        return torch.Size(self.mesh_shape).numel()


@dataclass(frozen=True, slots=True)
class History:
    """What a run shows from outside.

    Attributes:
        losses: one per microbatch, and that of one more forward after the last step; a rank's own in a sharded run.
        norms: the gradient norm before clipping, one per step.
        weights: the whole weights that the optimizer left, and the buffers, by name.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest absolute differences of weights and norms, and of losses."""

    weight: float = 1e-5
    norm: float = 1e-5
    loss: float = 1e-5


def train_sharded(recipe: Recipe) -> History:
    """Train on this rank's share of the data; call it on every rank."""
    model = make_model(num_blocks=recipe.num_blocks).to(recipe.own_dtype)
    shard_model(model, make_mesh(recipe.mesh_shape), recipe.strategy, recipe.policy)
    losses, norms = _train(recipe, model)
    return History(losses, norms, whole_state(model))


def _train(recipe: Recipe, model: Model) -> tuple[tuple[float, ...], tuple[float, ...]]:
    rank = dist.get_rank()
    optimizer = _make_optimizer(recipe, model)
    if recipe.is_adapted:
        fully_shard_optimizer(optimizer)
    losses, norms = [], []
    for step in range(recipe.num_steps):
        for index in range(recipe.num_microbatches):
            with _announced(recipe, model, is_last=index == recipe.num_microbatches - 1):
                tokens = draw_tokens(rank, step, index)
                loss = loss_of(model(tokens), tokens)
                (loss / recipe.num_microbatches).backward()
            losses.append(loss.item())
        norms.append(_clip(recipe.clip, model))
        optimizer.step()
        _zero_grad(recipe, optimizer)
    tokens = draw_tokens(rank, recipe.num_steps)
    losses.append(loss_of(model(tokens), tokens).item())
    return tuple(losses), tuple(norms)


def train_replicated(recipe: Recipe) -> History:
    """Train one whole model on the data of all ranks; FP32 weights, cast for compute where the recipe asks for it."""
    model = make_model(num_blocks=recipe.num_blocks).to(recipe.own_dtype).float()
    param_dtype = recipe.policy.param_dtype if recipe.policy is not None else None
    forward = partial(_forward_in, model, param_dtype or recipe.own_dtype)
    optimizer = _make_optimizer(recipe, model)
    losses, norms = [], []
    for step in range(recipe.num_steps):
        for index in range(recipe.num_microbatches):
            batches = [draw_tokens(rank, step, index) for rank in range(recipe.num_ranks)]
            loss = torch.stack([loss_of(forward(tokens), tokens) for tokens in batches]).mean()
            (loss / recipe.num_microbatches).backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        _zero_grad(recipe, optimizer)
    batches = [draw_tokens(rank, recipe.num_steps) for rank in range(recipe.num_ranks)]
    losses.append(torch.stack([loss_of(forward(tokens), tokens) for tokens in batches]).mean().item())
    return History(tuple(losses), tuple(norms), whole_state(model))


def disagreements(ranks: Sequence[History], oracle: History, tolerance: Tolerance | None = None) -> list[str]:
    """Compare what every rank saw with a replicated run: one line per quantity that is further away than tolerated.

    A value that is not a number on either side is a disagreement.
    """
    tolerance = tolerance or Tolerance()
    mean_losses = [sum(losses) / len(ranks) for losses in zip(*(history.losses for history in ranks), strict=True)]
    found = list(_apart("loss", mean_losses, oracle.losses, tolerance.loss))
    for rank, history in enumerate(ranks):
        found += _apart(f"rank {rank}: norm", history.norms, oracle.norms, tolerance.norm)
        if history.weights.keys() != oracle.weights.keys():
            found.append(f"rank {rank}: weights are {sorted(history.weights)}, wanted {sorted(oracle.weights)}")
            continue
        for name, weight in history.weights.items():
            worst = (weight.float() - oracle.weights[name].float()).abs().max().item()
            if not worst <= tolerance.weight:
                found.append(f"rank {rank}: {name} is off by {worst:.3g}, wanted <= {tolerance.weight:g}")
    return found


def _apart(what: str, found: Sequence[float], wanted: Sequence[float], tolerance: float) -> Iterator[str]:
    if len(found) != len(wanted):
        yield f"{what}: {len(found)} values, wanted {len(wanted)}"
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=False)):
        if not abs(mine - theirs) <= tolerance:
            yield f"{what} {index} is {mine}, wanted {theirs} within {tolerance:g}"


def _make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, recipe.optimizer)(model.parameters(), **recipe.options)
    return optimizer


def _announced(recipe: Recipe, model: Model, *, is_last: bool) -> AbstractContextManager[None]:
    if recipe.accumulation is Accumulation.MICROBATCH:
        return microbatch(model, is_last)
    if recipe.accumulation is Accumulation.NO_SYNC and not is_last:
        return no_sync(model)
    return nullcontext()


def _clip(clip: Clip, model: nn.Module) -> float:
    if clip is Clip.OURS:
        return clip_grad_norm_(model, MAX_NORM).item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _zero_grad(recipe: Recipe, optimizer: torch.optim.Optimizer) -> None:
    if recipe.zero_grad is not ZeroGrad.NEVER:
        optimizer.zero_grad(set_to_none=recipe.zero_grad is ZeroGrad.TO_NONE)


def _forward_in(model: nn.Module, dtype: torch.dtype, tokens: torch.Tensor) -> torch.Tensor:
    compute = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    logits = torch.func.functional_call(model, compute, (tokens,))
    assert isinstance(logits, torch.Tensor)
    return logits
