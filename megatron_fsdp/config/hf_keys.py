"""The keys of Hugging Face's FSDP settings, as one table: reading, notices and the documentation are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_fsdp.config.flags import Effect, Setting

__all__ = ["KEYS", "STRATEGIES", "Key", "key_of"]

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


@dataclass(frozen=True, slots=True)
class Key(Setting):
    """One key; its name is without the prefix ``fsdp_``, which may stand before each spelling.

    Attributes:
        others: other spellings. older: those of earlier releases, which are noticed.
        refusal: why a value that is neither false nor empty is refused; empty: it is not.
        refused_choices: those of the choices that are refused, and why.
    """

    others: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    refusal: str = ""
    refused_choices: Mapping[str, str] = field(default_factory=dict)


_ACTS, _ALWAYS = Effect.ACTS, Effect.ALWAYS
_CALLED = "units are the modules that fully_shard is called on; inside of accelerate_fsdp2() accelerate follows it"
_REFUSED = "refused if true"
_LOADED = (
    "each rank's shard is its own weights': read a folder by import_safetensors(model, folder), or prepare inside of "
    "accelerate_fsdp2()"
)
_XLA = "it is for PyTorch/XLA, which has a sharding engine of its own; leave it out"

# Rows stay rows: the formatter would give every field a line of its own.
# fmt: off
KEYS: tuple[Key, ...] = (
    Key("version", None, _ACTS, "1: PyTorch's older engine, 2: FSDP2",
        "this engine serves both; it decides how reshard_after_forward is read. Not given: 1 if a strategy is named",
        choices=(1, 2), kind=int),
    Key("reshard_after_forward", True, _ACTS, "release weights between forward and backward; version 1: a strategy",
        "of each unit but the root",
        choices=STRATEGIES, kind=str),
    Key("sharding_strategy", None, _ACTS, "version 1: what is sharded, by name or number",
        "SHARD_GRAD_OP keeps weights until backward, NO_SHARD shards nothing, HYBRID shards inside each host",
        choices=STRATEGIES, kind=str),
    Key("auto_wrap_policy", "TRANSFORMER_BASED_WRAP", Effect.NOTHING, "which modules become units", _CALLED,
        choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), kind=str),
    Key("transformer_layer_cls_to_wrap", None, Effect.NOTHING,
        "classes of layers, by name; a list, or commas between them", _CALLED, kind=tuple,
        others=("transformer_cls_names_to_wrap",)),
    Key("min_num_params", 0, Effect.NOTHING, "SIZE_BASED_WRAP: smallest number of parameters of a unit", _CALLED,
        kind=int),
    Key("cpu_offload", False, _ACTS, "weights, gradients and the optimizer step live in CPU memory", "the same",
        others=("offload_params",)),
    Key("state_dict_type", "FULL_STATE_DICT", Effect.NOTHING, "how checkpoints are written",
        "the function that is called decides: save_pretrained and export_safetensors write whole weights, "
        "save_checkpoint shards",
        choices=("FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"), kind=str,
        refused_choices={"LOCAL_STATE_DICT": "flat buffers are no format; give SHARDED_STATE_DICT"}),
    Key("cpu_ram_efficient_loading", False, Effect.LATER, "only the first rank reads the weights", _REFUSED,
        refusal=_LOADED),
    Key("sync_module_states", False, Effect.LATER, "version 1: every rank gets the first rank's weights", _REFUSED,
        refusal=_LOADED),
    Key("activation_checkpointing", False, Effect.LATER, "compute the activations of layers again in backward",
        _REFUSED, refusal="call model.activation_checkpointing_enable(), or prepare inside of accelerate_fsdp2()"),
    Key("activation_checkpointing_offload", False, Effect.LATER, "keep the inputs of such layers in CPU memory",
        _REFUSED,
        refusal="inputs of checkpointed layers stay on the device; leave it out"),
    Key("ignored_modules", None, Effect.LATER, "modules that are not sharded", "refused unless empty", kind=dict,
        refusal="give their parameters as fully_shard(ignored_params=...), or prepare inside of accelerate_fsdp2()"),
    Key("forward_prefetch", False, _ALWAYS, "start the next unit's gather while one computes",
        "gathers run ahead in the order of the last step"),
    Key("backward_prefetch", "NO_PREFETCH", _ALWAYS, "version 1: when backward gathers the next unit",
        "as BACKWARD_PRE",
        choices=("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), kind=str, older=("backward_prefetch_policy",)),
    Key("use_orig_params", True, _ALWAYS, "version 1: the optimizer sees the model's own parameters",
        "parameters keep their names and shapes"),
    Key("limit_all_gathers", True, _ALWAYS, "version 1: bound the gathers in flight", "two units at a time"),
    Key("xla", False, Effect.HARDWARE, "PyTorch/XLA's engine", _REFUSED, refusal=_XLA),
    Key("xla_fsdp_v2", False, Effect.HARDWARE, "PyTorch/XLA's second engine", _REFUSED, refusal=_XLA),
    Key("xla_fsdp_settings", None, Effect.HARDWARE, "settings of PyTorch/XLA's engine", "refused unless empty",
        kind=dict, refusal=_XLA),
    Key("xla_fsdp_grad_ckpt", False, Effect.HARDWARE, "checkpointing of PyTorch/XLA's engine", _REFUSED,
        refusal=_XLA),
)
# fmt: on

_BY_SPELLING = {spelling: key for key in KEYS for spelling in (key.name, *key.others, *key.older)}


def key_of(name: str) -> Key | None:
    """Return the key of a spelling, with or without the prefix, or None."""
    return _BY_SPELLING.get(name.removeprefix("fsdp_"))
