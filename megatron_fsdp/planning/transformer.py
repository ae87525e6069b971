"""Floating-point operations and activations of a transformer, from its shapes.

Sources: Kaplan et al. 2020 (6 operations per weight and token), Chowdhery et al. 2022, appendix B (attention on top of
it), Korthikanti et al. 2022, section 4 (activations), whose GPT is adapted term by term to gated MLPs, grouped queries,
routed experts, other dtypes, fused attention (scores are never stored) and no dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_fsdp.planning.catalog import Architecture, UnitShapes, is_norm

__all__ = ["Layer", "Transformer", "UnitWork", "Workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one rank in an optimizer step.

    Attributes:
        micro_batch: sequences per forward pass. sequence_length: tokens per sequence.
        recompute: "none", or "full": backward recomputes each layer from its input.
        context_ranks: number of ranks that share each sequence; every token attends to the whole sequence.
    """

    micro_batch: int = 1
    sequence_length: int = 4096
    num_microbatches: int = 1
    recompute: str = "none"
    context_ranks: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.micro_batch * self.sequence_length // self.context_ranks

    @property
    def recomputes(self) -> bool:
        """True if backward recomputes layers."""
        return self.recompute == "full"


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Floating-point operations of one unit per token in forward.

    Attributes:
        matrix: 2 per weight that the token uses. attention: 4 per query element and attended token.
        is_layer: whether recomputation covers the unit.
    """

    matrix: int
    attention: int = 0
    is_layer: bool = False

    def microbatch(self, workload: Workload) -> int:
        """Return forward and backward operations for all tokens; backward costs twice forward, plus recompute."""
        return (3 + (workload.recomputes and self.is_layer)) * workload.tokens * (self.matrix + self.attention)


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of layer.

    Attributes:
        count: number of such layers. elements: elements kept per token for one layer's backward.
        copies: number of experts that a token is sent to; 0 without routing.
    """

    count: int
    elements: int
    copies: int


@dataclass(frozen=True, slots=True)
class Transformer:
    """The computation and activations of a catalog architecture.

    Attributes:
        has_head: whether the loss is computed here; False on earlier pipeline stages.
        stream_ranks: number of tensor-parallel ranks that share a token's residual stream.
        num_held: number of microbatches whose activations a pipeline stage holds at once.
    """

    architecture: Architecture
    has_head: bool = True
    stream_ranks: int = 1
    num_held: int = 1

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The kinds of layers. Routed experts count with the share of them that one token uses."""
        kinds = self.architecture.kinds()
        return tuple(self._layer(unit, experts) for unit, experts in kinds if unit.is_layer)

    def work(self, sequence_length: int) -> dict[str, UnitWork]:
        """Return the work of each kind of unit, by its name.

        A lookup in the embedding costs nothing; a tied embedding is also the output matrix. As in the sources,
        attention counts all tokens of the sequence, also those that the mask excludes.
        """
        shape = self.architecture
        attention = 4 * shape.num_attention_heads * shape.head_dim * sequence_length
        kinds: dict[str, UnitWork] = {}
        for unit in shape.units:
            kinds[unit.name] = UnitWork(2 * unit.num_parameters, attention * unit.is_layer, unit.is_layer)
            if unit.name == "experts":
                kinds[unit.name] = UnitWork(2 * round(unit.num_parameters * shape.expert_share), is_layer=True)
            elif unit.name == "embedding" and shape.vocab_size:
                kinds[unit.name] = UnitWork(2 * shape.vocab_size * shape.hidden_size * shape.tied)
        return kinds

    def activation_bytes(self, workload: Workload, itemsize: int) -> int:
        """Return the most activation bytes that one rank holds, reached when a microbatch's loss has been computed.

        With recomputation each layer keeps its input, and the layer being recomputed keeps everything. Added to these
        are the inputs of the last norm and of the output matrix, and the logits: in compute dtype, in FP32, and their
        log-probabilities, as PyTorch's cross entropy keeps them (Korthikanti et al. count 4 bytes per logit).
        """
        hidden, vocab = self.architecture.hidden_size, self.architecture.vocab_size
        kept = sum(layer.count * layer.elements for layer in self.layers) * self.num_held
        if workload.recomputes:
            kept = sum(layer.count for layer in self.layers) * hidden // self.stream_ranks * self.num_held
            kept += max((layer.elements for layer in self.layers), default=0)
        copies = 4 if itemsize >= 4 else itemsize + 4
        return workload.tokens * (kept * itemsize + self.has_head * (2 * hidden * itemsize + vocab * (copies + 4)))

    def _layer(self, unit: UnitShapes, experts: UnitShapes | None) -> Layer:
        """Return the activations of a kind of layer.

        Per token, these are kept: the input of each norm; the shared input of the three attention projections, and that
        of the MLP; queries, keys, values and the input of the output projection. In the MLP, the inputs of the
        activation and of the last matrix are kept (gated: also both factors), with the total width of the experts that
        the token uses; with routing, also the copies that are sent to experts and back. For GPT these are the 34 s b h
        bytes of Korthikanti et al., except 2 for dropout masks.
        """
        shape, hidden = self.architecture, self.architecture.hidden_size
        routed = experts.parameters if experts is not None else ()
        is_gated = any("gate_proj" in name or "gate_up_proj" in name for name, _ in (*unit.parameters, *routed))
        dense = sum(math.prod(dims) for name, dims in unit.parameters if _is_mlp_matrix(name, dims))
        used = sum(math.prod(dims) for _, dims in routed if len(dims) == 3) * shape.expert_share
        width = round((dense + used) / ((3 if is_gated else 2) * hidden))
        copies = round(max((dims[0] for _, dims in routed), default=0) * shape.expert_share)
        norms = sum(dims == (hidden,) and name.endswith("weight") and is_norm(name) for name, dims in unit.parameters)
        stream = (norms + 2 + 2 * copies) * hidden // self.stream_ranks
        heads = 2 * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
        return Layer(unit.count, stream + heads + (4 if is_gated else 2) * width, copies)


def _is_mlp_matrix(name: str, dims: tuple[int, ...]) -> bool:
    return name.startswith("mlp.") and len(dims) == 2 and name not in ("mlp.gate.weight", "mlp.router.weight")
