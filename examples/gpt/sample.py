"""Text that the trained model continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def generate(
    model: nn.Module,
    prompt: bytes,
    num_bytes: int,
    *,
    sampling: Sampling,
    device: torch.device,
    on_byte: Callable[[], None] = lambda: None,
) -> bytes:
    """Return the prompt continued by ``num_bytes`` bytes, with a model of bytes; otherwise as ``generate_tokens``."""
    tokens = list(prompt)
    return bytes(generate_tokens(model, tokens, num_bytes, sampling=sampling, device=device, on_token=on_byte))


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    sampling: Sampling,
    device: torch.device,
    on_token: Callable[[], None] = lambda: None,
) -> list[int]:
    """Return the prompt continued by ``num_tokens`` tokens.

    Every rank of a sharded model must call it with the same arguments: each token is one forward pass, whose gathers
    need all ranks. All ranks draw the same tokens from the same seed.

    Args:
        prompt: at least one token.
        on_token: called after each token, to show progress.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    text = list(prompt)
    for _ in range(num_tokens):
        tokens = torch.tensor([text[-sampling.max_context :]], device=device)
        logits: Tensor = model(tokens)[0, -1, : sampling.vocabulary_size]
        text.append(_draw(logits.float().cpu(), sampling.temperature, generator))
        on_token()
    return text


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Return one token drawn from (vocabulary,) logits."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
