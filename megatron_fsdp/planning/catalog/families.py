"""Families: from a Hugging Face config to the shapes of its parameters.

``families.json`` describes what models of one ``model_type`` are made of. The names and shapes are those of the
modeling files of transformers 5, where routed experts are stored fused: one (experts, outputs, inputs) tensor for a
projection of all experts of a layer. Each line there is a parameter with its dims, or a module: ``linear`` with outputs
and inputs, or ``norm`` with its width, and then a flag with which it has a bias. A dim is a product of numbers and
fields of the config, ``if`` begins a condition, and ``@`` names lines that families share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning.catalog.architecture import Architecture, Parameters, UnitShapes

__all__ = ["SUPPORTED", "architecture"]

# The part of a multimodal config that holds the model in question, and its family.
_PARTS = {"gemma3": ("text_config", "gemma3_text"), "siglip": ("vision_config", "siglip_vision_model")}


@dataclass(frozen=True, slots=True)
class _Family:
    """What models of one family are made of.

    Attributes:
        layer: a dense one. moe_layer, experts: of layers with routed experts, where there are any.
        embedding, last, head: before and behind the layers; a tied output matrix is the embedding, whose unit has
            what comes last too, and is gathered at both ends.
        names: of fields whose own name differs from that in descriptions. defaults: of fields that a config may leave
            out. fixed: what configs cannot say.
    """

    layer: Sequence[str] = ()
    moe_layer: Sequence[str] = ()
    experts: Sequence[str] = ()
    embedding: Sequence[str] = ("embed_tokens.weight vocab_size hidden_size",)
    last: Sequence[str] = ("norm norm hidden_size",)
    head: Sequence[str] = ("linear lm_head vocab_size hidden_size",)
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


_DESCRIBED = json.loads(files(__package__).joinpath("families.json").read_text(encoding="utf-8"))
_FAMILIES = {name: _Family(**described) for name, described in _DESCRIBED["families"].items()}
SUPPORTED = tuple(sorted({*_FAMILIES, *_PARTS}))


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the units and sizes of a model from its Hugging Face config.

    Args:
        config: the content of a config.json. Of a gemma3 config the text model is taken, of a siglip config the vision
            model. DeepSeek's extra layer that predicts one token more (MTP) is left out, as transformers does.
    Raises:
        ConfigError: a family that is not known here, or a config that lacks a field.
    """
    model_type = config.get("model_type")
    if model_type in _PARTS and _PARTS[model_type][0] in config:
        part, inner_type = _PARTS[model_type]
        return architecture({"model_type": inner_type, **config[part]})
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not in the catalog, which knows {', '.join(SUPPORTED)}; for another model "
            "pass a function that builds it (--factory package.module:function)"
        )
    family = _FAMILIES[model_type]
    fields = _Fields(config, model_type, family)
    units = tuple(unit for unit in _units(fields, family) if unit.count)
    made = Architecture(
        model_type=model_type,
        units=units,
        tied=fields.flag("tie_word_embeddings"),
        hidden_size=fields["hidden_size"],
        num_layers=fields["num_hidden_layers"],
        num_attention_heads=fields["num_attention_heads"],
        num_key_value_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        intermediate_size=fields["intermediate_size"],
        vocab_size=fields["vocab_size"],
        num_active_parameters=0,
    )
    experts = made.num_routed_parameters
    used = experts * fields["num_experts_per_tok"] // fields["num_experts"] if experts else 0
    return replace(made, num_active_parameters=made.num_parameters - experts + used)


class _Fields:
    """A config with the names and defaults of its family settled."""

    def __init__(self, config: Mapping[str, Any], model_type: str, family: _Family) -> None:
        self.model_type = model_type
        self._names = family.names
        self._values = {**family.defaults, **{name: value for name, value in config.items() if value is not None}}
        self._values |= family.fixed

    def flag(self, name: str) -> bool:
        """Return a field that is true or false."""
        if name == "qkv_bias" and name not in self._values:
            name = "attention_bias"
        return name == "always" or bool(self._values.get(name))

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a field that is a list of numbers, empty when it is absent."""
        return tuple(self._values.get(name, ()))

    def __getitem__(self, name: str) -> int:
        known = self._names.get(name, name)
        value = self._values.get(known)
        if value is None and name in _DERIVED:
            return _DERIVED[name](self)
        if type(value) is not int or value < (name not in _MAY_BE_NONE):
            wanted = f"wanted an integer >= {int(name not in _MAY_BE_NONE)}"
            raise ConfigError(f"config of a {self.model_type} model: {known} is {value!r}, {wanted}")
        return value


_MAY_BE_NONE = ("q_lora_rank", "first_k_dense_replace", "vocab_size")
# Fields that a config leaves out, or has in parts.
_DERIVED: dict[str, Callable[[_Fields], int]] = {
    "num_key_value_heads": lambda fields: fields["num_attention_heads"],
    "head_dim": lambda fields: (
        fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        if fields.model_type == "deepseek_v3"
        else fields["hidden_size"] // fields["num_attention_heads"]
    ),
    "kv_width": lambda fields: fields["kv_lora_rank"] + fields["qk_rope_head_dim"],
    "key_value_width": lambda fields: fields["qk_nope_head_dim"] + fields["v_head_dim"],
    "num_patches": lambda fields: (fields["image_size"] // fields["patch_size"]) ** 2,
    "intermediate_size": lambda fields: 4 * fields["hidden_size"],
    "first_k_dense_replace": lambda fields: 0,
    "decoder_sparse_step": lambda fields: 1,
}


def _units(fields: _Fields, family: _Family) -> Iterator[UnitShapes]:
    embedding, last = _parameters(family.embedding, fields), _parameters(family.last, fields)
    tied = fields.flag("tie_word_embeddings")
    if tied:
        embedding += last
    elif len(embedding) == 1:
        # The unit is the module itself.
        embedding = (("weight", embedding[0][1]),)
    yield UnitShapes("embedding", 1, embedding)
    num_layers, first, step = (
        fields[name] for name in ("num_hidden_layers", "first_k_dense_replace", "decoder_sparse_step")
    )
    layers = range(first, num_layers) if family.experts else ()
    sparse = sum(layer not in fields.numbers("mlp_only_layers") and (layer + 1) % step == 0 for layer in layers)
    if num_layers > sparse:
        name = "dense_layer" if family.experts else "layer"
        yield UnitShapes(name, num_layers - sparse, _parameters(family.layer, fields))
    if sparse:
        yield UnitShapes("moe_layer", sparse, _parameters(family.moe_layer, fields))
        yield UnitShapes("experts", sparse, _parameters(family.experts, fields))
    if not tied:
        yield UnitShapes("head", 1, (*last, *_parameters(family.head, fields)))


def _parameters(description: Sequence[str], fields: _Fields) -> Parameters:
    found: list[tuple[str, tuple[int, ...]]] = []
    for line in description:
        found += _parameters(_DESCRIBED["parts"][line[1:]], fields) if line[0] == "@" else _of_line(line, fields)
    return tuple(found)


def _of_line(line: str, fields: _Fields) -> Iterator[tuple[str, tuple[int, ...]]]:
    words, _, condition = line.partition(" if ")
    *negation, flag = condition.split() or ["always"]
    if fields.flag(flag) is bool(negation):
        return
    kind, *rest = words.split()
    num_dims = {"linear": 2, "norm": 1}.get(kind)
    if num_dims is None:
        yield kind, tuple(_size(word, fields) for word in rest)
        return
    name, dims, flags = rest[0], [_size(word, fields) for word in rest[1 : num_dims + 1]], rest[num_dims + 1 :]
    yield f"{name}.weight", tuple(dims)
    if any(map(fields.flag, flags)):
        yield f"{name}.bias", (dims[0],)


def _size(word: str, fields: _Fields) -> int:
    return math.prod(int(factor) if factor.isdigit() else fields[factor] for factor in word.split("*"))
