"""The loss of text: per token, per microbatch, and over all microbatches and ranks of a step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from dbuffer.collectives.waits import wait_for


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The cross entropy of some tokens in nats: their sum, 0-d fp32, and how many count, 0-d int64."""

    total: Tensor
    num_tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """Per token; 0 where none counts."""
        return self.total / self.num_tokens.clamp(min=1)


def token_loss(model: nn.Module, text: Tensor, masked_token: int | None = None) -> TokenLoss:
    """Return the loss of one microbatch, (batch, sequence + 1) int64: each token predicts the next.

    The balance loss of experts adds to the gradient only, so that values stay comparable. Tokens after ``masked_token``
    do not count, because the first token of a document cannot be predicted.
    """
    logits, balance_loss = model(text[:, :-1], with_balance_loss=True)
    # fp32: a sum of exponentials in bf16 loses the digits that the loss curve shows.
    losses = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten(), reduction="none")
    counts = counting_tokens(text, masked_token).flatten()
    total, num_tokens = (losses * counts).sum(), counts.sum()
    if balance_loss is not None:
        total = total + num_tokens * (balance_loss - balance_loss.detach())
    return TokenLoss(total, num_tokens)


def counting_tokens(text: Tensor, masked_token: int | None) -> Tensor:
    """Return which predictions of a microbatch count, (batch, sequence) bool for (batch, sequence + 1)."""
    return text[:, :-1] != (-1 if masked_token is None else masked_token)


class MeanLoss:
    """The mean loss over microbatches and ranks, or with ``--calculate-per-token-loss`` over all their tokens.

    The two differ if microbatches have different numbers of tokens that count. With W ranks, microbatch t of rank r has
    number t * W + r. Losses are added in the order of these numbers, so that the sum does not depend on W.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._is_per_token: bool = args.calculate_per_token_loss
        self._device = device
        self._added: list[Tensor] = []

    def add(self, loss: TokenLoss) -> Tensor:
        """Count one microbatch, and return what to call backward on after multiplying it by ``step_weight``."""
        total = loss.total if self._is_per_token else loss.mean
        count = loss.num_tokens if self._is_per_token else torch.ones_like(loss.num_tokens)
        # FP64: thousands of FP32 losses are summed in a validation.
        self._added.append(torch.stack([total.detach().double(), count.double()]))
        return total

    def over_ranks(self) -> Tensor:
        """Return the loss of all microbatches so far, 0-d fp32, without waiting for a GPU. All ranks call this."""
        if not self._added:
            return torch.zeros((), device=self._device)
        own = torch.stack(self._added)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        wait_for(dist.all_gather(found, own, async_op=True))
        # (microbatches, ranks, 2) to the order of numbers; the shape of the sum is that of any number of ranks.
        total, count = torch.stack(found, dim=1).view(-1, 2).sum(0)
        mean: Tensor = total / count.clamp(min=1)
        return mean.float()


def step_weight(args: argparse.Namespace, batches: Sequence[Tensor], masked_token: int | None) -> Tensor | float:
    """Return what each of this rank's microbatches' losses is multiplied by, for gradients of the step's loss."""
    if not args.calculate_per_token_loss:
        # Invariant gradients are divided once, after the last addition (FsdpConfig.apply).
        return 1.0 if args.fsdp_invariant_reduction else 1 / len(batches)
    # Known before backward, so that no pass over the gradients is needed, and no sum grows large in bf16.
    num_tokens = torch.stack([counting_tokens(text, masked_token).sum() for text in batches]).sum()
    wait_for(dist.all_reduce(num_tokens, async_op=True))
    # The sharding engine sums gradients then (FsdpConfig.apply); DistributedDataParallel averages them still.
    num_averaged = 1 if args.use_megatron_fsdp else dist.get_world_size()
    # Tensor-parallel ranks have the same tokens, which count once.
    weight: Tensor = num_averaged / (num_tokens / args.tensor_model_parallel_size).clamp(min=1)
    return weight
