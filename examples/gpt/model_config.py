"""What defines the model."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GptConfig:
    """What defines the model; the field names are the flag names, so that errors can name the flag.

    Attributes:
        num_query_groups: heads of keys and values; None is one for each query head.
        num_experts: MLPs per block that a router chooses from; None is a plain MLP.
        vocab_size: rows of the word embedding, padding included.
    """

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

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> GptConfig:
        """Return the configuration that validated arguments ask for."""
        names = {field.name for field in dataclasses.fields(cls)} - {"vocab_size", "num_query_groups"}
        return cls(
            **{name: getattr(args, name) for name in names},
            vocab_size=args.padded_vocab_size,
            num_query_groups=args.num_query_groups if args.group_query_attention else None,
        )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups
