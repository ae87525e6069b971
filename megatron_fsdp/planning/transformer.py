"""What a transformer computes and keeps for backward, from its shapes: floating-point operations and activations.

Sources: Kaplan et al. 2020 (6 operations per weight and token), Chowdhery et al. 2022, appendix B (attention on top of
it), Korthikanti et al. 2022, section 4 (activations). The last describes GPT in 16 bits with dropout; it is adapted to
gated MLPs, grouped queries, routed experts, other dtypes and no dropout, term by term in ``LayerShape``.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from megatron_fsdp.planning.catalog import Architecture, UnitShapes

__all__ = ["LayerShape", "Recompute", "Transformer", "UnitWork", "Workload"]


class Recompute(str, enum.Enum):
    """What backward computes again: NONE; FULL, each layer from its input; SELECTIVE, the attention core alone."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


@dataclass(frozen=True, slots=True)
class Workload:
    """What one rank computes in an optimizer step.

    Attributes:
        micro_batch: sequences in one forward pass. sequence_length: tokens in each.
        fused_attention: scores are never stored (flash attention, ``scaled_dot_product_attention``).
        dropout: masks are stored after the attention core, the output projection and the MLP.
        context_ranks: so many ranks share each sequence; every token attends to all of it.
    """

    micro_batch: int = 1
    sequence_length: int = 4096
    num_microbatches: int = 1
    recompute: Recompute = Recompute.NONE
    fused_attention: bool = True
    dropout: bool = False
    context_ranks: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.micro_batch * self.sequence_length // self.context_ranks


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Widths inside one kind of layer, which decide its activations.

    Attributes:
        count: layers of this kind. hidden: width of the residual stream.
        num_norms: normalisations of the whole stream.
        heads: query heads. query_width, key_value_width: over all heads; keys and values have the latter each.
        mlp_width: inside the MLP as one token sees it: dense, shared and chosen experts together.
        is_gated: the MLP multiplies two projections of its input.
        copies: experts that a token is sent to; 0 without routing.
        stream_ranks: so many tensor-parallel ranks share the residual stream of a token.
    """

    count: int
    hidden: int
    num_norms: int
    heads: int
    query_width: int
    key_value_width: int
    mlp_width: int
    is_gated: bool
    copies: int = 0
    stream_ranks: int = 1

    def activation_bytes(self, workload: Workload, itemsize: int) -> int:
        """Return what one layer keeps for its backward, with nothing recomputed but what ``workload`` says.

        Of every token, in elements: the input of each norm; the input of the three attention projections and that of
        the MLP; queries, keys, values and the input of the output projection; in the MLP the activation's input and
        the last matrix's input (gated: also both factors); with routing, the copies of the token that go to experts
        and come back. One byte per element for each dropout mask. With unfused attention, for each head and pair of
        tokens, the probabilities, and with dropout their mask and what it leaves.

        With the sizes of GPT (two norms, MLP of 4 h), dropout and 2 bytes these are the 34 s b h + 5 a s^2 b of
        Korthikanti et al. 2022, equation 2.
        """
        mlp = (4 if self.is_gated else 2) * self.mlp_width
        stream = (self.num_norms + 2 + 2 * self.copies) * self.hidden // self.stream_ranks
        elements = stream + 2 * self.query_width + 2 * self.key_value_width + mlp
        per_token = elements * itemsize + (2 * self.hidden // self.stream_ranks if workload.dropout else 0)
        is_core_kept = workload.recompute is Recompute.NONE and not workload.fused_attention
        if is_core_kept:
            per_pair = itemsize + (itemsize + 1 if workload.dropout else 0)
            per_token += self.heads * workload.sequence_length * per_pair
        return workload.tokens * per_token


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Floating-point operations of one unit and token in forward.

    Attributes:
        matrix: 2 per weight that the token uses. attention: 4 per query element and token attended to.
        is_layer: whether full recomputation covers it.
    """

    matrix: int
    attention: int = 0
    is_layer: bool = False

    def forward(self, workload: Workload) -> int:
        """Return the operations of one microbatch on one rank."""
        return workload.tokens * (self.matrix + self.attention)

    def backward(self, workload: Workload) -> int:
        """Return those of its backward: twice forward, and what is computed again."""
        again = {
            Recompute.NONE: 0,
            Recompute.SELECTIVE: self.attention,
            Recompute.FULL: self.matrix + self.attention if self.is_layer else 0,
        }[workload.recompute]
        return 2 * self.forward(workload) + workload.tokens * again


@dataclass(frozen=True, slots=True)
class Transformer:
    """What a catalog architecture computes and keeps.

    Attributes:
        has_head: whether the loss is computed, not on another stage of a pipeline. stream_ranks: as in ``LayerShape``.
    """

    architecture: Architecture
    has_head: bool = True
    stream_ranks: int = 1

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """The kinds of layers; routed experts count with the share of them that one token uses."""
        kinds = self.architecture.kinds()
        return tuple(self._layer(unit, experts) for unit, experts in kinds if unit.name.endswith("layer"))

    def work(self, sequence_length: int) -> dict[str, UnitWork]:
        """Return the work of each kind of unit, by its name.

        An embedding that is only looked up costs nothing; a tied one is the output matrix too. Attention is counted
        over the whole sequence, as in the sources, whatever its mask leaves out.
        """
        shape = self.architecture
        attention = 4 * shape.num_attention_heads * shape.head_dim * sequence_length
        kinds: dict[str, UnitWork] = {}
        for unit in shape.units:
            is_layer = unit.name.endswith("layer")
            kinds[unit.name] = UnitWork(2 * unit.num_parameters, attention * is_layer, is_layer)
            if unit.name == "experts":
                kinds[unit.name] = UnitWork(2 * round(unit.num_parameters * shape.expert_share), is_layer=True)
            elif unit.name == "embedding" and shape.vocab_size:
                kinds[unit.name] = UnitWork(2 * shape.vocab_size * shape.hidden_size * shape.tied)
        return kinds

    def activation_bytes(self, workload: Workload, itemsize: int, num_held: int = 1) -> int:
        """Return the activations that one rank holds at the highest, when the loss of a microbatch is there.

        Args:
            num_held: of so many microbatches, whose backward is still to come, on a stage of a pipeline.

        With full recomputation each layer keeps its input, and while one is computed again all that it would keep. On
        top come the inputs of the last norm and of the output matrix, and the logits: in compute dtype, in FP32, and
        their log-probabilities, as PyTorch's cross entropy keeps them (Korthikanti et al. count 4 bytes per logit).
        """
        hidden, vocab = self.architecture.hidden_size, self.architecture.vocab_size
        inner = [layer.activation_bytes(workload, itemsize) for layer in self.layers]
        counts = [layer.count for layer in self.layers]
        if workload.recompute is Recompute.FULL:
            kept = sum(counts) * workload.tokens * hidden * itemsize // self.stream_ranks * num_held
            kept += max(inner, default=0)
        else:
            kept = sum(count * each for count, each in zip(counts, inner, strict=True)) * num_held
        copies = 4 if itemsize >= 4 else itemsize + 4
        return kept + self.has_head * workload.tokens * (2 * hidden * itemsize + vocab * (copies + 4))

    def _layer(self, unit: UnitShapes, experts: UnitShapes | None) -> LayerShape:
        shape, hidden = self.architecture, self.architecture.hidden_size
        routed = experts.parameters if experts is not None else ()
        is_gated = any("gate_proj" in name or "gate_up_proj" in name for name, _ in (*unit.parameters, *routed))
        dense = sum(math.prod(dims) for name, dims in unit.parameters if _is_mlp_matrix(name, dims))
        used = sum(math.prod(dims) for _, dims in routed if len(dims) == 3) * shape.expert_share
        num_norms = sum(
            dims == (hidden,) and name.endswith("weight") and ("norm" in name or name.startswith("ln_"))
            for name, dims in unit.parameters
        )
        return LayerShape(
            count=unit.count,
            hidden=hidden,
            num_norms=num_norms,
            heads=shape.num_attention_heads,
            query_width=shape.num_attention_heads * shape.head_dim,
            key_value_width=shape.num_key_value_heads * shape.head_dim,
            mlp_width=round((dense + used) / ((3 if is_gated else 2) * hidden)),
            is_gated=is_gated,
            copies=round(max((dims[0] for _, dims in routed), default=0) * shape.expert_share),
            stream_ranks=self.stream_ranks,
        )


def _is_mlp_matrix(name: str, dims: tuple[int, ...]) -> bool:
    return name.startswith("mlp.") and len(dims) == 2 and name not in ("mlp.gate.weight", "mlp.router.weight")
