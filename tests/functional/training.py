"""One training run, sharded and replicated, and the comparison of the two that every parity test rests on."""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard_optimizer, microbatch, no_sync
from tests.functional.models import (
    NUM_BLOCKS,
    Model,
    draw_tokens,
    loss_of,
    make_mesh,
    make_model,
    shard_model,
    whole_state,
)

NUM_MICROBATCHES = 2
# Between the smallest and the largest norm that these runs meet: some steps are clipped, others are not.
MAX_NORM = 0.45


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
        strategy: classmethod of ``Placements``. mesh_shape: its product is the number of ranks.
        num_blocks: of the model. optimizer: class in ``torch.optim``. options: its arguments.
        is_adapted: whether ``fully_shard_optimizer`` is called. own_dtype: of the parameters before sharding.
    """

    strategy: str = "optim_grads_params"
    mesh_shape: tuple[int, ...] = (2,)
    num_steps: int = 20
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


def train_sharded(recipe: Recipe, fault: Callable[[], AbstractContextManager[None]] = nullcontext) -> History:
    """Train on this rank's share of the data; call it on every rank.

    Args:
        recipe: what to train and how.
        fault: makes the block in which the model is sharded and trained; the weights are read after it.
    """
    with fault():
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
        for index in range(NUM_MICROBATCHES):
            with _announced(recipe, model, is_last=index == NUM_MICROBATCHES - 1):
                tokens = draw_tokens(rank, step, index)
                loss = loss_of(model(tokens), tokens)
                (loss / NUM_MICROBATCHES).backward()
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
        for index in range(NUM_MICROBATCHES):
            batches = [draw_tokens(rank, step, index) for rank in range(recipe.num_ranks)]
            loss = torch.stack([loss_of(forward(tokens), tokens) for tokens in batches]).mean()
            (loss / NUM_MICROBATCHES).backward()
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
