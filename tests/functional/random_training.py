"""A training run that is described by plain data, sharded and replicated, and how the two differ."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dbuffer import guard_released_storage
from megatron_fsdp import FsdpError, FsdpModule, clip_grad_norm_, fully_shard_optimizer, microbatch, no_sync
from tests.functional.random_models import BATCH, WIDTH, Description, Part, Wrap, build, refused_parameter, shard

NUM_RANKS = 2
NUM_STEPS = 2
# fp32 rounding of values near 1, summed over ranks, calls and microbatches in another order.
TOLERANCE = 1e-5
MAX_NORM = 0.3


@dataclass(frozen=True, repr=False)
class Example(Description):
    """A model, how it is sharded, and how it is trained.

    Attributes:
        wraps: calls of ``fully_shard``, in order. ties: pairs of linear leaves that share a weight.
        mesh: shape of the device mesh. optimizer: "SGD" with momentum or "AdamW".
        is_adapted: ``fully_shard_optimizer`` is called.
        accumulation: how microbatches are told apart: "", "microbatch", "no_sync" or "flag".
        zero_grad: what happens to gradients between steps: "none", "zero" or "" for nothing.
        clip: whose function clips: "ours", "torch" or "" for nobody's.
        evaluation: what is done between steps: "no_grad", "inference", "eval" or "" for nothing.
        num_forwards: before each backward. is_thawing: every third parameter is frozen or unfrozen after a step.
        keeps_weights: ``set_reshard_after_backward(False)``.
    """

    part: Part
    wraps: tuple[Wrap, ...] = (Wrap(("",)),)
    ties: tuple[tuple[str, str], ...] = ()
    mesh: tuple[int, ...] = (2,)
    optimizer: str = "SGD"
    is_adapted: bool = False
    microbatches: int = 1
    accumulation: str = ""
    zero_grad: str = "none"
    clip: str = ""
    evaluation: str = ""
    num_forwards: int = 1
    is_thawing: bool = False
    keeps_weights: bool = False


# ---------------------------------------------------------------- training


def differences(example: Example) -> list[str]:
    """Train both ways on this rank, and return how they differ; call it on every rank."""
    torch.manual_seed(0)
    oracle = build(example.part, example.ties)
    model = copy.deepcopy(oracle)
    refused = refused_parameter(oracle, example.part, example.wraps)
    mesh = init_device_mesh("cpu", example.mesh, mesh_dim_names=("outer", "inner")[-len(example.mesh) :])
    try:
        shard(model, example.part, example.wraps, mesh)
    except FsdpError as error:
        if refused is not None and f"{refused}'" in str(error):
            return []
        return [f"fully_shard raised {type(error).__name__}: {error}; refused should be {refused}"]
    if refused is not None:
        return [f"fully_shard took {refused!r}, which is tied to another unit's or has no rows"]
    return list(_train_both(example, model, oracle))


def _train_both(example: Example, model: nn.Module, oracle: nn.Module) -> Iterator[str]:
    # Modules show others while their weights are gathered.
    mine, theirs = dict(model.named_parameters()), dict(oracle.named_parameters())
    if mine.keys() != theirs.keys():
        yield f"names are {sorted(mine)}, wanted {sorted(theirs)}"
    optimizers = [_optimizer(example, each.values()) for each in (mine, theirs)]
    _set_up(example, model, optimizers[0])
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for step in range(NUM_STEPS):
        for index in range(example.microbatches):
            is_last = index == example.microbatches - 1
            with _announced(example, model, is_last), guard_released_storage():
                loss = _backward(example, model, rank, step, index)
            losses = [_backward(example, oracle, other, step, index, len(ranks)) for other in ranks]
            yield from _apart(f"step {step}, loss {index}", loss, losses[rank])
        _reduce_plain_gradients(mine.values())
        yield from _apart(f"step {step}, norm", _clip(example, model, mine), _clip(example, oracle, theirs))
        yield from _compare(f"step {step}, gradient", mine, theirs, is_gradient=True)
        for optimizer in optimizers:
            optimizer.step()
            if example.zero_grad:
                optimizer.zero_grad(set_to_none=example.zero_grad == "none")
        yield from _compare(f"step {step}, weight", mine, theirs)
        if example.evaluation:
            yield from _apart(f"step {step}, output", *(_evaluate(example, each, step) for each in (model, oracle)))
        if example.is_thawing:
            _thaw(mine.values())
            _thaw(theirs.values())


def _set_up(example: Example, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if example.is_adapted and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        fully_shard_optimizer(optimizer)
    for module in model.modules():
        if isinstance(module, FsdpModule):
            module.set_reshard_after_backward(not example.keeps_weights)


def _data(rank: int, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(1 + 1000 * step + 100 * index + rank)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x.requires_grad_(), torch.randint(0, 100, (BATCH,), generator=generator), rank + step + index


def _backward(example: Example, model: nn.Module, rank: int, step: int, index: int, num_ranks: int = 1) -> torch.Tensor:
    loss = torch.zeros(())
    for number in range(example.num_forwards):
        output = model(*_data(rank, step, index + 10 * number))
        loss = loss + (output * output.sin()).mean() + output.mean()
    (loss / (example.microbatches * num_ranks)).backward()
    return loss.detach()


def _evaluate(example: Example, model: nn.Module, step: int) -> torch.Tensor:
    x, tokens, turn = _data(dist.get_rank(), step, 77)
    guard = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "eval": nullcontext}[example.evaluation]
    model.train(example.evaluation != "eval")
    with guard():
        output = model(x, tokens, turn)
    model.train()
    assert isinstance(output, torch.Tensor)
    return output.detach().clone()


def _optimizer(example: Example, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if example.optimizer == "SGD":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    # With the usual epsilon a gradient that is zero but for rounding would move its weight as far as any other.
    return torch.optim.AdamW(parameters, lr=0.05, eps=0.1, weight_decay=0.0)


def _announced(example: Example, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    has_units = any(isinstance(module, FsdpModule) for module in model.modules())
    if example.accumulation == "microbatch":
        return microbatch(model, is_last)
    if example.accumulation == "no_sync" and not is_last and has_units:
        return no_sync(model)
    for module in model.modules():
        if isinstance(module, FsdpModule):
            module.set_requires_gradient_sync(is_last or example.accumulation != "flag", recurse=False)
    return nullcontext()


def _reduce_plain_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients of parameters that no unit owns, as their owner has to."""
    for parameter in parameters:
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _clip(example: Example, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> torch.Tensor:
    if not example.clip:
        return torch.zeros(())
    if example.clip == "ours" and any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return clip_grad_norm_(model, MAX_NORM)
    norm = nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _thaw(parameters: Iterable[nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters):
        # The first one keeps the gradient of every backward from being empty.
        if number and number % 3 == 0 and parameter.dtype in (torch.float32, torch.float64):
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None


# ---------------------------------------------------------------- comparison


def _compare(
    what: str, found: Mapping[str, nn.Parameter], wanted: Mapping[str, nn.Parameter], is_gradient: bool = False
) -> Iterator[str]:
    for name, parameter in found.items():
        mine, theirs = (each.grad if is_gradient else each.detach() for each in (parameter, wanted[name]))
        yield from _apart(f"{what} of {name}", _whole(mine, parameter), _whole(theirs, parameter))


def _whole(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if tensor is None:
        return torch.zeros(like.shape)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _apart(what: str, mine: torch.Tensor, theirs: torch.Tensor) -> Iterator[str]:
    if mine.shape != theirs.shape:
        yield f"{what} is {tuple(mine.shape)}, wanted {tuple(theirs.shape)}"
    elif mine.numel():
        worst = float((mine.double() - theirs.double()).abs().max())
        if not worst <= TOLERANCE * max(1.0, float(theirs.double().abs().max())):
            yield f"{what} is off by {worst:.3g}"
