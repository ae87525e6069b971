"""Models to measure with: a GPT, one with mixtures of experts, and one shaped like Llama.

Weights may be of any dtype, while activations stay FP32 where ``compute`` is FP32: a CPU without bf16 matrix units
takes many times longer to multiply bf16 matrices, and would hide what engines do. Weights are cast where they are used,
alike for every engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Experts", "Linear", "Model", "Norm", "Shape", "linear_layer"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model and of its input.

    Attributes:
        num_experts: experts in each layer; 0: dense layers.
        batch, length: shape of the tokens on one rank.
        compute: dtype of activations; None: the dtype of the weights.
    """

    num_layers: int = 8
    width: int = 512
    vocabulary: int = 8192
    num_experts: int = 0
    batch: int = 2
    length: int = 64
    hidden_ratio: float = 4.0
    head_width: int = 64
    compute: torch.dtype | None = torch.float32

    @property
    def hidden(self) -> int:
        """Inner width of a feed-forward part."""
        return int(self.width * self.hidden_ratio)


class Linear(nn.Module):
    """A linear layer without bias that computes in its input's dtype."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., width) to (..., out)."""
        return functional.linear(x, self.weight.to(x.dtype))


def linear_layer(shape: Shape, width: int, out: int) -> nn.Module:
    """Return a linear layer without bias: PyTorch's own where it computes in the weights' dtype."""
    if shape.compute is not None:
        return Linear(width, out)
    layer = nn.Linear(width, out, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer


class Norm(nn.Module):
    """A layer norm that computes in its input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dim."""
        return functional.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype))


class Experts(nn.Module):
    """A mixture of experts: each token goes to the one expert that its router likes best."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = linear_layer(shape, shape.width, shape.num_experts)
        self.up = nn.Parameter(torch.randn(shape.num_experts, shape.width, shape.hidden) * shape.width**-0.5)
        self.down = nn.Parameter(torch.randn(shape.num_experts, shape.hidden, shape.width) * shape.hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        # Give each expert the same number of tokens, so that a step takes equally long on every rank.
        groups = chosen.argsort().tensor_split(len(self.up))
        up, down = self.up.to(x.dtype), self.down.to(x.dtype)
        out = torch.zeros_like(tokens)
        for index, rows in enumerate(groups):
            inner = functional.gelu(tokens[rows] @ up[index])
            out = out.index_add(0, rows, (inner @ down[index]) * weight[rows, None])
        return out.view_as(x)


class Layer(nn.Module):
    """Attention and a feed-forward part or a mixture of experts, each with a norm before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = max(shape.width // shape.head_width, 1)
        self.norms = nn.ModuleList(Norm(shape.width) for _ in range(2))
        self.qkv = linear_layer(shape, shape.width, 3 * shape.width)
        self.project = linear_layer(shape, shape.width, shape.width)
        self.feed: nn.Module = Experts(shape) if shape.num_experts else nn.Sequential(
            linear_layer(shape, shape.width, shape.hidden), nn.GELU(), linear_layer(shape, shape.hidden, shape.width)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        output: torch.Tensor = x + self.feed(self.norms[1](x))
        return output


class Model(nn.Module):
    """A GPT that returns the mean cross-entropy of its next-token predictions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.compute = shape.compute
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.width)
        self.head = linear_layer(shape, shape.width, shape.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss, 0-d, of (batch, length + 1) tokens."""
        x = self.embedding(tokens[:, :-1])
        x = x if self.compute is None else x.to(self.compute)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
