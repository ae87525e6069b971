"""A byte-level GPT: pre-norm blocks, learned positions, GELU MLP, causal scaled-dot-product attention."""

from __future__ import annotations

import argparse
import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY_SIZE = 256  # one token per byte value, nothing to pad or to learn


@dataclass(frozen=True, slots=True)
class GptConfig:
    """What defines the model; the field names are the flag names, so that errors can name the flag."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool = False
    init_method_std: float = 0.02

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> GptConfig:
        """Return the configuration that validated arguments ask for."""
        return cls(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=args.num_attention_heads,
            ffn_hidden_size=args.ffn_hidden_size,
            max_position_embeddings=args.max_position_embeddings,
            untie_embeddings_and_output_weights=args.untie_embeddings_and_output_weights,
            init_method_std=args.init_method_std,
        )


class Recompute(enum.Enum):
    """What backward computes again instead of keeping it: nothing, the core attention, or whole blocks."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class GptModel(nn.Module):
    """Predict the next byte at every position.

    ``embedding``, every entry of ``blocks`` and ``head`` are natural FSDP units when the embeddings are untied. When
    they are tied, the word embedding is used first and last, so ``embedding`` and ``head`` belong to the root unit.
    """

    def __init__(self, config: GptConfig, *, recompute: Recompute = Recompute.NONE) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, recompute) for _ in range(config.num_layers))
        self.head = Head(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte that follows each position.

        Args:
            tokens: (batch, sequence) int64 byte values, e.g. (4, 128); sequence <= max_position_embeddings.
        Returns:
            (batch, sequence, 256) in the dtype of the weights.
        """
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        is_tied = not self.config.untie_embeddings_and_output_weights
        logits: Tensor = self.head(hidden, self.embedding.word_embeddings.weight if is_tied else None)
        return logits

    def init_weights(self, seed: int) -> None:
        """Overwrite all weights as Megatron does: normal(0, init_method_std), residual outputs scaled down.

        The layers that write into the residual stream (attention projection, second MLP layer) get
        init_method_std / sqrt(2 * num_layers) (GPT-2 paper, section 2.3); biases are 0, norms 1. Equal seeds give
        equal weights however many ranks there are, because every rank fills the whole model before it is sharded.
        """
        generator = torch.Generator().manual_seed(seed)
        std = self.config.init_method_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                    parameter.normal_(0.0, residual_std, generator=generator)
                else:
                    parameter.normal_(0.0, std, generator=generator)


class Embedding(nn.Module):
    """Word plus learned position embedding: (batch, sequence) int64 -> (batch, sequence, hidden)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY_SIZE, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return word + position embeddings."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return embedded


class Block(nn.Module):
    """One transformer layer on (batch, sequence, hidden)."""

    def __init__(self, config: GptConfig, recompute: Recompute) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size)
        self.self_attention = SelfAttention(config, recomputes_core=recompute is Recompute.SELECTIVE)
        self.pre_mlp_layernorm = nn.LayerNorm(config.hidden_size)
        self.mlp = Mlp(config)
        self._recomputes_all = recompute is Recompute.FULL

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output, same shape and dtype."""
        # Checkpointed inside the module, not around it: the recomputation then runs between this unit's own
        # pre-backward and post-backward hooks, on weights that are gathered already.
        if self._recomputes_all and torch.is_grad_enabled():
            result: Tensor = checkpoint(self._layer, hidden, use_reentrant=False)
            return result
        return self._layer(hidden)

    def _layer(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        result: Tensor = hidden + self.mlp(self.pre_mlp_layernorm(hidden))
        return result


class SelfAttention(nn.Module):
    """Causal multi-head attention with one fused projection, laid out (head, q|k|v, head_dim) as in Megatron."""

    def __init__(self, config: GptConfig, *, recomputes_core: bool) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.linear_qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.linear_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self._recomputes_core = recomputes_core

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the attention output, (batch, sequence, hidden)."""
        batch, sequence, width = hidden.shape
        qkv = self.linear_qkv(hidden).view(batch, sequence, self.num_heads, 3 * self.head_dim).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)  # each (batch, heads, sequence, head_dim)
        if self._recomputes_core and torch.is_grad_enabled():
            core: Tensor = checkpoint(_causal_attention, query, key, value, use_reentrant=False)
        else:
            core = _causal_attention(query, key, value)
        output: Tensor = self.linear_proj(core.transpose(1, 2).reshape(batch, sequence, width))
        return output


class Mlp(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.ffn_hidden_size)
        self.linear_fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP output, (batch, sequence, hidden)."""
        output: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(hidden), approximate="tanh"))
        return output


class Head(nn.Module):
    """Final norm and projection to the vocabulary, with weights of its own only when the embeddings are untied."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.final_layernorm = nn.LayerNorm(config.hidden_size)
        self.output_layer: nn.Linear | None = None
        if config.untie_embeddings_and_output_weights:
            self.output_layer = nn.Linear(config.hidden_size, VOCABULARY_SIZE, bias=False)

    def forward(self, hidden: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Return logits; ``tied_weight`` is the (256, hidden) word embedding, None when the head has its own."""
        normed = self.final_layernorm(hidden)
        if self.output_layer is not None:
            logits: Tensor = self.output_layer(normed)
            return logits
        assert tied_weight is not None
        return functional.linear(normed, tied_weight)


def next_byte_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte, a 0-d fp32 tensor.

    Args:
        text: (batch, sequence + 1) int64; positions 0..sequence-1 predict positions 1..sequence.
    """
    logits: Tensor = model(text[:, :-1])
    # fp32: a sum of exponentials in bf16 loses the digits that the loss curve shows.
    return functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
