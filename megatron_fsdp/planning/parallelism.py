"""Parallelism inside a model: what one rank of a tensor, expert, context and pipeline parallel job holds and sends.

Layers are divided as Megatron-LM divides them: attention heads, the first layers of MLPs and the vocabulary by outputs,
what follows them by inputs; norms, routers and the narrow projections of latent attention are whole on every
tensor-parallel rank. Experts are whole experts of some ranks, and each of these may be cut like an MLP. Sequences are
cut over context-parallel ranks, which have the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.catalog import Architecture, UnitShapes
from megatron_fsdp.planning.catalog.architecture import Parameters
from megatron_fsdp.planning.model_spec import Transfer
from megatron_fsdp.planning.transformer import LayerShape, Recompute, Workload

__all__ = ["ModelTransfer", "Parallelism", "Stage", "bubble_share", "in_flight", "model_transfers", "stages_of"]

_OUTPUTS = frozenset("q_proj k_proj v_proj q_b_proj kv_b_proj gate_proj up_proj lm_head embed_tokens wte sinks".split())
_INPUTS = frozenset(("o_proj", "down_proj"))
_WHOLE = frozenset("q_a_proj kv_a_proj_with_mqa gate router wpe".split())
# GPT-2 stores (inputs, outputs).
_OUTPUTS_LAST, _INPUTS_FIRST = frozenset(("c_attn", "c_fc")), frozenset(("c_proj",))
_TABLES = ("embed_tokens", "wte", "lm_head")


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Over how many ranks a model is divided, besides the data-parallel ones.

    Attributes:
        tensor: ranks that share each layer. expert: ranks that share the experts of a layer.
        pipeline: stages. context: ranks that share each sequence; for weights they are data-parallel ranks.
        expert_tensor: ranks that share each expert; 0: as many as ``tensor``.
        is_sequence_parallel: what lies between the tensor-parallel parts of layers is divided too, by tokens.
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
        """Whether anything is divided."""
        return max(self.tensor, self.expert, self.pipeline, self.context, self.ranks_of_expert) > 1

    @property
    def stream_ranks(self) -> int:
        """Ranks that share the residual stream of a sequence's part."""
        return self.tensor if self.is_sequence_parallel else 1

    def data_ranks(self, world: int) -> int:
        """Return over how many ranks dense weights are sharded: data times context parallel.

        Raises:
            ConfigError: the sizes do not divide the ranks.
        """
        for flags, size in (
            ("--tp x --pp x --cp", self.tensor * self.pipeline * self.context),
            ("--etp x --ep x --pp", self.ranks_of_expert * self.expert * self.pipeline),
        ):
            if world % size:
                raise ConfigError(f"{flags} is {size}, which does not divide --world {world}")
        return world // (self.tensor * self.pipeline)

    def expert_data_ranks(self, data_ranks: int) -> int:
        """Return over how many of as many dense ranks the weights of one expert are sharded.

        That is world / (etp x ep x pp), as Megatron-LM's ``parallel_state`` has it.

        Raises:
            ConfigError: it is no whole number.
        """
        across, within = data_ranks * self.tensor, self.ranks_of_expert * self.expert
        if across % within:
            raise ConfigError(f"--etp x --ep is {within}, which does not divide the {across} ranks of one stage's axis")
        return across // within


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank of a pipeline stage has.

    Attributes:
        number: from 0. layers: the first of its layers in the model, and how many.
        architecture: the stage's units, with the shapes of one rank.
        has_head: whether the loss is computed here.
    """

    number: int
    layers: tuple[int, int]
    architecture: Architecture
    has_head: bool


def stages_of(architecture: Architecture, parallelism: Parallelism) -> tuple[Stage, ...]:
    """Return what a rank of each stage has.

    Layers are shared out in runs of equal length; where stages do not divide them, the stages after the first have one
    more each, as far as they go: the first has the embedding. A tied output matrix is there twice, on the first and the
    last stage.

    Raises:
        ConfigError: fewer layers than stages, or shapes that the sizes do not divide.
    """
    _check(architecture, parallelism)
    sliced = [_sliced(unit, architecture, parallelism) for unit in architecture.units]
    layers = [unit for unit in sliced for _ in range(unit.count) if unit.name not in ("embedding", "head", "experts")]
    experts = _experts_after(sliced)
    first, last = _ends(sliced, architecture, parallelism)
    number, extra = divmod(len(layers), parallelism.pipeline)
    if not number:
        raise ConfigError(f"--pp {parallelism.pipeline} is more than the model's {len(layers)} layers")
    stages = []
    start = 0
    for position in range(parallelism.pipeline):
        count = number + (1 <= position <= extra)
        has_head = position == parallelism.pipeline - 1
        units = [first] if position == 0 and first is not None else []
        for kind in dict.fromkeys(unit.name for unit in layers[start : start + count]):
            alike = [unit for unit in layers[start : start + count] if unit.name == kind]
            units.append(replace(alike[0], count=len(alike)))
            if kind in experts:
                units.append(replace(experts[kind], count=len(alike)))
        units += [last] if has_head and last is not None else []
        divided = _architecture(architecture, tuple(units), count, parallelism)
        stages.append(Stage(position, (start, count), divided, has_head))
        start += count
    return tuple(stages)


def _check(architecture: Architecture, parallelism: Parallelism) -> None:
    has_experts = any(unit.name == "experts" for unit in architecture.units)
    if parallelism.expert > 1 and not has_experts:
        raise ConfigError(f"--ep {parallelism.expert}: {architecture.model_type} has no routed experts")
    if parallelism.tensor * parallelism.pipeline * parallelism.context > 1 and not architecture.vocab_size:
        raise ConfigError(f"--tp, --pp and --cp divide language models; {architecture.model_type} is none")
    heads, groups = architecture.num_attention_heads, architecture.num_key_value_heads
    if heads % parallelism.tensor or (groups % parallelism.tensor and parallelism.tensor % groups):
        raise ConfigError(
            f"--tp {parallelism.tensor} does not divide {heads} attention heads with {groups} of keys and values"
        )


def _experts_after(units: list[UnitShapes]) -> dict[str, UnitShapes]:
    return {unit.name: after for unit, after in pairwise(units) if after.name == "experts"}


def _ends(
    units: list[UnitShapes], architecture: Architecture, parallelism: Parallelism
) -> tuple[UnitShapes | None, UnitShapes | None]:
    """Return what the first stage has before its layers and the last one behind them."""
    first = next((unit for unit in units if unit.name == "embedding"), None)
    if not architecture.tied or parallelism.pipeline == 1 or first is None:
        return first, next((unit for unit in units if unit.name == "head"), None)
    norms = tuple(each for each in first.parameters if "norm" in each[0] or each[0].startswith("ln_"))
    tables = tuple(each for each in first.parameters if each[0].split(".")[0] in _TABLES)
    before = tuple(each for each in first.parameters if each not in norms)
    return replace(first, parameters=before), UnitShapes("head", 1, (*norms, *tables))


def _architecture(
    whole: Architecture, units: tuple[UnitShapes, ...], num_layers: int, parallelism: Parallelism
) -> Architecture:
    total = sum(unit.count * unit.num_parameters for unit in units)
    routed = sum(unit.count * unit.num_parameters for unit in units if unit.name == "experts")
    all_routed = sum(unit.count * unit.num_parameters for unit in whole.units if unit.name == "experts")
    share = 1 - (whole.num_parameters - whole.num_active_parameters) / all_routed if all_routed else 0.0
    # Experts compute the tokens of all ranks that share them, each rank's as often as it would with all experts.
    active = total - routed + round(routed * share * parallelism.expert)
    return replace(
        whole,
        units=units,
        tied=whole.tied and parallelism.pipeline == 1,
        num_layers=num_layers,
        num_attention_heads=whole.num_attention_heads // parallelism.tensor,
        num_key_value_heads=max(whole.num_key_value_heads // parallelism.tensor, 1),
        vocab_size=-(-whole.vocab_size // parallelism.tensor),
        num_active_parameters=active,
        num_parameters=total,
    )


def _sliced(unit: UnitShapes, architecture: Architecture, parallelism: Parallelism) -> UnitShapes:
    if unit.name == "experts":
        return replace(unit, parameters=_sliced_experts(unit, architecture, parallelism))
    parameters: Parameters = tuple(
        (name, _sliced_shape(unit, name, shape, architecture, parallelism.tensor)) for name, shape in unit.parameters
    )
    return replace(unit, parameters=parameters)


def _sliced_experts(unit: UnitShapes, architecture: Architecture, parallelism: Parallelism) -> Parameters:
    # (experts, outputs, inputs), but for gpt_oss, which multiplies from the other side.
    outputs, inputs = (2, 1) if architecture.model_type == "gpt_oss" else (1, 2)
    dims = {"gate_up_proj": outputs, "down_proj": inputs, "gate_up_proj_bias": 1}
    sliced = []
    for name, shape in unit.parameters:
        shape = _divided(f"{unit.name}: {name}", shape, 0, parallelism.expert, "--ep")
        if name in dims:
            shape = _divided(f"{unit.name}: {name}", shape, dims[name], parallelism.ranks_of_expert, "--etp")
        sliced.append((name, shape))
    return tuple(sliced)


def _sliced_shape(
    unit: UnitShapes, name: str, shape: tuple[int, ...], architecture: Architecture, tensor: int
) -> tuple[int, ...]:
    if tensor == 1:
        return shape
    words = name.split(".")
    module, is_bias = (words[-2] if len(words) > 1 else words[-1]), words[-1] == "bias"
    if unit.name == "embedding" and len(words) == 1:
        module = "embed_tokens"
    where = f"unit {unit.name!r}, parameter {name!r}"
    if module in _TABLES:
        # Megatron pads the vocabulary so that it divides.
        return (-(-shape[0] // tensor), *shape[1:])
    if module in ("k_proj", "v_proj") and architecture.num_key_value_heads < tensor:
        # Fewer heads of keys and values than ranks: several ranks have the same.
        return _divided(where, shape, 0, architecture.num_key_value_heads, "--tp")
    if module in _OUTPUTS:
        return _divided(where, shape, 0, tensor, "--tp")
    if module in _OUTPUTS_LAST:
        return _divided(where, shape, len(shape) - 1, tensor, "--tp")
    if module in _INPUTS or module in _INPUTS_FIRST:
        return shape if is_bias else _divided(where, shape, 1 if module in _INPUTS else 0, tensor, "--tp")
    if len(shape) == 1 or module in _WHOLE:
        return shape
    raise ConfigError(f"--tp {tensor}: nothing is known of how {where} of shape {shape} is divided")


def _divided(where: str, shape: tuple[int, ...], dim: int, size: int, flag: str) -> tuple[int, ...]:
    if shape[dim] % size:
        raise ConfigError(f"{flag} {size} does not divide dimension {dim} of {where}, {shape}")
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


# ---------------------------------------------------------------------- what is sent


@dataclass(frozen=True, slots=True)
class ModelTransfer:
    """One kind of collective inside the model, over an axis that is not data-parallel, of one optimizer step."""

    what: str
    transfer: Transfer
    count: int


def model_transfers(
    stage: Stage, parallelism: Parallelism, workload: Workload, layers: tuple[LayerShape, ...], itemsize: int
) -> Iterator[ModelTransfer]:
    """Yield what a rank of a stage sends in a step besides weights and gradients of the sharding engine.

    Tensor parallelism: two all-reduces of the residual stream per layer and pass (Shoeybi et al. 2019, section 3), or
    with sequence parallelism an all-gather and a reduce-scatter in place of each (Korthikanti et al. 2022, section
    4.2). Experts: two all-to-alls of the tokens' copies per layer and pass. Context: keys and values of all ranks,
    gathered in forward and in backward, where their gradients are scattered. Pipeline: the stream to the next stage,
    its gradient back. With full recomputation the layers' share of forward is sent twice.
    """
    passes = 2 + (workload.recompute is Recompute.FULL)
    stream = workload.tokens * stage.architecture.hidden_size * itemsize
    num_layers = sum(layer.count for layer in layers)
    steps = workload.num_microbatches
    if parallelism.tensor > 1:
        kinds = ("all_gather", "reduce_scatter") if parallelism.is_sequence_parallel else ("all_reduce",)
        # The look-up of a divided table is summed in forward, the gradient of the output matrix's input in backward.
        ends = (stage.number == 0) + stage.has_head
        for kind in kinds:
            transfer = Transfer(kind, "tp", parallelism.tensor, stream)
            yield ModelTransfer("layers", transfer, steps * (2 * passes * num_layers + ends))
    if parallelism.expert > 1:
        for layer in layers:
            if layer.copies:
                sent = stream * layer.copies // parallelism.stream_ranks
                transfer = Transfer("all_to_all", "ep", parallelism.expert, sent)
                yield ModelTransfer("tokens to experts and back", transfer, steps * 2 * passes * layer.count)
    if parallelism.context > 1:
        for layer in layers:
            pairs = workload.tokens * 2 * layer.key_value_width * itemsize * parallelism.context
            for kind, count in (("all_gather", passes), ("reduce_scatter", 1)):
                transfer = Transfer(kind, "cp", parallelism.context, pairs)
                yield ModelTransfer("keys and values", transfer, steps * count * layer.count)
    if parallelism.pipeline > 1:
        ways = (stage.number > 0) + (not stage.has_head)
        transfer = Transfer("send", "pp", parallelism.pipeline, stream // parallelism.stream_ranks)
        yield ModelTransfer("to the neighbouring stages", transfer, steps * ways)


def in_flight(stage: Stage, parallelism: Parallelism, num_microbatches: int) -> int:
    """Return of how many microbatches a stage holds activations at once, in the order one forward, one backward."""
    return min(parallelism.pipeline - stage.number, num_microbatches)


def bubble_share(parallelism: Parallelism, num_microbatches: int) -> float:
    """Return how long stages wait for each other, as a share of what they compute (Narayanan et al. 2021, eq. 1)."""
    return (parallelism.pipeline - 1) / num_microbatches
