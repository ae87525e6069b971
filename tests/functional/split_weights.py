"""Runs with split main weights, and the runs with FP32 main weights that they are compared with."""

from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import nn

from dbuffer_kernels import split_weight
from megatron_fsdp import AdamW, MixedPrecisionPolicy, microbatch
from tests.functional.adamw_comparison import groups_of
from tests.harness.models import Block, Stack, draw_tokens, loss_of, world_mesh
from tests.harness.oracle import sharded

__all__ = [
    "BF16", "FP32", "PLAIN", "SPLIT", "full_weights", "make_adamw", "one_layer", "rounding_ties_away",
    "train_on_two_microbatches",
]  # fmt: skip

BF16, FP32 = torch.bfloat16, torch.float32
SPLIT = MixedPrecisionPolicy(BF16, FP32, split_main_params=True)
PLAIN = MixedPrecisionPolicy(BF16, FP32, main_grads_dtype=BF16)


def rounding_ties_away() -> AbstractContextManager[object]:
    """Round compute weights of FP32 main weights like split weights; the casts of a gather write all of them."""
    return mock.patch("megatron_fsdp.engine.weight_buffers.cast_copy", _cast_ties_away)


def _cast_ties_away(source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if source.dtype is out.dtype:
        return out.copy_(source)
    split_weight(source, out, torch.empty(source.shape, dtype=torch.int16))
    return out


def make_adamw(model: nn.Module, lr: float = 0.01) -> AdamW:
    """Make a clipping optimizer with weight decay for matrices and a separate learning rate for vectors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 2 * lr},
    ]
    return AdamW(groups, lr=lr, betas=(0.8, 0.95), max_norm=0.45)


def train_on_two_microbatches(model: nn.Module, optimizer: AdamW, steps: range, rank: int) -> list[float]:
    """Take steps on one rank's data; return a loss for each microbatch and a norm for each step."""
    seen = []
    for step in steps:
        for index in range(2):
            with microbatch(model, is_last=index == 1):
                tokens = draw_tokens(rank, step, index)
                loss = loss_of(model(tokens), tokens)
                (loss / 2).backward()
                seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.grad_norm.item())
    return seen


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole copies of the weights that the optimizer steps, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for group in groups_of(model):
        values = group.weights.values()
        for index, face in enumerate(group.parameters.values()):
            found[names[id(face)]] = values.get_dtensor(index).full_tensor().clone()
    return found


def one_layer(policy: MixedPrecisionPolicy = SPLIT) -> Stack:
    """Make a model of one unit, sharded over all ranks."""
    torch.manual_seed(3)
    model = sharded(Stack(Block()), mesh=world_mesh(), mp_policy=policy)
    return model
