"""Models of the catalog as modules that run: the parameters of the catalog's units, and the operators of a step.

Norms are one kernel each, as fused norms are on a GPU, and attention is fused and causal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron_fsdp.planning.catalog import Architecture

__all__ = ["CatalogModel"]


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight)


class Layer(nn.Module):
    """One dense layer with grouped queries and a gated MLP."""

    def __init__(self, architecture: Architecture, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.head_dim = architecture.head_dim
        for name, shape in shapes.items():
            parts = name.split(".")
            owner: nn.Module = self
            for part in parts[:-2]:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            made = nn.Linear(shape[1], shape[0], bias=False) if len(shape) == 2 else _Norm(shape[0])
            owner.add_module(parts[-2], made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        modules: Any = self
        attention, mlp = modules.self_attn, modules.mlp
        inner = modules.input_layernorm(x)
        query, key, value = (
            project(inner).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(attended.transpose(1, 2).flatten(-2))
        inner = modules.post_attention_layernorm(x)
        output: torch.Tensor = x + mlp.down_proj(functional.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        return output


class CatalogModel(nn.Module):
    """A dense decoder from its shapes."""

    def __init__(self, architecture: Architecture, num_layers: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(architecture.vocab_size, architecture.hidden_size)
        self.layers = nn.ModuleList()
        for unit in architecture.units:
            if unit.name.endswith("layer"):
                for _ in range(num_layers or unit.count):
                    self.layers.append(Layer(architecture, dict(unit.parameters)))
        self.norm = _Norm(architecture.hidden_size)
        self.head = nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of (batch, length) tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
