"""Text that the trained model continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely one.
        seed: of the draws.
        max_context: the model sees at most this many of the last tokens.
        vocabulary_size: only tokens below it are drawn, None for all; the rest is padding of the embedding.
    """

    temperature: float
    seed: int
    max_context: int
    vocabulary_size: int | None = None


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Sequence[int], num_tokens: int, sampling: Sampling, device: torch.device
) -> Iterator[int]:
    """Yield ``num_tokens`` tokens that follow the prompt, which has at least one.

    Every rank of a sharded model must call it with the same arguments, and take all tokens: each is one forward pass,
    whose gathers need all ranks. All ranks draw the same tokens from the same seed.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    text = list(prompt)
    for _ in range(num_tokens):
        tokens = torch.tensor([text[-sampling.max_context :]], device=device)
        logits: Tensor = model(tokens)[0, -1, : sampling.vocabulary_size].float().cpu()
        if sampling.temperature == 0:
            drawn = logits.argmax()
        else:
            drawn = torch.multinomial((logits / sampling.temperature).softmax(dim=0), 1, generator=generator)
        text.append(int(drawn))
        yield text[-1]
