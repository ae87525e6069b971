"""Check Megatron's configs and flags, and derive the dtypes from them. Imports no Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import not_
from typing import Any

import torch

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.optim.muon.megatron_muon import MUON_NAMES
from megatron_fsdp.policy.precision import MixedPrecisionPolicy

__all__ = [
    "DDP_RULES", "MODEL_RULES", "OPTIMIZER_RULES", "combinations_of", "policy_of", "refusals_of", "refuse_arguments",
    "refuse_configs", "refuse_optimizer", "spell_field", "spell_flag",
]  # fmt: skip

# Field, allowed values, and the reason with the fix.
_Rules = tuple[tuple[str, Callable[[Any], bool], str], ...]
# One row per field; the formatter would split each row over several lines.
# fmt: off
MODEL_RULES: _Rules = (
    *((field, lambda size: size in (None, 1), "weights are sharded over data-parallel ranks in any case. fix: give 1")
      for field in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")),
    ("fp8", not_, "weights are stored in the dtypes of PyTorch. fix: leave it off"),
    ("fp4", not_, "weights are stored in the dtypes of PyTorch. fix: leave it off"),
    ("overlap_moe_expert_parallel_comm", not_, "it calls Megatron's own engine between layers. fix: leave it off"),
    ("cuda_graph_impl", lambda kind: kind == "none", "graphs do not record the gathers. fix: give 'none'"),
    ("enable_cuda_graph", not_, "graphs do not record the gathers. fix: leave it off"),
)
DDP_RULES: _Rules = (
    ("fp8_param_gather", not_, "weights are gathered in the dtype they compute in. fix: leave it off"),
    ("delay_wgrad_compute", not_, "gradients are reduced when backward has them. fix: leave it off"),
    ("check_for_large_grads", not_, "the buffers that Megatron would check do not exist here. fix: leave it off"),
)
OPTIMIZER_RULES: _Rules = (
    ("optimizer", lambda name: name in ("adam", "sgd", *MUON_NAMES), "not supported. fix: 'adam', 'sgd' or 'muon'"),
    ("optimizer_cpu_offload", not_, "Megatron's optimizer for it takes whole parameters. fix: leave it off; optimizer "
     "state is sharded over ranks"),
    ("use_precision_aware_optimizer", not_, "TransformerEngine's optimizer for it needs whole buffers. fix: leave it "
     "off"),
    ("overlap_param_gather_with_optimizer_step", not_, "gathers start when the next forward does. fix: leave it off"),
)
# fmt: on
# Fields of Megatron's configs whose flag has another name.
_FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format"}


def refuse_configs(config: Any, ddp_config: Any) -> None:
    """Check Megatron's configs before the model is sharded.

    Raises:
        ConfigError: settings that this engine does not support, all of them in one message.
    """
    found = [*refusals_of((config, MODEL_RULES), (ddp_config, DDP_RULES)), *combinations_of(config)]
    if config.calculate_per_token_loss and ddp_config.average_in_collective:
        found.append(
            "calculate_per_token_loss=True and average_in_collective=True: gradients are either summed and divided by "
            "tokens, or averaged over ranks. fix: give one of them"
        )
    if found:
        raise ConfigError("; ".join(found))


def refuse_optimizer(config: Any) -> None:
    """Check an ``OptimizerConfig``; raise ConfigError with all unsupported settings."""
    found = refusals_of((config, OPTIMIZER_RULES))
    if found:
        raise ConfigError("; ".join(found))


def refuse_arguments(others: Mapping[str, Any]) -> None:
    """Check the constructor arguments of Megatron's adapter classes that are not known here."""
    found = [f"{name}={value!r}" for name, value in others.items() if value not in (None, False)]
    if found:
        raise ConfigError(f"{', '.join(found)}: this wrapper does not know these arguments. fix: leave them out")


def spell_field(field: str, value: object) -> str:
    """Return how a field of Megatron's configs is written in code: ``fp16=True``."""
    return f"{field}={value!r}"


def spell_flag(field: str, value: object) -> str:
    """Return how a field of Megatron's configs is written on the command line: ``--fp16``."""
    flag = _FLAGS.get(field, f"--{field.replace('_', '-')}")
    return flag if value is True else f"{flag} {value}"


def refusals_of(*asked: tuple[Any, _Rules], spell: Callable[[str, object], str] = spell_field) -> list[str]:
    """Return one line with reason and fix for each unsupported field.

    Args:
        asked: pairs of a Megatron config, or of arguments with the same names, and the rules for it.
        spell: writes a field and its value, as ``spell_field`` or ``spell_flag``.
    """
    return [
        f"{spell(field, getattr(owner, field))}: {reason}"
        for owner, rules in asked
        for field, is_allowed, reason in rules
        if hasattr(owner, field) and not is_allowed(getattr(owner, field))
    ]


def combinations_of(config: Any, spell: Callable[[str, object], str] = spell_field) -> list[str]:
    """Return one line with reason and fix for each unsupported combination of settings or flags."""
    stages, predicted = (getattr(config, name, None) for name in ("pipeline_model_parallel_size", "mtp_num_layers"))
    if (stages or 1) > 1 and predicted:
        return [
            f"{spell('mtp_num_layers', predicted)} and {spell('pipeline_model_parallel_size', stages)}: the engine "
            "does not know which stage has which copy of the embedding. fix: give one stage, or leave out these layers"
        ]
    return []


def policy_of(ddp_config: Any) -> MixedPrecisionPolicy:
    """Return the dtypes of a ``DistributedDataParallelConfig``, from its older and newer fields."""
    preserved = torch.float32 if getattr(ddp_config, "preserve_fp32_weights", True) else None
    whole = torch.float32 if ddp_config.grad_reduce_in_fp32 else None
    main_grads = getattr(ddp_config, "megatron_fsdp_main_grads_dtype", None) or whole
    return MixedPrecisionPolicy(
        reduce_dtype=getattr(ddp_config, "megatron_fsdp_grad_comm_dtype", None) or main_grads,
        main_params_dtype=getattr(ddp_config, "megatron_fsdp_main_params_dtype", preserved),
        main_grads_dtype=main_grads,
        accumulate_dtype=torch.float32 if getattr(ddp_config, "reduce_scatter_with_fp32_accumulation", False) else None,
        # Float16Module casts the model's inputs. The engine must not cast positions and masks.
        cast_forward_inputs=False,
    )
