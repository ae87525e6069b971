"""Models of the Llama and Mixtral families from their shapes in the catalog, for virtual devices.

The models call the operators of a step on a GPU: norms as one kernel, fused causal attention, experts in one batch of
equal sizes. Values are not initialized.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from megatron_fsdp import expert_matmul
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.catalog import Architecture

__all__ = ["MODELS", "VirtualModel", "make_model"]

MODELS = ("llama3-8b", "mixtral-8x7b", "1b")
# Llama 3.2 1B, but with an output matrix that is not tied to the embedding.
_SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}


def make_model(name: str, num_layers: int | None = None) -> VirtualModel:
    """Return a model of ``MODELS``, in FP32, with as many layers as it has unless given."""
    config = catalog.load("llama3-8b") | _SMALL if name == "1b" else catalog.load(name)
    architecture = catalog.architecture(config)
    experts = config.get("num_local_experts", 0), config.get("num_experts_per_tok", 0)
    return VirtualModel(replace(architecture, num_layers=num_layers or architecture.num_layers), experts)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight)


def _linear(width: int, out: int) -> nn.Linear:
    return nn.Linear(width, out, bias=False)


class _Attention(nn.Module):
    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        key_value_width = shape.num_key_value_heads * shape.head_dim
        self.query = _linear(shape.hidden_size, shape.num_attention_heads * shape.head_dim)
        self.key, self.value = (_linear(shape.hidden_size, key_value_width) for _ in range(2))
        self.out = _linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output: torch.Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return output


class _Feed(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = _linear(width, hidden), _linear(width, hidden), _linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class _Experts(nn.Module):
    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, width, 2 * hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = expert_matmul(x, self.gate_up).chunk(2, -1)
        return expert_matmul(functional.silu(gate) * up, self.down)


class _Mixture(nn.Module):
    """Each token goes to ``chosen`` experts; each expert gets the same number of tokens."""

    def __init__(self, width: int, hidden: int, num_experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen, self.router = chosen, _linear(width, num_experts)
        self.experts = _Experts(width, hidden, num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).topk(self.chosen)
        order = expert.flatten().argsort()
        rows = order // self.chosen
        sent = tokens.index_select(0, rows).unflatten(0, (len(self.experts.down), -1))
        back = self.experts(sent).flatten(0, 1) * weight.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(tokens).index_add(0, rows, back).view_as(x)


class _Layer(nn.Module):
    def __init__(self, shape: Architecture, experts: tuple[int, int]) -> None:
        super().__init__()
        width, hidden = shape.hidden_size, shape.intermediate_size
        self.norm1, self.attention, self.norm2 = _Norm(width), _Attention(shape), _Norm(width)
        self.feed: nn.Module = _Mixture(width, hidden, *experts) if experts[0] else _Feed(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        output: torch.Tensor = x + self.feed(self.norm2(x))
        return output


class VirtualModel(nn.Module):
    """A decoder.

    Args:
        experts: how many a layer has, and how many a token goes to; zeros for a dense model.
    """

    def __init__(self, shape: Architecture, experts: tuple[int, int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape, experts) for _ in range(shape.num_layers))
        self.norm, self.head = _Norm(shape.hidden_size), _linear(shape.hidden_size, shape.vocab_size)

    def units(self) -> list[nn.Module]:
        """Return the modules that become units, inner ones first, without the model itself."""
        experts = [module for module in self.modules() if isinstance(module, _Experts)]
        return [self.embedding, *experts, *self.layers, self.head]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of (batch, length) tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())
