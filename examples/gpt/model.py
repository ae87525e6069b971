"""A GPT: pre-norm blocks with causal scaled-dot-product attention; by default learned positions and a GELU MLP."""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpt.layers import MixtureOfExperts, Mlp, build_norm, rotated
from gpt.model_config import GptConfig

__all__ = ["Block", "Embedding", "GptConfig", "GptModel", "Head", "Recompute", "SelfAttention"]


class Recompute(enum.Enum):
    """What backward computes again instead of keeping it: nothing, the core attention, or whole blocks."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class GptModel(nn.Module):
    """Predict the next token at every position.

    ``embedding``, every entry of ``blocks`` and ``head`` are natural FSDP units when the embeddings are untied. When
    they are tied, the word embedding is used first and last, so ``embedding`` and ``head`` belong to the root unit.
    """

    def __init__(self, config: GptConfig, *, recompute: Recompute = Recompute.NONE) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, recompute) for _ in range(config.num_layers))
        self.head = Head(config)

    def forward(self, tokens: Tensor, *, with_balance_loss: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits of the token that follows each position.

        Args:
            tokens: (batch, sequence) int64 tokens, e.g. (4, 128); sequence <= max_position_embeddings.
            with_balance_loss: return the sum over blocks of the routers' load balancing loss too, a 0-d fp32 tensor;
                only for models with experts.
        Returns:
            (batch, sequence, vocabulary) in the dtype of the weights.
        """
        hidden = self.embedding(tokens)
        balance_losses: list[Tensor] = []
        for block in self.blocks:
            if self.config.num_experts is None:
                hidden = block(hidden)
            else:
                hidden, balance_loss = block(hidden)
                balance_losses.append(balance_loss)
        is_tied = not self.config.untie_embeddings_and_output_weights
        logits: Tensor = self.head(hidden, self.embedding.word_embeddings.weight if is_tied else None)
        return (logits, torch.stack(balance_losses).sum()) if with_balance_loss else logits

    def init_weights(self, seed: int) -> None:
        """Overwrite all weights as Megatron does: normal(0, init_method_std), residual outputs scaled down.

        The layers that write into the residual stream (attention projection, second MLP layer) get
        init_method_std / sqrt(2 * num_layers) (GPT-2 paper, section 2.3); biases are 0, norms 1. Equal seeds give
        equal weights however many ranks there are: every rank draws each weight whole, on the CPU, whether the model
        is sharded by then or not.
        """
        generator = torch.Generator().manual_seed(seed)
        std = self.config.init_method_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                value = torch.empty(parameter.shape)
                if parameter.ndim == 1 or name.endswith("bias"):
                    value.fill_(0.0 if name.endswith("bias") else 1.0)
                elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                    value.normal_(0.0, residual_std, generator=generator)
                else:
                    value.normal_(0.0, std, generator=generator)
                parameter.copy_(like_parameter(value, parameter))


def like_parameter(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a value that every rank holds whole in the form in which a sharded parameter takes it."""
    if not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    return DTensor.from_local(value.to(parameter.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


class Embedding(nn.Module):
    """Word plus learned position embedding, if any: (batch, sequence) int64 -> (batch, sequence, hidden)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings: nn.Embedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return word + position embeddings."""
        embedded: Tensor = self.word_embeddings(tokens)
        if self.position_embeddings is None:
            return embedded
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        positioned: Tensor = embedded + self.position_embeddings(positions)
        return positioned


class Block(nn.Module):
    """One transformer layer on (batch, sequence, hidden)."""

    def __init__(self, config: GptConfig, recompute: Recompute) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attention = SelfAttention(config, recomputes_core=recompute is Recompute.SELECTIVE)
        self.pre_mlp_layernorm = build_norm(config)
        self.mlp = Mlp(config) if config.num_experts is None else MixtureOfExperts(config)
        self._recomputes_all = recompute is Recompute.FULL

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the block's output, same shape and dtype; with experts their load balancing loss too."""
        # Checkpointed inside the module, not around it: the recomputation then runs between this unit's own
        # pre-backward and post-backward hooks, on weights that are gathered already.
        if self._recomputes_all and torch.is_grad_enabled():
            result: Tensor | tuple[Tensor, Tensor] = checkpoint(self._layer, hidden, use_reentrant=False)
            return result
        return self._layer(hidden)

    def _layer(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        output = self.mlp(self.pre_mlp_layernorm(hidden))
        if isinstance(output, tuple):
            return hidden + output[0], output[1]
        result: Tensor = hidden + output
        return result


class SelfAttention(nn.Module):
    """Causal attention with one fused projection, laid out (group, queries|k|v, head_dim) as in Megatron.

    A group is one head of keys and values with the query heads that share it; without ``--group-query-attention`` every
    query head has its own.
    """

    def __init__(self, config: GptConfig, *, recomputes_core: bool) -> None:
        super().__init__()
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_heads
        self.head_dim = config.head_dim
        self.rotary_base = config.rotary_base if config.position_embedding_type == "rope" else None
        has_bias = not config.disable_bias_linear
        width = (self.num_heads + 2 * self.num_groups) * self.head_dim
        self.linear_qkv = nn.Linear(config.hidden_size, width, bias=has_bias)
        self.linear_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=has_bias)
        self._recomputes_core = recomputes_core

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the attention output, (batch, sequence, hidden)."""
        per_group = self.num_heads // self.num_groups
        # Of tensor-parallel ranks each has some of the groups.
        qkv = self.linear_qkv(hidden).unflatten(-1, (-1, (per_group + 2) * self.head_dim))
        query, key, value = qkv.transpose(1, 2).split(
            [per_group * self.head_dim, self.head_dim, self.head_dim], dim=-1
        )  # each (batch, groups, sequence, its width)
        if per_group > 1:
            query = query.unflatten(-1, (per_group, self.head_dim)).transpose(2, 3).flatten(1, 2)
            key, value = (part.repeat_interleave(per_group, dim=1) for part in (key, value))
        if self.rotary_base is not None:
            query, key = rotated(query, self.rotary_base), rotated(key, self.rotary_base)
        if self._recomputes_core and torch.is_grad_enabled():
            core: Tensor = checkpoint(_causal_attention, query, key, value, use_reentrant=False)
        else:
            core = _causal_attention(query, key, value)
        output: Tensor = self.linear_proj(core.transpose(1, 2).flatten(2))
        return output


class Head(nn.Module):
    """Final norm and projection to the vocabulary, with weights of its own only when the embeddings are untied."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.final_layernorm = build_norm(config)
        self.output_layer: nn.Linear | None = None
        if config.untie_embeddings_and_output_weights:
            self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Return logits; ``tied_weight`` is the (vocabulary, hidden) word embedding, None when the head has its own."""
        normed = self.final_layernorm(hidden)
        if self.output_layer is not None:
            logits: Tensor = self.output_layer(normed)
            return logits
        assert tied_weight is not None
        return functional.linear(normed, tied_weight)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
