"""Text that the trained model continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Sampling:
    """How bytes are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely byte.
        seed: of the draws.
        max_context: the model sees at most this many of the last bytes.
    """

    temperature: float
    seed: int
    max_context: int


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    num_bytes: int,
    *,
    sampling: Sampling,
    device: torch.device,
    on_byte: Callable[[], None] = lambda: None,
) -> bytes:
    """Return the prompt continued by ``num_bytes`` bytes.

    Every rank of a sharded model must call it with the same arguments: each byte is one forward pass, whose gathers
    need all ranks. All ranks draw the same bytes from the same seed.

    Args:
        prompt: at least one byte.
        on_byte: called after each byte, to show progress.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    text = bytearray(prompt)
    for _ in range(num_bytes):
        tokens = torch.tensor([list(text[-sampling.max_context :])], device=device)
        logits: Tensor = model(tokens)[0, -1]
        text.append(_draw(logits.float().cpu(), sampling.temperature, generator))
        on_byte()
    return bytes(text)


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Return one byte value drawn from (256,) logits."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
