"""Hugging Face's FSDP settings: ``TrainingArguments.fsdp_config``, and the same section of accelerate's config."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import ConfigError, nearest
from megatron_fsdp.policy.offload import CPUOffloadPolicy

__all__ = ["HfSettings", "read_hf_settings"]

# PyTorch's older sharding strategies: Megatron's equivalent, and whether weights are released after forward.
_MEANINGS: Mapping[str, tuple[str, bool]] = {
    "FULL_SHARD": ("optim_grads_params", True),
    "SHARD_GRAD_OP": ("optim_grads_params", False),
    "NO_SHARD": ("no_shard", False),
    "HYBRID_SHARD": ("optim_grads_params", True),
    "HYBRID_SHARD_ZERO2": ("optim_grads_params", False),
}
_MIXED_PRECISION = {"no": None, "fp32": None, "bf16": "bf16", "fp16": "fp16"}
_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f", "none")
# Keys with an effect; and accelerate's spelling of one.
_ACTING = ("version", "reshard_after_forward", "sharding_strategy", "cpu_offload", "forward_order")
_OTHERS = {"offload_params": "cpu_offload"}
# Keys without an effect, and why.
_CALLED = "units are the modules that fully_shard is called on; inside of accelerate_fsdp2() accelerate follows it"
_WITHOUT_EFFECT = {
    **dict.fromkeys(("auto_wrap_policy", "min_num_params"), _CALLED),
    **dict.fromkeys(("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"), _CALLED),
    "state_dict_type": "the function that is called decides: export_safetensors writes whole weights, save_checkpoint "
    "shards",
    **dict.fromkeys(("backward_prefetch", "backward_prefetch_policy", "forward_prefetch"), "gathers always run ahead"),
    "use_orig_params": "parameters always keep their names and shapes",
    "limit_all_gathers": "gathers of two units at a time are always the limit",
}
# Keys that are refused unless false or empty, and what to do instead.
_LOADING = "read a folder by import_safetensors(model, folder), or prepare inside of accelerate_fsdp2()"
_XLA = "leave it out; it is for PyTorch/XLA, which has a separate sharding engine"
_REFUSED = {
    **dict.fromkeys(("cpu_ram_efficient_loading", "sync_module_states"), _LOADING),
    "activation_checkpointing": "call model.activation_checkpointing_enable(), or prepare inside of accelerate_fsdp2()",
    "activation_checkpointing_offload": "leave it out; inputs of checkpointed layers stay on the device",
    "ignored_modules": "give fully_shard(ignored_params=...), or prepare inside of accelerate_fsdp2()",
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt"), _XLA),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSettings:
    """Settings of an ``fsdp_config`` beyond Megatron's flags; made by ``FsdpConfig.from_hf``.

    Attributes:
        sharding_strategy: one of PyTorch's older names, whichever version the settings are written for.
        reshard_after_forward: whether weights are released between forward and backward.
        forward_order: whether all ranks gather and reduce units in one order, so that a rank may skip units; a key of
            this engine's own. ``FsdpConfig.apply`` sets it.
        mixed_precision: "bf16", "fp16" or None; from the top level of accelerate's config.
        notices: one line, with the reason, for each given key that does nothing here.
    """

    sharding_strategy: str = "FULL_SHARD"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    forward_order: bool = False
    mixed_precision: str | None = None
    notices: tuple[str, ...] = ()

    def flags(self) -> dict[str, Any]:
        """Return the equivalent fields of ``FsdpConfig``."""
        flags: dict[str, Any] = {"data_parallel_sharding_strategy": _MEANINGS[self.sharding_strategy][0]}
        flags |= {"fsdp_forward_order": True} if self.forward_order else {}
        return flags | ({self.mixed_precision: True} if self.mixed_precision else {})

    def fully_shard_kwargs(self, num_axes: int) -> dict[str, Any]:
        """Return the keyword arguments of ``fully_shard`` on a mesh that no Megatron flag sets."""
        if self.sharding_strategy.startswith("HYBRID") and num_axes != 2:
            raise ConfigError(
                f"sharding_strategy {self.sharding_strategy} shards inside each host. fix: make a mesh of two axes "
                f"(hosts, ranks of a host), instead of {num_axes}"
            )
        offload = {"offload_policy": CPUOffloadPolicy()} if self.cpu_offload else {}
        return {"reshard_after_forward": self.reshard_after_forward, **offload}

    def decisions(self) -> list[str]:
        """Return one line per key with an effect."""
        return [f"{name} {getattr(self, name)}" for name in _ACTING[1:]]


def read_hf_settings(source: Mapping[str, Any] | str | Path) -> HfSettings:
    """Read settings from a mapping, a JSON file or accelerate's YAML file.

    Keys may have the prefix ``fsdp_``. In accelerate's config they are in the section ``fsdp_config``; outside of it,
    only ``distributed_type`` and ``mixed_precision`` are read.

    Raises:
        ConfigError: a key is unknown (the error names the nearest valid one), a value is wrong, keys contradict each
            other, or the file cannot be read.
    """
    content = source if isinstance(source, Mapping) else _read_file(Path(source))
    precision = None
    if "fsdp_config" in content:
        precision = _accelerate_precision(content)
        content = content["fsdp_config"] or {}
        if not isinstance(content, Mapping):
            raise ConfigError(f"fsdp_config: found {content!r}. fix: give a mapping of keys")
    values = _named(content)
    resharding = _strategy("reshard_after_forward", values, can_be_true=True)
    found = _strategy("sharding_strategy", values), resharding
    named = next((each for each in found if isinstance(each, str)), None)
    version = values.get("version")
    if str(version) not in ("None", "1", "2"):
        raise ConfigError(f"version: found {version!r}. fix: give 1 or 2")
    if (str(version) == "2" and named) or (str(version) == "1" and isinstance(resharding, bool)):
        what = f"sharding strategy {named}" if named else f"reshard_after_forward {resharding}"
        raise ConfigError(
            f"version {version} contradicts {what}: version 1 names a strategy, 2 says true or false. fix: leave out "
            "one of them"
        )
    if named and resharding is not None and resharding != named:
        raise ConfigError(
            f"sharding_strategy {named} contradicts reshard_after_forward {resharding}. fix: leave out one of them"
        )
    strategy, offload = (
        named if isinstance(named, str) else "FULL_SHARD",
        _boolean("cpu_offload", values.get("cpu_offload")),
    )
    if offload and strategy == "NO_SHARD":
        raise ConfigError(
            "cpu_offload contradicts NO_SHARD, which uses weights where they are stored. fix: leave out one of them"
        )
    return HfSettings(
        sharding_strategy=strategy,
        reshard_after_forward=resharding if isinstance(resharding, bool) else _MEANINGS[strategy][1],
        cpu_offload=offload,
        forward_order=_boolean("forward_order", values.get("forward_order")),
        mixed_precision=precision,
        notices=tuple(f"{key} does nothing here: {why}" for key, why in _WITHOUT_EFFECT.items() if key in values),
    )


# ---------------------------------------------------------------- files


def _read_file(path: Path) -> Mapping[str, Any]:
    parse: Any = json.loads
    failures: tuple[type[Exception], ...] = (OSError, ValueError)
    if path.suffix in (".yaml", ".yml"):
        try:
            yaml = importlib.import_module("yaml")
        except ImportError:
            fix = "fix: pip install pyyaml, or write the section fsdp_config as JSON"
            raise ConfigError(f"reading {path} needs PyYAML. {fix}") from None
        parse, failures = yaml.safe_load, (*failures, yaml.YAMLError)
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except failures as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. fix: give the path of a readable JSON or YAML file"
        ) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds a {type(content).__name__}. fix: write a mapping of keys")
    return content


def _accelerate_precision(content: Mapping[str, Any]) -> str | None:
    """Return the compute dtype in accelerate's config, after checking that the config is for FSDP."""
    kind = content.get("distributed_type", "FSDP")
    if kind != "FSDP":
        raise ConfigError(
            f"distributed_type: found {kind!r}; this file is for another engine. fix: distributed_type: FSDP"
        )
    precision = str(content.get("mixed_precision", "no")).lower()
    # YAML reads an unquoted ``no`` as False.
    precision = "no" if precision in ("false", "none") else precision
    if precision not in _MIXED_PRECISION:
        raise ConfigError(f"mixed_precision: found {precision!r}. fix: give one of {', '.join(_MIXED_PRECISION)}")
    return _MIXED_PRECISION[precision]


# ---------------------------------------------------------------- keys and values


def _named(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keys, without prefix, and their values; null counts as not given."""
    known, values = (*_ACTING, *_OTHERS, *_WITHOUT_EFFECT, *_REFUSED), dict[str, Any]()
    for given, value in content.items():
        prefix = "fsdp_" if str(given).startswith("fsdp_") else ""
        name = str(given).removeprefix(prefix)
        if name not in known:
            meant = prefix + nearest(name, known)
            raise ConfigError(f"unknown key {given!r} in fsdp_config. fix: {meant!r} is the nearest valid one")
        name = _OTHERS.get(name, name)
        if name in values:
            raise ConfigError(
                f"{given!r} is given twice, as {name!r} under another spelling. fix: leave out one of them"
            )
        if name in _REFUSED and value and str(value).lower() not in _FALSE:
            raise ConfigError(f"{given}={value!r} is not supported. fix: {_REFUSED[name]}")
        if value is not None:
            values[name] = value
    return values


def _boolean(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{name}: found {value!r}. fix: give true or false")
    return text in _TRUE


def _strategy(name: str, values: Mapping[str, Any], *, can_be_true: bool = False) -> str | bool | None:
    """Return an older PyTorch strategy from its name or number, or a boolean; None if the key is not given."""
    value, names = values.get(name), list(_MEANINGS)
    text = str(value).upper()
    if value is None or text in names:
        return None if value is None else text
    if can_be_true and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    meant = nearest(text, names)
    raise ConfigError(f"{name}: found {value!r}, wanted one of {', '.join(names)}. fix: {meant} is the nearest")
