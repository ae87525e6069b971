"""Models for the host bench: usual architectures, so narrow that the host determines a step's time.

Each model is a function of its number of layers, and each layer is a unit. Models of ``transformers`` need the package.
No model reads or downloads weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.virtual_models import make_model

__all__ = ["MODELS", "WIDE_MODELS", "NeedsTransformers", "Trained"]

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 2, 4, 16
VECTOR = 1024


class NeedsTransformers(Exception):
    """The model is one of transformers, which is not installed."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A model and its loss.

    Attributes:
        units: the modules to shard besides the root.
        loss: function that runs a forward and returns the loss.
    """

    model: nn.Module
    units: Sequence[nn.Module]
    loss: Callable[[], torch.Tensor]


class LlamaBlock(nn.Module):
    """Seven linear layers and two norms, with the residuals and the gate of a Llama layer and no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., WIDTH) to the same shape."""
        inner = self.norms[0](x)
        x = x + self.out(self.query(inner) * self.key(inner) + self.value(inner))
        inner = self.norms[1](x)
        output: torch.Tensor = x + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return output


class ParallelLinear(nn.Module):
    """A linear layer like Megatron's: a class that adds its bias, or returns it for the caller to add."""

    def __init__(self, width: int, out: int, skip_bias_add: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(out))
        self.skip_bias_add = skip_bias_add

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias if the caller adds it."""
        if self.skip_bias_add:
            return functional.linear(x, self.weight), self.bias
        return functional.linear(x, self.weight, self.bias), None


class MegatronLayer(nn.Module):
    """Attention and a feed-forward part of twelve parameters, in modules shaped like Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = ParallelLinear(WIDTH, 3 * WIDTH, skip_bias_add=False)
        self.project = ParallelLinear(WIDTH, WIDTH, skip_bias_add=True)
        self.up = ParallelLinear(WIDTH, 4 * WIDTH, skip_bias_add=True)
        self.down = ParallelLinear(4 * WIDTH, WIDTH, skip_bias_add=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, WIDTH) to the same shape."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.input_norm(x))[0].chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out, bias = self.project(attended.transpose(1, 2).flatten(-2))
        x = x + (out + bias)
        inner, bias = self.up(self.feed_norm(x))
        out, last = self.down(functional.gelu(inner + bias))
        output: torch.Tensor = x + (out + last)
        return output


class Vectors(nn.Module):
    """Vectors that scale the input one after the other."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        for index in range(num_parameters):
            self.register_parameter(f"scale{index}", nn.Parameter(torch.ones(VECTOR)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled input."""
        for scale in self._parameters.values():
            assert scale is not None
            x = x * scale
        return x


class Tokens(nn.Module):
    """An embedding, layers, a norm and a head, as one root."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss, 0-d, of predicting each of (batch, length) tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def _transformers(name: str, **sizes: Any) -> Callable[[int, str], Trained]:
    def make(num_layers: int, device: str) -> Trained:
        if importlib.util.find_spec("transformers") is None:
            raise NeedsTransformers(f"{name} needs transformers: pip install transformers")
        import transformers

        config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, use_cache=False, **sizes)
        config.num_hidden_layers = num_layers
        model = transformers.AutoModelForCausalLM.from_config(config).to(device)
        tokens = _tokens(device)
        trunk = model.transformer.h if name == "GPT2" else model.model.layers
        return Trained(model, list(trunk), lambda: model(input_ids=tokens, labels=tokens).loss)

    return make


def _of_layers(layer: type[nn.Module]) -> Callable[[int, str], Trained]:
    def make(num_layers: int, device: str) -> Trained:
        model, tokens = Tokens([layer() for _ in range(num_layers)]).to(device), _tokens(device)
        return Trained(model, list(model.layers), lambda: model(tokens))

    return make


def _of_vectors(num_parameters: int) -> Callable[[int, str], Trained]:
    def make(num_layers: int, device: str) -> Trained:
        # The root has parameters too, like the embedding and the head of a model.
        layers = [Vectors(num_parameters) for _ in range(num_layers)]
        model = nn.Sequential(*layers, nn.LayerNorm(VECTOR)).to(device)
        ones = torch.ones(1, VECTOR, device=device)
        return Trained(model, layers, lambda: model(ones).sum())

    return make


def _tokens(device: str) -> torch.Tensor:
    return torch.arange(LENGTH, device=device)[None] % VOCABULARY


_LLAMA = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}

MODELS: Mapping[str, Callable[[int, str], Trained]] = {
    "hf-llama": _transformers("Llama", **_LLAMA),
    "hf-qwen3": _transformers("Qwen3", head_dim=WIDTH // HEADS, **_LLAMA),
    "hf-gpt2": _transformers("GPT2", n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0),
    "megatron-like": _of_layers(MegatronLayer),
    "llama-like": _of_layers(LlamaBlock),
    "vectors-9": _of_vectors(9),
    "vectors-36": _of_vectors(36),
}
"""Makers by name, which take the number of layers and the device; real models first, vectors last."""


def _of_catalog(name: str) -> Callable[[int, str], Trained]:
    def make(num_layers: int, device: str) -> Trained:
        with torch.device(device):
            # So few that a GPU does not fall behind the host by a whole queue of kernels, not even in FP32.
            model, tokens = make_model(name, num_layers), torch.zeros(1, 128, dtype=torch.long)
        return Trained(model, model.units(), lambda: model(tokens))

    return make


WIDE_MODELS: Mapping[str, Callable[[int, str], Trained]] = {"llama3.2-1b": _of_catalog("1b")}
"""The same with the widths that are trained, for CUDA devices: there the host waits for no layer."""
