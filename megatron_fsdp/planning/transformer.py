"""What a transformer computes and keeps for backward, from its shapes: floating-point operations and activations.

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
    """What one rank computes in an optimizer step.

    Attributes:
        micro_batch: sequences in one forward pass. sequence_length: tokens in each.
        recompute: "none", or "full": backward computes each layer again from its input.
        context_ranks: so many ranks share each sequence; every token attends to all of it.
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
        """Whether layers are computed again."""
        return self.recompute == "full"


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Floating-point operations of one unit and token in forward.

    Attributes:
        matrix: 2 per weight that the token uses. attention: 4 per query element and token attended to.
        is_layer: whether recomputation covers it.
    """

    matrix: int
    attention: int = 0
    is_layer: bool = False

    def microbatch(self, workload: Workload) -> int:
        """Return those of forward and backward of all tokens: backward's are twice forward's, and what comes again."""
        return (3 + (workload.recomputes and self.is_layer)) * workload.tokens * (self.matrix + self.attention)


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of layer.

    Attributes:
        count: how many. elements: what one keeps of a token for its backward.
        copies: experts that a token is sent to; 0 without routing.
    """

    count: int
    elements: int
    copies: int


@dataclass(frozen=True, slots=True)
class Transformer:
    """What a catalog architecture computes and keeps.

    Attributes:
        has_head: whether the loss is computed, not on another stage of a pipeline.
        stream_ranks: so many tensor-parallel ranks share the residual stream of a token.
        num_held: of so many microbatches, whose backward is still to come, a stage of a pipeline keeps what it needs.
    """

    architecture: Architecture
    has_head: bool = True
    stream_ranks: int = 1
    num_held: int = 1

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The kinds of layers; routed experts count with the share of them that one token uses."""
        kinds = self.architecture.kinds()
        return tuple(self._layer(unit, experts) for unit, experts in kinds if unit.is_layer)

    def work(self, sequence_length: int) -> dict[str, UnitWork]:
        """Return the work of each kind of unit, by its name.

        An embedding that is only looked up costs nothing; a tied one is the output matrix too. Attention is counted
        over the whole sequence, as in the sources, whatever its mask leaves out.
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
        """Return the activations that one rank holds at the highest, when the loss of a microbatch is there.

        With recomputation each layer keeps its input, and while one is computed again all that it would keep. On
        top come the inputs of the last norm and of the output matrix, and the logits: in compute dtype, in FP32, and
        their log-probabilities, as PyTorch's cross entropy keeps them (Korthikanti et al. count 4 bytes per logit).
        """
        hidden, vocab = self.architecture.hidden_size, self.architecture.vocab_size
        kept = sum(layer.count * layer.elements for layer in self.layers) * self.num_held
        if workload.recomputes:
            kept = sum(layer.count for layer in self.layers) * hidden // self.stream_ranks * self.num_held
            kept += max((layer.elements for layer in self.layers), default=0)
        copies = 4 if itemsize >= 4 else itemsize + 4
        return workload.tokens * (kept * itemsize + self.has_head * (2 * hidden * itemsize + vocab * (copies + 4)))

    def _layer(self, unit: UnitShapes, experts: UnitShapes | None) -> Layer:
        """Describe a kind of layer.

        A token leaves the input of each norm; that of the three attention projections and that of the MLP; queries,
        keys, values and the input of the output projection; in the MLP, as wide as the experts that it uses together,
        the activation's input and the last matrix's input (gated: also both factors); with routing, the copies that go
        to experts and come back. Of GPT these are the 34 s b h bytes of Korthikanti et al., but for 2 of dropout masks.
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
