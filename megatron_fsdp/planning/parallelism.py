"""Compute one rank's part of a model under tensor, expert, context and pipeline parallelism, and its collectives.

Layers are divided as in Megatron-LM. Attention heads, the first layers of MLPs and the vocabulary are divided by
outputs, the layers after them by inputs. Norms, routers and the narrow projections of latent attention are whole on
every tensor-parallel rank. Expert-parallel ranks hold whole experts, each of which may be divided like an MLP.
Context-parallel ranks share a sequence and have the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dbuffer import CollectiveCall
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.catalog import Architecture, Parameters, UnitShapes, is_norm
from megatron_fsdp.planning.transformer import Transformer, Workload

__all__ = ["ModelTransfer", "Parallelism", "Stage", "bubble_share", "in_flight", "model_transfers", "stages_of"]


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Sizes of the model-parallel groups of a job.

    Attributes:
        tensor: ranks that share each layer. expert: ranks that share the experts of a layer.
        pipeline: stages. context: ranks that share each sequence; for weights they count as data-parallel ranks.
        expert_tensor: ranks that share each expert; 0: as many as ``tensor``.
        is_sequence_parallel: activations between the tensor-parallel parts of layers are divided too, by tokens.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    expert_tensor: int = 0
    is_sequence_parallel: bool = False

    @property
    def ranks_of_expert(self) -> int:
        """Ranks that share each expert."""
        return self.expert_tensor or self.tensor

    @property
    def is_any(self) -> bool:
        """True if the model is divided at all."""
        return max(self.tensor, self.expert, self.pipeline, self.context, self.ranks_of_expert) > 1

    @property
    def stream_ranks(self) -> int:
        """Ranks that share the residual stream of a sequence part."""
        return self.tensor if self.is_sequence_parallel else 1

    def data_ranks(self, world: int) -> int:
        """Return the number of ranks (data x context parallel) that shard dense weights, or raise ConfigError."""
        _share(world, self.tensor * self.pipeline * self.context, "--tp x --pp x --cp", f"--world {world}")
        _share(world, self.ranks_of_expert * self.expert * self.pipeline, "--etp x --ep x --pp", f"--world {world}")
        return world // (self.tensor * self.pipeline)

    def expert_data_ranks(self, data_ranks: int) -> int:
        """Return the number of ranks over which one expert's weights are sharded, or raise ConfigError.

        It is world / (etp x ep x pp), as in Megatron-LM's ``parallel_state``.
        """
        ranks = data_ranks * self.tensor
        return _share(
            ranks, self.ranks_of_expert * self.expert, "--etp x --ep", f"the {ranks} ranks of one stage's axis"
        )


def _share(number: int, size: int, flags: str, of_what: str) -> int:
    if number % size:
        raise ConfigError(f"{flags} is {size}, which does not divide {of_what}. fix: use sizes that divide it")
    return number // size


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of the model that one rank of a pipeline stage has.

    Attributes:
        number: from 0. layers: index of its first layer in the model, and its number of layers.
        architecture: the stage's units, with the shapes of one rank.
        has_head: whether the loss is computed on this stage.
    """

    number: int
    layers: tuple[int, int]
    architecture: Architecture
    has_head: bool


def stages_of(architecture: Architecture, parallelism: Parallelism) -> tuple[Stage, ...]:
    """Return the part of the model on a rank of each stage.

    Each stage gets consecutive layers. If the layers do not divide evenly, the stages after the first get one layer
    more each until none is left, because the first stage has the embedding. A tied output matrix is on both the first
    and the last stage.

    ConfigError: the model has fewer layers than stages, or a parallel size does not divide its shapes.
    """
    _check(architecture, parallelism)
    units = tuple(_sliced(unit, architecture, parallelism) for unit in architecture.units)
    kinds = [kind for kind in replace(architecture, units=units).kinds() if kind[0].name not in ("embedding", "head")]
    layers = [unit for unit, _ in kinds for _ in range(unit.count)]
    first, last = _ends(units, is_split=architecture.tied and parallelism.pipeline > 1)
    number, extra = divmod(len(layers), parallelism.pipeline)
    if not number:
        raise ConfigError(f"--pp {parallelism.pipeline} is more than the model's {len(layers)} layers. fix: lower --pp")
    stages: list[Stage] = []
    start = 0
    for position in range(parallelism.pipeline):
        count = number + (1 <= position <= extra)
        has_head = position == parallelism.pipeline - 1
        own = list(first) if position == 0 else []
        for kind in kinds:
            alike = sum(each is kind[0] for each in layers[start : start + count])
            own += [replace(each, count=alike) for each in kind if each is not None and alike]
        own += list(last) if has_head else []
        stages.append(Stage(position, (start, count), _architecture(architecture, own, count, parallelism), has_head))
        start += count
    return tuple(stages)


def _check(architecture: Architecture, parallelism: Parallelism) -> None:
    if parallelism.expert > 1 and not architecture.num_routed_parameters:
        raise ConfigError(
            f"--ep {parallelism.expert}: {architecture.model_type} has no routed experts. fix: leave out --ep"
        )
    if parallelism.tensor * parallelism.pipeline * parallelism.context > 1 and not architecture.vocab_size:
        raise ConfigError(
            f"--tp, --pp and --cp divide language models; {architecture.model_type} is not one. fix: leave them out"
        )
    heads, groups = architecture.num_attention_heads, architecture.num_key_value_heads
    if heads % parallelism.tensor or (groups % parallelism.tensor and parallelism.tensor % groups):
        raise ConfigError(
            f"--tp {parallelism.tensor} does not divide {heads} attention heads with {groups} of keys and values. "
            "fix: use a --tp that divides both"
        )


def _ends(units: Sequence[UnitShapes], *, is_split: bool) -> tuple[Sequence[UnitShapes], Sequence[UnitShapes]]:
    """Return the units of the first stage before its layers, and those of the last stage after its layers."""
    first, last = ([unit for unit in units if unit.name == name] for name in ("embedding", "head"))
    if not is_split:
        return first, last
    parameters = first[0].parameters
    norms = tuple(each for each in parameters if is_norm(each[0]))
    tables = tuple(each for each in parameters if each[0].split(".")[0] in _TABLES)
    before = tuple(each for each in parameters if each not in norms)
    return [replace(first[0], parameters=before)], [UnitShapes("head", 1, (*norms, *tables))]


def _architecture(
    whole: Architecture, units: Sequence[UnitShapes], num_layers: int, parallelism: Parallelism
) -> Architecture:
    divided = replace(
        whole,
        units=tuple(units),
        tied=whole.tied and parallelism.pipeline == 1,
        num_layers=num_layers,
        num_attention_heads=whole.num_attention_heads // parallelism.tensor,
        num_key_value_heads=max(whole.num_key_value_heads // parallelism.tensor, 1),
        vocab_size=-(-whole.vocab_size // parallelism.tensor),
    )
    # Each rank computes its experts for the tokens of all ranks that share them: as many tokens as with all experts.
    routed = divided.num_routed_parameters
    used = round(routed * whole.expert_share * parallelism.expert)
    return replace(divided, num_active_parameters=divided.num_parameters - routed + used)


# The dim along which a module's matrix is divided; None: it is whole. GPT-2 stores (inputs, outputs).
_DIMS: dict[str, int | None] = {
    **dict.fromkeys("q_proj k_proj v_proj q_b_proj kv_b_proj gate_proj up_proj sinks".split(), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
    **dict.fromkeys("q_a_proj kv_a_proj_with_mqa gate router wpe".split()),
    **dict.fromkeys(("c_attn", "c_fc"), -1),
    "c_proj": 0,
}
# Biases of these layers are added after the sum over the ranks, so each rank has the whole bias.
_SUMMED = ("o_proj", "down_proj", "c_proj")
_TABLES = ("embed_tokens", "wte", "lm_head")


def _sliced(unit: UnitShapes, architecture: Architecture, parallelism: Parallelism) -> UnitShapes:
    """Return a unit with the shapes that one rank has."""
    found: Parameters = ()
    # (experts, outputs, inputs), except gpt_oss, which stores the transpose.
    outputs, inputs = (2, 1) if architecture.model_type == "gpt_oss" else (1, 2)
    dims = {"gate_up_proj": outputs, "down_proj": inputs, "gate_up_proj_bias": 1}
    for name, shape in unit.parameters:
        if unit.name == "experts":
            where = f"{unit.name}: {name}"
            shape = _divided(where, shape, 0, parallelism.expert, "--ep")
            if name in dims:
                shape = _divided(where, shape, dims[name], parallelism.ranks_of_expert, "--etp")
        elif parallelism.tensor > 1:
            shape = _sliced_shape(unit, name, shape, architecture.num_key_value_heads, parallelism.tensor)
        found += ((name, shape),)
    return replace(unit, parameters=found)


def _sliced_shape(
    unit: UnitShapes, name: str, shape: tuple[int, ...], num_key_value_heads: int, tensor: int
) -> tuple[int, ...]:
    words = name.split(".")
    module, is_bias = (words[-2] if len(words) > 1 else words[-1]), words[-1] == "bias"
    if is_bias and module in _SUMMED:
        return shape
    if module in _TABLES or (unit.name == "embedding" and len(words) == 1):
        # Megatron pads the vocabulary to a multiple of the ranks.
        return (-(-shape[0] // tensor), *shape[1:])
    where = f"unit {unit.name!r}, parameter {name!r}"
    dim = _DIMS.get(module)
    if dim is None:
        if len(shape) == 1 or module in _DIMS:
            return shape
        raise ConfigError(
            f"--tp {tensor}: how tensor parallelism cuts {where} of shape {shape} is unknown. fix: leave out --tp for "
            "this model"
        )
    # With fewer key and value heads than ranks, several ranks hold the same head.
    size = min(tensor, num_key_value_heads) if module in ("k_proj", "v_proj") else tensor
    return _divided(where, shape, dim % len(shape), size, "--tp")


def _divided(where: str, shape: tuple[int, ...], dim: int, size: int, flag: str) -> tuple[int, ...]:
    if shape[dim] % size:
        raise ConfigError(
            f"{flag} {size} does not divide dimension {dim} of {where}, {shape}. fix: use a divisor of {shape[dim]}"
        )
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class ModelTransfer:
    """Equal collectives of model parallelism in one optimizer step, over an axis that is not data-parallel."""

    what: str
    transfer: CollectiveCall
    count: int


def model_transfers(
    stage: Stage, parallelism: Parallelism, workload: Workload, itemsize: int
) -> tuple[ModelTransfer, ...]:
    """Return the model-parallel collectives that a rank of a stage issues in a step.

    Tensor parallelism: two all-reduces of the residual stream per layer and pass (Shoeybi et al. 2019, section 3). With
    sequence parallelism each is replaced by an all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2).
    Experts: two all-to-alls of the tokens' copies per layer and pass. Context: keys and values are gathered in forward
    and in backward; their gradients are reduce-scattered. Pipeline: the stream is sent to the next stage, its gradient
    back. With full recomputation the layers' forward communication runs twice.
    """
    passes, layers = 2 + workload.recomputes, Transformer(stage.architecture).layers
    stream = workload.tokens * stage.architecture.hidden_size * itemsize
    width = stage.architecture.num_key_value_heads * stage.architecture.head_dim
    found = list[tuple[str, CollectiveCall, int]]()
    if (ranks := parallelism.tensor) > 1:
        # The lookup in a divided table is summed in forward, the gradient of the output matrix's input in backward.
        count = 2 * passes * sum(layer.count for layer in layers) + (stage.number == 0) + stage.has_head
        kinds = ("all_gather", "reduce_scatter") if parallelism.is_sequence_parallel else ("all_reduce",)
        found += [("layers", CollectiveCall(kind, "tp", ranks, stream), count) for kind in kinds]
    for layer in layers:
        if (ranks := parallelism.expert) > 1 and layer.copies:
            sent = CollectiveCall("all_to_all", "ep", ranks, stream * layer.copies // parallelism.stream_ranks)
            found.append(("tokens to experts and back", sent, 2 * passes * layer.count))
    for layer in layers:
        if (ranks := parallelism.context) > 1:
            pairs = workload.tokens * 2 * width * itemsize * ranks
            for kind, count in (("all_gather", passes), ("reduce_scatter", 1)):
                found.append(("keys and values", CollectiveCall(kind, "cp", ranks, pairs), count * layer.count))
    if (ranks := parallelism.pipeline) > 1:
        sent = CollectiveCall("send", "pp", ranks, stream // parallelism.stream_ranks)
        found.append(("to the neighbouring stages", sent, (stage.number > 0) + (not stage.has_head)))
    return tuple(ModelTransfer(what, each, workload.num_microbatches * count) for what, each, count in found)


def in_flight(stage: Stage, parallelism: Parallelism, num_microbatches: int) -> int:
    """Return for how many microbatches a stage holds activations at once, if it alternates forward and backward."""
    return min(parallelism.pipeline - stage.number, num_microbatches)


def bubble_share(parallelism: Parallelism, num_microbatches: int) -> float:
    """Return the time that stages wait for each other, relative to their compute (Narayanan et al. 2021, eq. 1)."""
    return (parallelism.pipeline - 1) / num_microbatches
