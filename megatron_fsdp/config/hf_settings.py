"""Hugging Face's FSDP settings: ``TrainingArguments.fsdp_config``, and the same section of accelerate's file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp.config.hf_keys import KEYS, STRATEGIES, Key, key_of
from megatron_fsdp.errors import ConfigError, nearest
from megatron_fsdp.policy.offload import CPUOffloadPolicy

__all__ = ["HfSettings", "read_hf_settings"]

# Of each of PyTorch's older sharding strategies: Megatron's strategy, and whether weights are released after forward.
_MEANINGS: Mapping[str, tuple[str, bool]] = {
    "FULL_SHARD": ("optim_grads_params", True),
    "SHARD_GRAD_OP": ("optim_grads_params", False),
    "NO_SHARD": ("no_shard", False),
    "HYBRID_SHARD": ("optim_grads_params", True),
    "HYBRID_SHARD_ZERO2": ("optim_grads_params", False),
}
_TRUE, _FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")
_MIXED_PRECISION = {"no": None, "fp32": None, "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSettings:
    """What an ``fsdp_config`` asks for beyond Megatron's flags; made by ``FsdpConfig.from_hf``.

    Attributes:
        sharding_strategy: one of PyTorch's older names, whichever version the settings were written for.
        reshard_after_forward: whether units are released between forward and backward.
        auto_wrap_policy, transformer_layer_cls_to_wrap, min_num_params: which modules the loop is to call
            ``fully_shard`` on.
        mixed_precision: "bf16", "fp16" or None; from the top level of accelerate's file.
        given: the keys that were given, by their names here. older: those that were spelled as in earlier releases.
    """

    version: int = 2
    sharding_strategy: str = "FULL_SHARD"
    reshard_after_forward: bool = True
    auto_wrap_policy: str = "TRANSFORMER_BASED_WRAP"
    transformer_layer_cls_to_wrap: tuple[str, ...] = ()
    min_num_params: int = 0
    cpu_offload: bool = False
    state_dict_type: str = "FULL_STATE_DICT"
    mixed_precision: str | None = None
    given: tuple[str, ...] = ()
    older: tuple[str, ...] = ()

    def flags(self) -> dict[str, Any]:
        """Return the fields of ``FsdpConfig`` that say the same."""
        flags: dict[str, Any] = {"data_parallel_sharding_strategy": _MEANINGS[self.sharding_strategy][0]}
        return flags | ({self.mixed_precision: True} if self.mixed_precision else {})

    def fully_shard_kwargs(self, num_axes: int) -> dict[str, Any]:
        """Return the keyword arguments of ``fully_shard`` on a mesh that Megatron's flags have no say in."""
        if self.sharding_strategy.startswith("HYBRID") and num_axes != 2:
            raise ConfigError(
                f"sharding_strategy {self.sharding_strategy} shards inside of each host: wanted a mesh of two axes "
                f"(hosts, ranks of one), found {num_axes}"
            )
        offload = {"offload_policy": CPUOffloadPolicy()} if self.cpu_offload else {}
        return {"reshard_after_forward": self.reshard_after_forward, **offload}

    def decisions(self) -> Iterator[str]:
        """Yield one line per key that is acted on, with what it does."""
        for key in KEYS:
            if not key.is_silent and hasattr(self, key.name):
                default = "" if key.name in self.given else " (default)"
                yield f"{key.name} {getattr(self, key.name)}{default}: {key.here}"

    def notices(self) -> Iterator[str]:
        """Yield one line, with the reason, for every key that does nothing here or is spelled in an older way."""
        for name in self.older:
            key = _find(name)
            yield f"{name} is an older name, which is deprecated; write {key.name}"
        for key in KEYS:
            if key.is_silent and key.name in self.given:
                yield key.notice(key.name)


def read_hf_settings(source: Mapping[str, Any] | str | Path) -> HfSettings:
    """Read settings from a mapping, a JSON file or accelerate's YAML file.

    Keys may have the prefix ``fsdp_``. A file or mapping of accelerate has them in its section ``fsdp_config``; of the
    rest of it ``distributed_type`` and ``mixed_precision`` count.

    Raises:
        ConfigError: an unknown key (the nearest valid one is named), a wrong value, keys that contradict each other,
            or a file that cannot be read.
    """
    content = source if isinstance(source, Mapping) else _read_file(Path(source))
    precision = None
    if "fsdp_config" in content:
        precision = _accelerate_precision(content)
        content = content["fsdp_config"] or {}
        if not isinstance(content, Mapping):
            raise ConfigError(f"fsdp_config: found {content!r}, wanted a mapping of keys")
    values = {key.name: _checked(key, value) for key, value in _named(content)}
    older = tuple(str(name) for name in content if str(name).removeprefix("fsdp_") in _find(str(name)).older)
    _refuse_contradictions(values)
    resharding = values.get("reshard_after_forward")
    named = values.get("sharding_strategy", resharding if isinstance(resharding, str) else None)
    strategy = named or "FULL_SHARD"
    derived = {
        "version": values.get("version", 2 if named is None else 1),
        "sharding_strategy": strategy,
        "reshard_after_forward": resharding if isinstance(resharding, bool) else _MEANINGS[strategy][1],
    }
    fields = HfSettings.__dataclass_fields__
    kept = {name: value for name, value in values.items() if name in fields}
    return HfSettings(**{**kept, **derived, "mixed_precision": precision, "given": tuple(values), "older": older})


# ---------------------------------------------------------------- files


def _read_file(path: Path) -> Mapping[str, Any]:
    parse: Any = json.loads
    failures: tuple[type[Exception], ...] = (OSError, ValueError)
    if path.suffix in (".yaml", ".yml"):
        try:
            yaml = importlib.import_module("yaml")
        except ImportError:
            cure = "pip install pyyaml, or write the section fsdp_config as JSON"
            raise ConfigError(f"reading {path} needs PyYAML: {cure}") from None
        parse, failures = yaml.safe_load, (*failures, yaml.YAMLError)
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except failures as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds a {type(content).__name__}; wanted a mapping of keys")
    return content


def _accelerate_precision(content: Mapping[str, Any]) -> str | None:
    """Return the compute dtype of accelerate's file, after a look at what it is for."""
    kind = content.get("distributed_type", "FSDP")
    if kind != "FSDP":
        raise ConfigError(f"distributed_type: found {kind!r}, wanted 'FSDP'; this file is for another engine")
    precision = str(content.get("mixed_precision", "no")).lower()
    # YAML reads an unquoted no as False.
    precision = "no" if precision in ("false", "none") else precision
    if precision not in _MIXED_PRECISION:
        raise ConfigError(f"mixed_precision: found {precision!r}, wanted one of {', '.join(_MIXED_PRECISION)}")
    return _MIXED_PRECISION[precision]


# ---------------------------------------------------------------- keys and values


def _named(content: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Yield the keys that were given with their values; null counts as not given."""
    spelled: dict[str, str] = {}
    for name, value in content.items():
        key = _find(str(name))
        if key.name in spelled:
            raise ConfigError(f"{spelled[key.name]!r} and {name!r} are the same key; give one of them")
        spelled[key.name] = str(name)
        if value is not None:
            yield key, value


def _find(name: str) -> Key:
    found = key_of(name)
    if found is None:
        names = [spelling for key in KEYS for spelling in (key.name, *key.others)]
        prefix = "fsdp_" if name.startswith("fsdp_") else ""
        meant = prefix + nearest(name.removeprefix("fsdp_"), names)
        raise ConfigError(f"unknown key {name!r} in fsdp_config, the nearest valid one is {meant!r}")
    return found


def _checked(key: Key, value: Any) -> Any:
    """Return a value in the form that settings have it, or raise."""
    text = str(value)
    if key.name == "reshard_after_forward" and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if key.name == "sharding_strategy" and text.isdigit() and 1 <= int(text) <= len(STRATEGIES):
        return STRATEGIES[int(text) - 1]
    if key.kind is bool:
        value = _boolean(key, value)
    elif key.kind is int:
        value = _integer(key, value)
    elif key.kind is tuple:
        value = tuple(str(name).strip() for name in (value.split(",") if isinstance(value, str) else value))
    elif key.kind is str:
        value = _choice(key, value)
    if key.refusal and value:
        raise ConfigError(f"{key.name}={value!r}: {key.refusal}")
    return value


def _boolean(key: Key, value: Any) -> bool:
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{key.name}: found {value!r}, wanted true or false")
    return text in _TRUE


def _integer(key: Key, value: Any) -> int:
    if isinstance(value, bool) or not str(value).isdigit():
        raise ConfigError(f"{key.name}: found {value!r}, wanted a whole number >= 0")
    if key.choices and int(value) not in key.choices:
        raise ConfigError(f"{key.name}: found {value}, wanted one of {', '.join(map(str, key.choices))}")
    return int(value)


def _choice(key: Key, value: Any) -> str:
    text, choices = str(value).upper(), [str(choice) for choice in key.choices]
    if text not in choices:
        meant = nearest(text, choices)
        raise ConfigError(f"{key.name}: found {value!r}, wanted one of {', '.join(choices)}; the nearest is {meant}")
    if text in key.refused_choices:
        raise ConfigError(f"{key.name}={text}: {key.refused_choices[text]}")
    return text


# ---------------------------------------------------------------- what keys mean together


def _refuse_contradictions(values: Mapping[str, Any]) -> None:
    names = ("version", "reshard_after_forward", "sharding_strategy", "transformer_layer_cls_to_wrap", "min_num_params")
    version, resharding, strategy, classes, minimum = map(values.get, names)
    policy = values.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    is_named, is_said = isinstance(resharding, str), isinstance(resharding, bool)
    found = {
        f"version 2 contradicts reshard_after_forward {resharding}: give true or false, or version 1": (
            version == 2 and is_named
        ),
        f"version 1 contradicts reshard_after_forward {resharding}: name a strategy ({', '.join(STRATEGIES)}), or give "
        "version 2": version == 1 and is_said,
        f"version 2 contradicts sharding_strategy {strategy}: give reshard_after_forward instead": (
            version == 2 and strategy is not None
        ),
        f"sharding_strategy {strategy} contradicts reshard_after_forward {resharding}: give one": (
            None not in (strategy, resharding) and resharding != strategy
        ),
        f"transformer_layer_cls_to_wrap contradicts auto_wrap_policy {policy}": (
            classes and policy != "TRANSFORMER_BASED_WRAP"
        ),
        f"min_num_params {minimum} contradicts auto_wrap_policy {policy}: it is for SIZE_BASED_WRAP": (
            minimum and policy != "SIZE_BASED_WRAP"
        ),
        "auto_wrap_policy SIZE_BASED_WRAP needs min_num_params > 0 (found 0): every module would be a unit": (
            policy == "SIZE_BASED_WRAP" and not minimum
        ),
        "cpu_offload contradicts NO_SHARD: what rests whole is used where it rests": (
            values.get("cpu_offload") and "NO_SHARD" in (strategy, resharding)
        ),
    }
    for message, is_broken in found.items():
        if is_broken:
            raise ConfigError(message)
