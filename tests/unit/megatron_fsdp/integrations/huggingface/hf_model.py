"""A model that says of itself what transformers models say, without that package."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH = 13, 6


class Layer(nn.Module):
    """A residual layer that counts its computations, and draws random numbers while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)
        self.num_computed = 0
        self.caches: list[Any] = []

    def forward(self, hidden: torch.Tensor, cache: Any = None, *, past_key_values: Any = None) -> torch.Tensor:
        self.num_computed += 1
        self.caches += [cache, past_key_values]
        inner = functional.dropout(torch.tanh(self.up(hidden)), 0.3, self.training)
        return hidden + self.down(inner)


class FinalNorm(nn.LayerNorm):
    """A norm under a name of its own, as models have it."""


class Base(nn.Module):
    """Everything but the head; with a buffer that no checkpoint holds."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = FinalNorm(WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden, cache, past_key_values=cache)
        return self.norm(hidden)


class LanguageModel(nn.Module):
    """A base and a head, which may share its weight with the embedding."""

    base_model_prefix = "model"
    _no_split_modules = ("Layer", "VisionLayer")

    def __init__(self, *, is_tied: bool = False, num_layers: int = 2) -> None:
        super().__init__()
        self.model = Base(num_layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.model.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return self.head(self.model(tokens, cache))


def make_language_model(seed: int = 0, **options: Any) -> LanguageModel:
    """Make a model whose values the seed decides."""
    torch.manual_seed(seed)
    return LanguageModel(**options)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    """Return the loss on one rank's data of one step: no two are alike."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(0, VOCABULARY, (3, 5), generator=generator)
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
