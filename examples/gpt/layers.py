"""Parts of a block by Megatron's flags: norms, rotary positions, the MLP and a mixture of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpt.experts import Experts, activated
from gpt.model_config import GptConfig


def build_norm(config: GptConfig) -> nn.Module:
    """Return the norm of ``--normalization`` over the hidden size."""
    if config.normalization == "RMSNorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)


def rotated(heads: Tensor, base: float) -> Tensor:
    """Return (batch, heads, sequence, head_dim) with each position's features turned by its angles.

    Rotary position embedding (Su et al., RoFormer, 2021) in the layout of Megatron's default: feature ``i`` of the
    first half forms a plane with feature ``i`` of the second half, turned by ``position * base ** (-2 i / head_dim)``.
    So a product of a query and a key depends on the difference of their positions alone.
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
        has_bias = not config.disable_bias_linear
        # With SwiGLU the first half is the gate, as in Megatron.
        inner = 2 * config.ffn_hidden_size if config.swiglu else config.ffn_hidden_size
        self.linear_fc1 = nn.Linear(config.hidden_size, inner, bias=has_bias)
        self.linear_fc2 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=has_bias)
        self._config = config

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP output, (batch, sequence, hidden)."""
        output: Tensor = self.linear_fc2(activated(self.linear_fc1(hidden), self._config))
        return output


class MixtureOfExperts(nn.Module):
    """MLPs of which each token uses the ``--moe-router-topk`` that its router scores highest.

    No token is dropped, and every expert gets gradients in every step, zeros where no token chose it.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self._config = config

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, (batch, sequence, hidden), and the load balancing loss, a 0-d fp32 tensor."""
        scores: Tensor = self.router(hidden).float()
        weights, loss = route(scores, self._config)
        weights, tokens = weights.flatten(0, -2), hidden.flatten(0, -2)
        # Sorted by expert, as tokens travel.
        expert, token = weights.t().nonzero(as_tuple=True)
        counts = expert.bincount(minlength=weights.shape[-1])
        done = self.experts(tokens[token], counts) * weights[token, expert].to(hidden.dtype).unsqueeze(-1)
        output = torch.zeros_like(tokens).index_add(0, token, done).view_as(hidden)
        return output, loss


def route(scores: Tensor, config: GptConfig) -> tuple[Tensor, Tensor]:
    """Return the experts' weights for each token, 0 for those not chosen, and the load balancing loss.

    The loss is ``coefficient * experts * sum over experts of (share of choices * mean probability)``, which is least
    when all experts are chosen alike (Fedus et al., Switch Transformers, 2021, equation 4; over this microbatch).

    Args:
        scores: (..., experts) fp32.
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
