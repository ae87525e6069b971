"""A GPT with Megatron's flags: pre-norm blocks with causal attention, and an MLP or a mixture of experts.

The experts' weights are stacked. With expert parallelism each rank has some experts, and tokens are sent to them and
back.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpt.data import Tokenizer


@dataclass(frozen=True, slots=True)
class GptConfig:
    """The model's settings, with the names of flags. ``vocab_size`` includes padding; None turns a feature off."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool = False
    init_method_std: float = 0.02
    vocab_size: int = 256
    swiglu: bool = False
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10_000
    num_query_groups: int | None = None
    disable_bias_linear: bool = False
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_aux_loss_coeff: float = 0.0
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> GptConfig:
        """Return the configuration that validated arguments ask for."""
        names = {field.name for field in dataclasses.fields(cls)} - {"vocab_size", "num_query_groups"}
        groups = args.num_query_groups if args.group_query_attention else None
        given = {name: getattr(args, name) for name in names}
        return cls(**given, vocab_size=args.padded_vocab_size, num_query_groups=groups)


class GptModel(nn.Module):
    """Predict the next token at every position.

    ``embedding``, every entry of ``blocks`` and ``head`` are natural FSDP units when the embeddings are untied. When
    they are tied, the word embedding is used first and last, so ``embedding`` and ``head`` belong to the root unit.
    With ``recomputes``, backward computes the activations of blocks again instead of keeping them.
    """

    def __init__(self, config: GptConfig, *, recomputes: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, recomputes) for _ in range(config.num_layers))
        self.head = Head(config)

    def forward(self, tokens: Tensor, *, with_balance_loss: bool = False) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return the logits of the token that follows each position, (batch, sequence, vocabulary), e.g. (4, 128, 256).

        If ``with_balance_loss``, returns the sum of the routers' losses too, 0-d fp32; None without experts.
        """
        hidden = self.embedding(tokens)
        balance_losses: list[Tensor] = []
        for block in self.blocks:
            hidden = block(hidden)
            if isinstance(hidden, tuple):
                hidden, balance_loss = hidden
                balance_losses.append(balance_loss)
        is_tied = not self.config.untie_embeddings_and_output_weights
        logits: Tensor = self.head(hidden, self.embedding.word_embeddings.weight if is_tied else None)
        if not with_balance_loss:
            return logits
        return logits, torch.stack(balance_losses).sum() if balance_losses else None

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Overwrite all weights as Megatron does: normal(0, init_method_std), residual outputs scaled down.

        The layers that write into the residual stream get init_method_std / sqrt(2 * num_layers) (GPT-2 paper, section
        2.3); biases are 0, norms 1. Equal seeds give equal weights however many ranks there are: every rank draws each
        weight whole, on the CPU, whether the model is sharded by then or not.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            value = torch.empty(parameter.shape)
            if parameter.ndim == 1 or name.endswith("bias"):
                value.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                is_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
                divisor = math.sqrt(2 * self.config.num_layers) if is_residual else 1.0
                value.normal_(0.0, self.config.init_method_std / divisor, generator=generator)
            if isinstance(parameter, DTensor):
                mesh, value = parameter.device_mesh, value.to(parameter.device)
                value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
            parameter.copy_(value)


class Embedding(nn.Module):
    """Word plus learned position embedding, if any: (batch, sequence) int64 -> (batch, sequence, hidden)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        is_learned = config.position_embedding_type == "learned_absolute"
        size = (config.max_position_embeddings, config.hidden_size)
        self.position_embeddings = nn.Embedding(*size) if is_learned else None
        self.dropout = config.hidden_dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum."""
        embedded: Tensor = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            embedded = embedded + self.position_embeddings(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.dropout(embedded, self.dropout, self.training)


class Block(nn.Module):
    """One transformer layer on (batch, sequence, hidden)."""

    def __init__(self, config: GptConfig, recomputes: bool) -> None:
        super().__init__()
        self.input_layernorm = build_norm(config)
        self.self_attention = SelfAttention(config)
        self.pre_mlp_layernorm = build_norm(config)
        self.mlp = Mlp(config) if config.num_experts is None else MixtureOfExperts(config)
        self._recomputes = recomputes
        self._dropout = config.hidden_dropout

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the block's output, same shape and dtype; with experts their load balancing loss too."""
        # Checkpointed inside the module, not around it: the recomputation then runs between this unit's own
        # pre-backward and post-backward hooks, on weights that are gathered already.
        layer = functools.partial(checkpoint, self._layer, use_reentrant=False) if self._recomputes else self._layer
        result: Tensor | tuple[Tensor, Tensor] = (layer if torch.is_grad_enabled() else self._layer)(hidden)
        return result

    def _layer(self, hidden: Tensor) -> Any:
        hidden = hidden + self._dropped(self.self_attention(self.input_layernorm(hidden)))
        output = self.mlp(self.pre_mlp_layernorm(hidden))
        if isinstance(output, tuple):
            return hidden + self._dropped(output[0]), output[1]
        return hidden + self._dropped(output)

    def _dropped(self, added: Tensor) -> Tensor:
        return functional.dropout(added, self._dropout, self.training)


class SelfAttention(nn.Module):
    """Causal attention with one fused projection, laid out (group, queries|k|v, head_dim) as in Megatron.

    A group is one head of keys and values with the query heads that share it.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        num_groups = config.num_query_groups or config.num_attention_heads
        self.heads_per_group = config.num_attention_heads // num_groups
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.dropout = config.attention_dropout
        self.rotary_base = config.rotary_base if config.position_embedding_type == "rope" else None
        width, has_bias = num_groups * (self.heads_per_group + 2) * self.head_dim, not config.disable_bias_linear
        self.linear_qkv = nn.Linear(config.hidden_size, width, bias=has_bias)
        self.linear_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=has_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (batch, sequence, hidden) for the same."""
        # Each tensor-parallel rank has some of the groups.
        qkv = self.linear_qkv(hidden).unflatten(-1, (-1, (self.heads_per_group + 2) * self.head_dim)).transpose(1, 2)
        query, key, value = qkv.split([self.heads_per_group * self.head_dim, self.head_dim, self.head_dim], dim=-1)
        if self.heads_per_group > 1:  # each (batch, groups, sequence, its width)
            query = query.unflatten(-1, (self.heads_per_group, self.head_dim)).transpose(2, 3).flatten(1, 2)
            key, value = (part.repeat_interleave(self.heads_per_group, dim=1) for part in (key, value))
        if self.rotary_base is not None:
            query, key = rotated(query, self.rotary_base), rotated(key, self.rotary_base)
        dropped = self.dropout if self.training else 0.0
        core = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        output: Tensor = self.linear_proj(core.transpose(1, 2).flatten(2))
        return output


class Head(nn.Module):
    """Final norm and projection to the vocabulary; with tied embeddings the projection uses the embedding's weight."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.final_layernorm = build_norm(config)
        is_untied = config.untie_embeddings_and_output_weights
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if is_untied else None

    def forward(self, hidden: Tensor, tied_weight: Tensor | None) -> Tensor:
        """Return logits; ``tied_weight`` is the (vocabulary, hidden) word embedding, None when the head has its own."""
        normed = self.final_layernorm(hidden)
        if self.output_layer is not None:
            logits: Tensor = self.output_layer(normed)
            return logits
        assert tied_weight is not None
        return functional.linear(normed, tied_weight)


def build_norm(config: GptConfig) -> nn.Module:
    """Return the norm of ``--normalization`` over the hidden size."""
    norm = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    return norm(config.hidden_size, eps=config.norm_epsilon)


def rotated(heads: Tensor, base: float) -> Tensor:
    """Return (batch, heads, sequence, head_dim) with each position's features turned by its angles.

    Rotary position embedding (Su et al., RoFormer, 2021) in the layout of Megatron's default: feature ``i`` of the
    first half forms a plane with feature ``i`` of the second half, turned by ``position * base ** (-2 i / head_dim)``.
    """
    sequence, width = heads.shape[-2:]
    # fp32: bf16 cannot tell position 257 from 256
    exponents = torch.arange(0, width, 2, device=heads.device, dtype=torch.float32) / width
    positions = torch.arange(sequence, device=heads.device, dtype=torch.float32)
    angles = torch.outer(positions, float(base) ** -exponents)
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Mlp(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them, or SwiGLU (Shazeer, 2020) with ``--swiglu``."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        # SwiGLU: the first half is the gate, like in Megatron.
        inner, has_bias = (1 + config.swiglu) * config.ffn_hidden_size, not config.disable_bias_linear
        self.linear_fc1 = nn.Linear(config.hidden_size, inner, bias=has_bias)
        self.linear_fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=has_bias)
        self._is_gated = config.swiglu

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (batch, sequence, hidden) for the same."""
        output: Tensor = self.linear_fc2(_activated(self.linear_fc1(hidden), self._is_gated))
        return output


class MixtureOfExperts(nn.Module):
    """A mixture of experts: each token uses the ``--moe-router-topk`` experts with the highest scores of its router.

    No token is dropped. Every expert gets gradients in every step; they are zeros if no token chose it.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self._config = config

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, (batch, sequence, hidden), and the load balancing loss, a 0-d fp32 tensor."""
        weights, loss = route(self.router(hidden).float(), self._config)
        weights, tokens = weights.flatten(0, -2), hidden.flatten(0, -2)
        # Sorted by expert, as tokens travel.
        expert, token = weights.t().nonzero(as_tuple=True)
        counts = expert.bincount(minlength=weights.shape[-1])
        done = self.experts(tokens[token], counts) * weights[token, expert].to(hidden.dtype).unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, token, done).view_as(hidden), loss


def route(scores: Tensor, config: GptConfig) -> tuple[Tensor, Tensor]:
    """Return the experts' weights for each token, 0 for those not chosen, and the load balancing loss.

    The loss is ``coefficient * experts * sum over experts of (share of choices * mean probability)``, which is least
    when all experts are chosen alike (Fedus et al., Switch Transformers, 2021, equation 4; over this microbatch).
    """
    num_experts, num_chosen = scores.shape[-1], config.moe_router_topk
    probabilities = scores.softmax(dim=-1)
    chosen = (probabilities if config.moe_router_pre_softmax else scores).topk(num_chosen, dim=-1)
    shares = chosen.values if config.moe_router_pre_softmax else chosen.values.softmax(dim=-1)
    weights = torch.zeros_like(scores).scatter(-1, chosen.indices, shares)
    is_chosen = torch.zeros_like(scores).scatter(-1, chosen.indices, 1.0)
    load = is_chosen.flatten(0, -2).mean(dim=0) / num_chosen
    loss = config.moe_aux_loss_coeff * num_experts * (load * probabilities.flatten(0, -2).mean(dim=0)).sum()
    return weights, loss


class StackedLinear(nn.Module):
    """The weights (experts, out, in) and biases (experts, out) of linear layers, one for each expert."""

    def __init__(self, num_experts: int, num_in: int, num_out: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, num_out, num_in) * num_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_experts, num_out)) if has_bias else None


class Experts(nn.Module):
    """The MLPs of this rank's experts, with stacked weights; each MLP computes the tokens that are sent to it."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        has_bias, inner = not config.disable_bias_linear, (1 + config.swiglu) * config.ffn_hidden_size
        self.linear_fc1 = StackedLinear(config.num_experts, config.hidden_size, inner, has_bias=has_bias)
        self.linear_fc2 = StackedLinear(
            config.num_experts, config.ffn_hidden_size, config.hidden_size, has_bias=has_bias
        )
        self._is_gated = config.swiglu
        self._expert_mesh: DeviceMesh | None = None
        self._tensor_mesh: DeviceMesh | None = None

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts by the axis "ep", and its part of each by "tp": rows of one layer, then columns."""
        names = mesh.mesh_dim_names or ()
        for layer, divided in ((self.linear_fc1, 1), (self.linear_fc2, 2)):
            for name, parameter in list(layer.named_parameters()):
                # The second layer's bias is added to the sum of all parts.
                of_tensor: Placement = Shard(divided) if divided < parameter.ndim else Replicate()
                placements = [Shard(0) if axis == "ep" else of_tensor for axis in names]
                value = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
                setattr(layer, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        self._expert_mesh = mesh["ep"] if "ep" in names else None
        self._tensor_mesh = mesh["tp"] if "tp" in names else None

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return outputs for ``tokens``, (rows, hidden); the first ``counts[0]`` rows belong to the first expert."""
        if self._expert_mesh is None:
            return self._computed(tokens, counts.tolist())
        group, size = self._expert_mesh.get_group(), self._expert_mesh.size()
        # Rows arrive ordered by source rank, and within a rank by expert.
        arriving = all_to_all_single(counts, None, None, group).view(size, -1)
        sent, received = counts.view(size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        mine = all_to_all_single_autograd(tokens, received, sent, group)
        expert_of_row = torch.arange(arriving.shape[1], device=tokens.device).repeat(size)
        order = expert_of_row.repeat_interleave(arriving.flatten()).argsort(stable=True)
        done = self._computed(mine[order], arriving.sum(0).tolist())
        done = torch.zeros_like(done).index_copy(0, order, done)
        result: Tensor = all_to_all_single_autograd(done, sent, received, group)
        return result

    def _computed(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        first, second, mesh = self.linear_fc1, self.linear_fc2, self._tensor_mesh
        parts: list[Any] = [first.weight, first.bias, second.weight, second.bias]
        up, up_bias, down, down_bias = (part.to_local() if isinstance(part, DTensor) else part for part in parts)
        if mesh is not None:  # every rank has all tokens, and a part of their gradients
            tokens = DTensor.from_local(tokens, mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
        biases = [None] * len(counts) if up_bias is None else up_bias.unbind(0)
        weights = zip(tokens.split(list(counts)), up.unbind(0), biases, down.unbind(0), strict=True)
        output = torch.cat(
            [
                functional.linear(_activated(functional.linear(x, a, bias), self._is_gated), b)
                for x, a, bias, b in weights
            ]
        )
        if mesh is not None:
            output = DTensor.from_local(output, mesh, [Partial()], run_check=False).full_tensor()
        if down_bias is None:
            return output
        repeats = torch.tensor(counts, device=tokens.device)
        return output + down_bias.repeat_interleave(repeats, dim=0, output_size=len(output))


def _activated(inner: Tensor, is_gated: bool) -> Tensor:
    """Return the activation between the two layers of an MLP: GELU (tanh), or with ``--swiglu`` gate times value."""
    if not is_gated:
        return functional.gelu(inner, approximate="tanh")
    gate, value = inner.chunk(2, dim=-1)
    return functional.silu(gate) * value


@torch.no_grad()
def continued(
    model: nn.Module, tokenizer: Tokenizer, context: int, args: argparse.Namespace, device: torch.device
) -> str:
    """Return ``--prompt`` and ``--num-tokens-to-generate`` tokens drawn after it, each from the last ``context``.

    Every rank of a sharded model calls this function, because each token needs a forward pass with its all-gathers. All
    ranks draw the same tokens from ``--seed``. With a ``--temperature`` of 0 the most likely token is taken.
    """
    model.eval()
    generator = torch.Generator().manual_seed(args.seed)
    text: list[int] = tokenizer.encode(args.prompt)
    for _ in range(args.num_tokens_to_generate):
        seen = torch.tensor([text[-context:]], device=device)
        # Logits above the tokenizer's vocabulary are padding.
        logits: Tensor = model(seen)[0, -1, : tokenizer.vocabulary_size].float().cpu()
        if args.temperature == 0:
            text.append(int(logits.argmax()))
        else:
            shares = (logits / args.temperature).softmax(dim=0)
            text.append(int(torch.multinomial(shares, 1, generator=generator)))
    model.train()
    return tokenizer.decode(text)
