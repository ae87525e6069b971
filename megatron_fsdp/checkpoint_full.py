"""A sharded model's state as whole tensors, gathered one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint_model import view_model
from megatron_fsdp.checkpoint_ranks import checkpoint_ranks

__all__ = ["full_state_dict", "iterate_full_tensors"]


def iterate_full_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole value of each parameter and buffer; every rank iterates, to the end.

    One whole tensor exists at a time, on every rank, if the caller keeps none. A tied parameter comes under each name.
    """
    for name, tensor in view_model(model).tensors.items():
        yield name, whole(tensor)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state dict on the CPU on rank 0, an empty one elsewhere; every rank calls it.

    Rank 0 holds it all, in host memory; the others, and rank 0's GPU, one tensor at a time.
    """
    is_main = checkpoint_ranks().rank == 0
    found = {}
    for name, tensor in iterate_full_tensors(model):
        if is_main:
            found[name] = tensor.to("cpu", copy=True)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole value of a tensor; every rank of a DTensor's mesh calls it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
