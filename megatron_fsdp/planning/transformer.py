"""What a transformer computes and keeps for backward, from its shapes: floating-point operations and activations.

Sources: Kaplan et al. 2020 (6 operations per weight and token), Chowdhery et al. 2022, appendix B (attention on top of
it), Korthikanti et al. 2022, section 4 (activations). The last describes GPT in 16 bits with dropout; it is adapted to
gated MLPs, grouped queries, routed experts, other dtypes and no dropout, term by term in ``LayerShape``.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

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
    """A catalog architecture as its layers' widths and its units' work.

    Attributes:
        has_head: whether the loss is computed, not on another stage of a pipeline.
    """

    layers: tuple[LayerShape, ...]
    hidden: int
    vocab: int
    units: tuple[tuple[str, UnitShapes], ...]
    architecture: Architecture
    has_head: bool = True
    stream_ranks: int = 1

    @classmethod
    def of(cls, architecture: Architecture, *, has_head: bool = True, stream_ranks: int = 1) -> Transformer:
        """Read the widths off the shapes; routed experts count with the share of them that one token uses."""
        layers = tuple(
            replace(_layer_shape(unit, experts, architecture), stream_ranks=stream_ranks)
            for unit, experts in _with_experts(architecture.units)
            if unit.name.endswith("layer")
        )
        units = tuple((unit.name, unit) for unit in architecture.units)
        return cls(
            layers, architecture.hidden_size, architecture.vocab_size, units, architecture, has_head, stream_ranks
        )

    def work(self, sequence_length: int) -> dict[str, UnitWork]:
        """Return the work of each kind of unit, by its name.

        An embedding that is only looked up costs nothing; a tied one is the output matrix too. Attention is counted
        over the whole sequence, as in the sources, whatever its mask leaves out.
        """
        attention = 4 * self.architecture.num_attention_heads * self.architecture.head_dim * sequence_length
        return {name: self._unit_work(unit, attention) for name, unit in self.units}

    def _unit_work(self, unit: UnitShapes, attention: int) -> UnitWork:
        if unit.name == "experts":
            return UnitWork(2 * round(unit.num_parameters * _expert_share(self.architecture)), is_layer=True)
        if unit.name == "embedding" and self.vocab:
            return UnitWork(2 * self.vocab * self.hidden if self.architecture.tied else 0)
        is_layer = unit.name.endswith("layer")
        return UnitWork(2 * unit.num_parameters, attention if is_layer else 0, is_layer)

    def step_operations(self, workload: Workload) -> int:
        """Return the floating-point operations of an optimizer step on one rank.

        6 N per token, N without a looked-up embedding, plus 12 per layer, query element and attended token; with full
        recomputation 8 N and 16.
        """
        kinds = self.work(workload.sequence_length)
        per_microbatch = sum(
            unit.count * (kinds[name].forward(workload) + kinds[name].backward(workload)) for name, unit in self.units
        )
        return workload.num_microbatches * per_microbatch

    def activation_bytes(self, workload: Workload, itemsize: int, num_held: int = 1) -> int:
        """Return the activations that one rank holds at the highest, when the loss of a microbatch is there.

        Args:
            num_held: of so many microbatches, whose backward is still to come, on a stage of a pipeline.

        With full recomputation each layer keeps its input, and while one is computed again all that it would keep. On
        top come the inputs of the last norm and of the output matrix, and the logits: in compute dtype, in FP32, and
        their log-probabilities, as PyTorch's cross entropy keeps them (Korthikanti et al. count 4 bytes per logit).
        """
        inner = [layer.activation_bytes(workload, itemsize) for layer in self.layers]
        if workload.recompute is Recompute.FULL:
            num_layers = sum(layer.count for layer in self.layers)
            kept = num_layers * workload.tokens * self.hidden * itemsize // self.stream_ranks * num_held
            kept += max(inner, default=0)
        else:
            kept = sum(layer.count * each for layer, each in zip(self.layers, inner, strict=True)) * num_held
        if not self.has_head:
            return kept
        copies = 4 if itemsize >= 4 else itemsize + 4
        logits = self.vocab * (copies + 4) if self.vocab else 0
        return kept + workload.tokens * (2 * self.hidden * itemsize + logits)


def _with_experts(units: tuple[UnitShapes, ...]) -> list[tuple[UnitShapes, UnitShapes | None]]:
    following = (*units[1:], None)
    return [
        (unit, after if after and after.name == "experts" else None)
        for unit, after in zip(units, following, strict=True)
    ]


def _expert_share(architecture: Architecture) -> float:
    """Return the share of the routed experts' weights that one token uses."""
    routed = sum(unit.count * unit.num_parameters for unit in architecture.units if unit.name == "experts")
    return 1 - (architecture.num_parameters - architecture.num_active_parameters) / routed if routed else 0.0


def _layer_shape(unit: UnitShapes, experts: UnitShapes | None, architecture: Architecture) -> LayerShape:
    hidden = architecture.hidden_size
    is_gated = any("gate_proj" in name or "gate_up_proj" in name for name, _ in (*unit.parameters, *_of(experts)))
    matrices = 3 if is_gated else 2
    dense = sum(math.prod(shape) for name, shape in unit.parameters if _is_mlp_matrix(name, shape))
    share = _expert_share(architecture)
    routed = sum(math.prod(shape) for _, shape in _of(experts) if len(shape) == 3)
    num_experts = max((shape[0] for _, shape in _of(experts)), default=0)
    return LayerShape(
        count=unit.count,
        hidden=hidden,
        num_norms=sum(
            shape == (hidden,) and name.endswith("weight") and "norm" in name.replace("ln_", "norm")
            for name, shape in unit.parameters
        ),
        heads=architecture.num_attention_heads,
        query_width=architecture.num_attention_heads * architecture.head_dim,
        key_value_width=architecture.num_key_value_heads * architecture.head_dim,
        mlp_width=round((dense + routed * share) / (matrices * hidden)),
        is_gated=is_gated,
        copies=round(num_experts * share),
    )


def _of(experts: UnitShapes | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return experts.parameters if experts is not None else ()


def _is_mlp_matrix(name: str, shape: tuple[int, ...]) -> bool:
    is_router = name in ("mlp.gate.weight", "mlp.router.weight")
    return name.startswith("mlp.") and len(shape) == 2 and not is_router
