"""Thirteen faults that were published in 2026 about gradients, norms and steps on several ranks, put back in.

Each of them trained with a falling loss. Those between what the ranks compute and ``.grad`` are measured by
``check_gradient_scale``; those before and after are for the comparison with one process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer.collectives import Part, all_reduce
from megatron_fsdp import (
    GradientScaleError,
    Muon,
    Placements,
    check_gradient_scale,
    clip_grad_norm_,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from megatron_fsdp.optim import grad_norm
from megatron_fsdp.optim.newton_schulz import Iteration
from megatron_fsdp.runtime.step import gradients
from megatron_fsdp.runtime.step.gradients import Reduction
from tests.functional.expert_parallel import rows, shard_experts
from tests.harness.models import WIDTH, Block, Stack
from tests.harness.oracle import whole

__all__ = ["GRADIENT_FAULTS", "STEP_FAULTS", "gradient_complaint", "step_differences"]

TOKENS = 36
"""Of a microbatch over all ranks: nine for each of four."""


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the output."""
    return model(x).square().mean()


# ---------------------------------------------------------------------- between the ranks' gradients and .grad


@contextlib.contextmanager
def divide_what_was_accumulated() -> Iterator[None]:
    """Divide the sum by the ranks with each microbatch, not the microbatch: ((g1 / D + g2) / D + g3) / D."""

    def accumulate(source: torch.Tensor, target: torch.Tensor, *, scale: float, overwrite: bool) -> None:
        target.copy_(source if overwrite else target + source).mul_(scale)

    with mock.patch.object(gradients, "accumulate", accumulate):
        yield


@contextlib.contextmanager
def double_in_groups_of_one() -> Iterator[None]:
    """Reduce into the input itself and accumulate on top where a group has one rank."""
    original = Reduction.start

    def twice(self: Reduction, works: Any) -> list[Part]:
        parts = original(self, works)
        if self._packed.mesh.size() == 1:
            self._packed.local_buffer.mul_(2)
        return parts

    with mock.patch.object(Reduction, "start", twice):
        yield


@contextlib.contextmanager
def norm_over_the_ranks_twice() -> Iterator[None]:
    """Sum the squares over the data-parallel ranks once more than they are spread."""

    def twice(tensor: torch.Tensor, axis: Any, op: str) -> None:
        all_reduce(tensor, axis, op)
        all_reduce(tensor, axis, op)

    with mock.patch.object(grad_norm, "all_reduce", twice):
        yield


def dense(*sizes: tuple[str, int]) -> tuple[Stack, Any]:
    """Return dense blocks over the first axis of a mesh, and the mesh."""
    names, shape = zip(*sizes, strict=True)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Stack(Block(), Block(hidden=3))
    for module in (*model.layers, model):
        fully_shard(module, mesh[names[0]], Placements.optim_grads_params(0))
    return model, mesh


def data_parallel() -> Stack:
    """Return dense blocks over all four ranks."""
    return dense(("dp", 4))[0]


def summed_over_tensor_parallel_ranks() -> Stack:
    """Add up, over the tensor-parallel ranks, gradients that each of them has whole."""
    model, mesh = dense(("dp", 2), ("tp", 2))
    for module in model.layers:
        module.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient, group=mesh.get_group("tp")))
    return model


def experts(num_experts: int, grad_divisor: float) -> Stack:
    """Return a model of which each rank has one of some experts, with a divisor of the experts' own."""
    return shard_experts(num_experts, grad_divisor=grad_divisor)[0]


def times_tokens_of_a_rank(model: nn.Module) -> None:
    """Scale for the tokens of a step what was averaged over the ranks already."""
    for parameter in model.parameters():
        parameter.grad.mul_(TOKENS)


Fault = tuple[Callable[[], Stack], Callable[[], AbstractContextManager[Any]], dict[str, Any], str]
nothing = contextlib.nullcontext

# name: how the model is built, what is patched, options of the check, and what it has to say.
GRADIENT_FAULTS: dict[str, Fault] = {
    "none": (data_parallel, nothing, {}, ""),
    "none, experts": (lambda: experts(2, 2), nothing, {}, ""),
    "none, experts on one rank each": (lambda: experts(4, 4), nothing, {}, ""),
    # NVIDIA/Megatron-LM 3023
    "divided when accumulated": (
        data_parallel,
        divide_what_was_accumulated,
        {},
        "parameter 'layers.0.norm.weight' .* the same microbatch twice gives 1.25 x the gradient of one, expected 2",
    ),
    # Megatron-LM 6660
    "doubled in groups of one": (
        lambda: experts(4, 4),
        double_in_groups_of_one,
        {},
        "parameter 'layers.1.expert.norm.weight' .* over edp of 1.* is 0.5 x .* expected 0.25: 2 x as large",
    ),
    # Megatron-LM 5956
    "experts times ep": (
        lambda: experts(2, 1),
        nothing,
        {},
        "parameter 'layers.1.expert.norm.weight' .* over edp of 2.* is 0.5 x .* expected 0.25: 2 x as large",
    ),
    # Megatron-LM 7165: dense weights are gathered over gtp = 2 ranks more, experts over egtp = 1
    "experts times egtp / gtp": (
        lambda: experts(2, 4),
        nothing,
        {},
        "parameter 'layers.1.expert.norm.weight' .* is 0.125 x .* expected 0.25: 0.5 x as large",
    ),
    # miles 3231: nine times as large on four ranks of nine tokens
    "times tokens / dp": (
        data_parallel,
        nothing,
        {"expected": 1.0, "finish": times_tokens_of_a_rank},
        "parameter 'layers.0.norm.weight' .* is 9 x .* expected 1: 9 x as large",
    ),
    # transformers 45994
    "times tp": (
        summed_over_tensor_parallel_ranks,
        nothing,
        {},
        "parameter 'layers.0.norm.weight' .* is 1 x .* expected 0.5: 2 x as large",
    ),
}


def gradient_complaint(name: str) -> str:
    """Return what ``check_gradient_scale`` says of a fault, empty for nothing."""
    build, fault, options, _ = GRADIENT_FAULTS[name]
    model, options = build(), dict(options)
    if "finish" in options:
        finish = options["finish"]
        options["finish"] = lambda: finish(model)
    # Ranks that share their tensor-parallel work have the same data.
    data_rank = dist.get_rank() // 2 if name == "times tp" else dist.get_rank()
    with fault():
        try:
            check_gradient_scale(model, squares, rows(data_rank), **options)
        except GradientScaleError as error:
            return str(error)
    return ""


# ---------------------------------------------------------------------- before the gradients, and after them

LR, COEFFICIENT, NUM_STEPS, NUM_MICROBATCHES = 0.05, 0.5, 2, 2


def balance(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a loss that every rank has beside that of its tokens, as a router's load balancing is."""
    return model(x).mean(0).square().sum()


def two_losses(model: nn.Module, x: torch.Tensor, *, factor: float = 1.0, of_balance: float = 1.0) -> torch.Tensor:
    """Return the mean over a rank's part of the sequence, and what balances."""
    return factor * squares(model, x) + of_balance * COEFFICIENT * balance(model, x)


def adam(parameters: Any, lr: float = LR) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, lr=lr)


def muon(parameters: Any, lr: float = LR) -> torch.optim.Optimizer:
    """Return Muon for matrices."""
    return Muon([{"params": [p for p in parameters if p.ndim == 2], "algorithm": "muon"}], lr=lr, weight_decay=0.0)


def sgd_instead_of_muon() -> AbstractContextManager[Any]:
    """Leave the momentum as it is where it is to be made orthogonal."""
    return mock.patch.object(Iteration, "__call__", lambda self, matrices, works=(): matrices)


def counted_by_a_step_without_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Make the optimizer's state by a step on zeros, as engines do that load checkpoints, and leave its count."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = lr


StepFault = dict[str, Any]

# Those without a fault come first: what is compared is right.
STEP_FAULTS: dict[str, StepFault] = {
    "none": {},
    "none, muon": {"optimizer": muon},
    "none, clipped": {"optimizer": torch.optim.SGD, "clip": 0.01},
    # Megatron-LM 5047, on two context-parallel ranks
    "balance times tp x cp": {"loss": {"of_balance": 2.0}},
    # verl 6609
    "loss times cp": {"loss": {"factor": 2.0}},
    # verl-SpeCo 29
    "lr / world size": {"lr": LR / 2},
    # DeepSpeed 5974, 5976
    "step counter advanced": {"prepare": counted_by_a_step_without_gradients},
    # Megatron-FSDP v2
    "norm times sqrt(dp)": {"optimizer": torch.optim.SGD, "clip": 0.01, "patch": norm_over_the_ranks_twice},
    # DeepSpeed 8441
    "SGD for Muon": {"optimizer": muon, "patch": sgd_instead_of_muon},
    # DeepSpeed 8443
    "Muon for each microbatch": {"optimizer": muon, "is_stepped_each": True},
}


def train(model: nn.Module, fault: StepFault, ranks: list[int]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train on the data of some ranks; return the gradients of the first step, then its weights' changes, and norms."""
    start = {name: whole(value, value) for name, value in model.named_parameters()}
    is_sharded = len(ranks) == 1
    optimizer = fault.get("optimizer", adam)(list(model.parameters()), fault.get("lr", LR))
    if is_sharded and not isinstance(optimizer, Muon):
        optimizer = fully_shard_optimizer(optimizer)
    if "prepare" in fault:
        fault["prepare"](optimizer, model)
    found: dict[str, torch.Tensor] = {}
    norms = []
    for step in range(NUM_STEPS):
        for index in range(NUM_MICROBATCHES):
            each = fault.get("is_stepped_each", False)
            with microbatch(model, each or index == NUM_MICROBATCHES - 1):
                for rank in ranks:
                    loss = two_losses(model, rows(rank, 2 * step + index), **fault.get("loss", {}))
                    (loss / len(ranks) / NUM_MICROBATCHES).backward()
            if each:
                optimizer.step()
                optimizer.zero_grad()
        if step == 0:
            found |= {f"gradient {name}": whole(value.grad, value) for name, value in model.named_parameters()}
        if not fault.get("is_stepped_each", False):
            clip = clip_grad_norm_ if is_sharded else torch.nn.utils.clip_grad_norm_
            norms.append(float(clip(model if is_sharded else model.parameters(), fault.get("clip", math.inf))))
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"change {name}": whole(value, value) - start[name] for name, value in model.named_parameters()}
    return found, norms


def step_differences(name: str) -> tuple[float, float]:
    """Return how far a fault moves gradients and changes of weights from those of one process, relative to these."""
    fault = STEP_FAULTS[name]
    torch.manual_seed(0)
    alone = Stack(Block(), nn.Linear(WIDTH, 4))
    right = {key: value for key, value in fault.items() if key in ("optimizer", "clip")}
    wanted, wanted_norms = train(alone, right, list(range(dist.get_world_size())))
    torch.manual_seed(0)
    model = Stack(Block(), nn.Linear(WIDTH, 4))
    for module in (*model.layers, model):
        fully_shard(module)
    with fault.get("patch", contextlib.nullcontext)():
        found, norms = train(model, fault, [dist.get_rank()])
    if norms and not fault:
        assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(norms, wanted_norms, strict=True))
    return _apart(found, wanted, "gradient"), _apart(found, wanted, "change")


def _apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], kind: str) -> float:
    names = [name for name in wanted if name.startswith(kind)]
    difference = sum(float((found[name] - wanted[name]).square().sum()) for name in names)
    return math.sqrt(difference / sum(float(wanted[name].square().sum()) for name in names))
