"""The check finds six faults of gradients on several ranks that were published in 2026, when they are put back in.

Training with each fault still had a falling loss.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer.collectives.parts import Part
from megatron_fsdp import GradientScaleError, check_gradient_scale
from megatron_fsdp.engine import reduce
from megatron_fsdp.engine.reduce import Reduction
from tests.functional.expert_parallel import rows, shard_experts
from tests.harness import on_ranks
from tests.harness.models import Block, Stack
from tests.harness.oracle import sharded

TOKENS = 36
"""Of a microbatch over all ranks: nine for each of four."""


def divide_what_was_accumulated() -> AbstractContextManager[Any]:
    """Divide the accumulated sum by the ranks in each microbatch: ((g1 / D + g2) / D + g3) / D."""

    def accumulate(source: torch.Tensor, target: torch.Tensor, *, scale: float, overwrite: bool) -> None:
        target.copy_(source if overwrite else target + source).mul_(scale)

    return mock.patch.object(reduce, "accumulate", accumulate)


def double_in_groups_of_one() -> AbstractContextManager[Any]:
    """In groups of one rank, reduce into the input itself and accumulate on top."""
    original = Reduction.start

    def twice(self: Reduction, works: Any) -> list[Part]:
        parts = original(self, works)
        if self.packed.mesh.size() == 1:
            self.packed.local_buffer.mul_(2)
        return parts

    return mock.patch.object(Reduction, "start", twice)


def dense(*sizes: tuple[str, int]) -> tuple[Stack, Any]:
    """Return dense blocks over the first axis of a mesh, and the mesh."""
    names, shape = zip(*sizes, strict=True)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    return sharded(Stack(Block(), Block(hidden=3)), mesh=mesh[names[0]]), mesh


def data_parallel() -> Stack:
    return dense(("dp", 4))[0]


def summed_over_tensor_parallel_ranks() -> Stack:
    """Add up, over the tensor-parallel ranks, gradients that each of them has whole."""
    model, mesh = dense(("dp", 2), ("tp", 2))
    for module in model.layers:
        module.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient, group=mesh.get_group("tp")))
    return model


def experts(num_experts: int, grad_divisor: float) -> Callable[[], Stack]:
    """Return a builder of a model with one of several experts per rank, and a separate divisor for experts."""
    return lambda: shard_experts(num_experts, grad_divisor=grad_divisor)[0]


def times_tokens_of_a_rank(model: nn.Module) -> None:
    """Scale gradients for the tokens of a step although they were averaged over the ranks before."""
    for parameter in model.parameters():
        parameter.grad.mul_(TOKENS)


nothing = contextlib.nullcontext
DENSE, EXPERT = "parameter 'layers.0.norm.weight' .*", "parameter 'layers.1.expert.norm.weight' .*"
# The builder, the patch, options of the check, and the message.
FAULTS: dict[str, tuple[Callable[[], Stack], Callable[[], Any], dict[str, Any], str]] = {
    "none": (data_parallel, nothing, {}, ""),
    "none, experts": (experts(2, 2), nothing, {}, ""),
    "none, experts on one rank each": (experts(4, 4), nothing, {}, ""),
    # NVIDIA/Megatron-LM 3023
    "divided when accumulated": (
        data_parallel, divide_what_was_accumulated, {},
        DENSE + "the same microbatch twice gives 1.25 x the gradient of one, expected 2",
    ),
    # Megatron-LM 6660
    "doubled in groups of one": (
        experts(4, 4), double_in_groups_of_one, {}, EXPERT + "over edp of 1.* is 0.5 x .* 0.25: 2 x as large"
    ),
    # Megatron-LM 5956
    "experts times ep": (experts(2, 1), nothing, {}, EXPERT + "over edp of 2.* is 0.5 x .* 0.25: 2 x as large"),
    # Megatron-LM 7165: dense weights are gathered over gtp = 2 ranks more, experts over egtp = 1
    "experts times egtp / gtp": (experts(2, 4), nothing, {}, EXPERT + "is 0.125 x .* 0.25: 0.5 x as large"),
    # miles 3231: nine times as large on four ranks of nine tokens
    "times tokens / dp": (
        data_parallel, nothing, {"expected": 1.0, "finish": times_tokens_of_a_rank},
        DENSE + "is 9 x .* expected 1: 9 x as large",
    ),
    # transformers 45994
    "times tp": (summed_over_tensor_parallel_ranks, nothing, {}, DENSE + "is 1 x .* expected 0.5: 2 x as large"),
}  # fmt: skip


def complaints() -> Iterator[tuple[str, str]]:
    for name, (build, fault, options, _) in FAULTS.items():
        model = build()
        own = {key: partial(one, model) if key == "finish" else one for key, one in options.items()}
        # Ranks that share tensor-parallel work have the same data.
        data = rows(dist.get_rank() // 2 if name == "times tp" else dist.get_rank())
        with fault():
            try:
                check_gradient_scale(model, lambda model, x: model(x).square().mean(), data, **own)
            except GradientScaleError as error:
                yield name, str(error)
            else:
                yield name, ""


@on_ranks(4)
def test_the_check_names_parameter_and_factor_of_every_fault_of_gradients() -> None:
    for name, complaint in complaints():
        words = FAULTS[name][-1]
        assert re.search(words, complaint, re.DOTALL), (name, complaint)
        assert bool(complaint) == bool(words), (name, complaint)
        if "experts" in name or "groups of one" in name:
            assert "layers.0" not in complaint, "dense weights are right"
