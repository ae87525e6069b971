"""Sharded training equals replicated training for models, ways to shard and ways to train that are drawn at random.

Twenty examples, the same in every run. ``HYPOTHESIS_PROFILE=nightly`` draws two hundred new ones.
"""

import copy
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import hypothesis
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dbuffer import guard_released_storage
from megatron_fsdp import FsdpError, FsdpModule, clip_grad_norm_, fully_shard_optimizer, microbatch, no_sync
from tests.functional.random_models import (
    BATCH,
    COMPOSITES,
    POLICIES,
    SHAPES,
    WIDTH,
    Description,
    Part,
    Wrap,
    build,
    parts_with_paths,
    refused_parameter,
    shard,
)
from tests.harness import run_ranks

hypothesis.settings.register_profile(
    "nightly", hypothesis.settings.get_profile("suite"), derandomize=False, max_examples=200
)
IS_NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"

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
    optimizers = [_optimizer(example, each) for each in (model, oracle)]
    has_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if example.is_adapted and has_sharded:
        fully_shard_optimizer(optimizers[0])
    for module in model.modules():
        if isinstance(module, FsdpModule):
            module.set_reshard_after_backward(not example.keeps_weights)
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for step in range(NUM_STEPS):
        for index in range(example.microbatches):
            is_last = index == example.microbatches - 1
            with _announced(example, model, is_last), guard_released_storage():
                mine = _backward(example, model, rank, step, index)
            theirs = [_backward(example, oracle, other, step, index, len(ranks)) for other in ranks]
            yield from _apart(f"step {step}, loss {index}", mine, theirs[rank])
        _reduce_plain_gradients(model)
        norms = [_clip(example, each) for each in (model, oracle)]
        yield from _apart(f"step {step}, norm", norms[0], norms[1])
        yield from _compare(f"step {step}, gradient", model, oracle, is_gradient=True)
        for optimizer in optimizers:
            optimizer.step()
            if example.zero_grad:
                optimizer.zero_grad(set_to_none=example.zero_grad == "none")
        yield from _compare(f"step {step}, weight", model, oracle)
        if example.evaluation:
            yield from _apart(f"step {step}, output", *(_evaluate(example, each, step) for each in (model, oracle)))
        if example.is_thawing:
            _thaw(model)
            _thaw(oracle)


def _data(rank: int, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(1 + 1000 * step + 100 * index + rank)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x.requires_grad_(), torch.randint(0, 100, (BATCH,), generator=generator), rank + step + index


def _backward(
    example: Example, model: nn.Module, rank: int, step: int, index: int, num_ranks: int = 1
) -> torch.Tensor:
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


def _optimizer(example: Example, model: nn.Module) -> torch.optim.Optimizer:
    if example.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # With the usual epsilon a gradient that is zero but for rounding would move its weight as far as any other.
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=0.1, weight_decay=0.0)


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


def _reduce_plain_gradients(model: nn.Module) -> None:
    """Average the gradients of parameters that no unit owns, as their owner has to."""
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _clip(example: Example, model: nn.Module) -> torch.Tensor:
    if not example.clip:
        return torch.zeros(())
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if example.clip == "ours" and is_sharded:
        return clip_grad_norm_(model, MAX_NORM)
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _thaw(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        # The last one keeps the gradient of every backward from being empty.
        if number and number % 3 == 0 and parameter.is_floating_point():
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None


# ---------------------------------------------------------------- comparison


def _compare(what: str, model: nn.Module, oracle: nn.Module, is_gradient: bool = False) -> Iterator[str]:
    found, wanted = dict(model.named_parameters()), dict(oracle.named_parameters())
    if found.keys() != wanted.keys():
        yield f"{what}: names are {sorted(found)}, wanted {sorted(wanted)}"
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


# ---------------------------------------------------------------- drawing


def _drawn_dtype(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a dtype and what is frozen: weights of less precision than fp32 are, so that rounding does not matter."""
    return draw(
        st.sampled_from(
            [("float32", "")] * 6
            + [("float32", "first"), ("float32", "all"), ("float64", ""), ("float64", "first"), ("bfloat16", "all")]
            + [("float16", "all")]
        )
    )


@st.composite
def leaves(draw: st.DrawFn) -> Part:
    kind = draw(st.sampled_from(["linear"] * 4 + [kind for kind in SHAPES if kind not in ("linear", "scalar")] * 2 + ["scalar"]))
    dtype, frozen = _drawn_dtype(draw)
    size = draw(st.integers(1, 7))
    is_ignored = draw(st.integers(0, 9)) == 9
    return Part(kind, (), size, dtype, frozen, draw(st.integers(0, 7)) == 7, is_ignored)


@st.composite
def parts(draw: st.DrawFn, depth: int, is_by_turn: bool = False) -> Part:
    """Draw a module with up to ``depth`` modules around its leaves."""
    if not depth or draw(st.integers(0, 2)) == 0:
        if not is_by_turn and draw(st.integers(0, 9)) == 9:
            return Part("again", size=draw(st.integers(0, 9)))
        return draw(leaves())
    kind, size = draw(st.sampled_from(list(COMPOSITES))), draw(st.integers(1, 3))
    inside = is_by_turn or kind == "by turn" or (kind == "pick" and size == 2)
    below = draw(st.lists(parts(depth - 1, inside), min_size=1, max_size=3))
    return Part(kind, tuple(below), size, is_replicated=draw(st.integers(0, 19)) == 19)


def _wrappable(part: Part, path: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the paths of modules that all ranks call, siblings together, children first."""
    if part.kind == "by turn" or (part.kind == "pick" and part.size == 2):
        return
    inner = ".".join([*filter(None, [path]), *(["both"] if part.kind == "pick" else [])])
    paths = [".".join([*filter(None, [inner]), "parts", str(number)]) for number in range(len(part.parts))]
    for below, below_path in zip(part.parts, paths, strict=True):
        yield from _wrappable(below, below_path)
    yield tuple(path for path, below in zip(paths, part.parts, strict=True) if below.kind != "again")
    if part.kind == "pick":
        yield (inner,)


@st.composite
def wraps(draw: st.DrawFn, part: Part, mesh: tuple[int, ...], policies: Sequence[str]) -> tuple[Wrap, ...]:
    """Draw which modules become units, alone or as lists, and their options."""
    one = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    strategies = one if len(mesh) == 1 else ["hsdp", "hfsdp"]
    usual = draw(st.sampled_from(strategies))
    result = []
    has_aliases = any(below.kind == "again" for _, below in parts_with_paths(part))
    for siblings in [*_wrappable(part), ("",)]:
        chosen = [path for path in siblings if draw(st.integers(0, 2 if path else 5))]
        as_list = len(chosen) > 1 and not has_aliases and draw(st.integers(0, 2)) == 0
        for paths in [tuple(chosen)] if as_list else [(path,) for path in chosen]:
            strategy = usual if draw(st.integers(0, 3)) else draw(st.sampled_from(strategies))
            result.append(
                Wrap(
                    paths,
                    strategy,
                    draw(st.sampled_from([None, None, True, False, 1, mesh[-1]])),
                    draw(st.sampled_from(policies)),
                    draw(st.sampled_from(["slices", "slices", "whole", "whole matrices"])),
                    strategy in ("optim_grads_params", "hsdp", "hfsdp") and draw(st.integers(0, 4)) == 4,
                )
            )
    return tuple(result)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    below = draw(st.lists(parts(2), min_size=1, max_size=4))
    part = Part("gated", tuple(below), draw(st.integers(1, 3)))
    mesh = draw(st.sampled_from([(2,), (2,), (2,), (1, 2), (2, 1)]))
    is_thawing, is_adapted = draw(st.booleans()), draw(st.booleans())
    # Unfrozen weights need main weights of the policy's dtype, and stock optimizers gradients of the weights'.
    left_out = {"fp64 main weights"} if is_thawing else set()
    left_out |= set() if is_adapted else {"fp64 gradients"}
    policies = ["none"] * 4 + [name for name in POLICIES if name not in left_out]
    linear = [(path, one) for path, one in parts_with_paths(part) if one.kind == "linear"]
    alike = [(a, b) for a, one in linear for b, other in linear if a < b and (one.size, one.dtype) == (other.size, other.dtype)]
    ties = draw(st.lists(st.sampled_from(alike), max_size=1)) if alike and draw(st.booleans()) else []
    chosen = draw(wraps(part, mesh, policies))
    return Example(
        part,
        chosen,
        tuple(ties),
        mesh,
        draw(st.sampled_from(["SGD", "AdamW"])),
        is_adapted,
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["", "microbatch", "no_sync", "flag"])),
        draw(st.sampled_from(["none", "none", "zero", ""])),
        draw(st.sampled_from(["", "ours"])),
        draw(st.sampled_from(["", "no_grad", "inference", "eval"])),
        draw(st.sampled_from([1, 1, 2])),
        is_thawing,
        draw(st.integers(0, 4)) == 4,
    )


def check(example: Example) -> None:
    """Train an example on two ranks; fail with what differs, and with the example in a form to paste."""
    found = run_ranks(NUM_RANKS, differences, example, timeout=20)
    assert found == [[]] * NUM_RANKS, f"{found[0][:5]}\ncheck({example!r})"


@hypothesis.settings(hypothesis.settings.get_profile("nightly" if IS_NIGHTLY else "suite"), max_examples=200 if IS_NIGHTLY else 20)
@given(examples())
def test_a_random_model_sharded_in_a_random_way_trains_like_the_replicated_one(example: Example) -> None:
    check(example)
