"""Catalog: shapes of published models, and of any model whose Hugging Face config belongs to a known family.

``architecture(load("llama3-8b"))`` returns a model's FSDP units; it downloads nothing and builds no model. A model's
file has those fields of its published config.json that determine shapes, and the place of publication as "source".

``families.json`` describes the models of each ``model_type``. ``layer``, or ``moe_layer`` and ``experts``, are the
layers; ``embedding`` comes before them, ``last`` and ``head`` after them. Names and shapes are those of transformers 5,
which stores routed experts fused: one (experts, outputs, inputs) tensor per projection for all experts of a layer. Each
line is a parameter with its dims, or a module: ``linear`` with outputs and inputs, or ``norm`` with its width,
optionally followed by the flag that gives it a bias. A dim is an expression of numbers and config fields, ``if`` starts
a condition, and ``@`` names lines that families share. ``defaults`` are expressions for fields that a config may omit
or name differently. ``fixed`` are values that configs do not contain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from megatron_fsdp.errors import ConfigError, nearest

__all__ = ["SUPPORTED", "Architecture", "Parameters", "UnitShapes", "architecture", "is_norm", "load", "names"]

Parameters = tuple[tuple[str, tuple[int, ...]], ...]

_DATA = json.loads(files(__name__).joinpath("families.json").read_text(encoding="utf-8"))
SUPPORTED = tuple(sorted({*_DATA["families"], *_DATA["inside"]}))
_MAY_BE_ZERO = ("q_lora_rank", "first_k_dense_replace", "vocab_size")


@dataclass(frozen=True, slots=True)
class UnitShapes:
    """One FSDP unit: a kind of layer, its routed experts, the embedding, or the last norm with the output matrix.

    Attributes:
        name: ``layer``, ``dense_layer``, ``moe_layer``, ``experts``, ``embedding``, ``head``.
        count: how many such units the model has.
        parameters: name and shape of each, in order of registration. The names are those of Hugging Face transformers
            within the unit's module; in a unit of several modules (``head``) each name starts with its module.
    """

    name: str
    count: int
    parameters: Parameters

    @property
    def is_layer(self) -> bool:
        """True if it is a layer (routed experts are not)."""
        return self.name.endswith("layer")

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes without names, as ``dbuffer.plan`` takes them."""
        return tuple(shape for _, shape in self.parameters)

    @property
    def num_parameters(self) -> int:
        """Number of elements in one such unit."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's units, and the sizes that determine its shapes and arithmetic, under Hugging Face's names.

    Attributes:
        units: in order of the forward pass; every parameter is in one unit.
        tied: the output matrix is the embedding; it is counted once.
        vocab_size: rows of the embedding; 0 for a vision model.
        num_active_parameters: parameters that one token uses: all except the routed experts that it is not sent to. The
            whole embedding counts.
    """

    model_type: str
    units: tuple[UnitShapes, ...]
    tied: bool
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_active_parameters: int

    @property
    def num_parameters(self) -> int:
        """Number of all parameters."""
        return sum(unit.count * unit.num_parameters for unit in self.units)

    @property
    def num_routed_parameters(self) -> int:
        """Number of parameters in routed experts."""
        return sum(unit.count * unit.num_parameters for unit in self.units if unit.name == "experts")

    @property
    def expert_share(self) -> float:
        """The share of the routed experts' weights that one token uses."""
        routed = self.num_routed_parameters
        return 1 - (self.num_parameters - self.num_active_parameters) / routed if routed else 0.0

    def kinds(self) -> Iterator[tuple[UnitShapes, UnitShapes | None]]:
        """Yield each kind of unit, paired with the routed experts inside it or None; both have the same count."""
        for unit, following in zip(self.units, (*self.units[1:], None), strict=True):
            if unit.name != "experts":
                yield unit, following if following is not None and following.name == "experts" else None


def names() -> tuple[str, ...]:
    """Return the names of the models in the catalog, sorted."""
    found = (entry.name for entry in files(__name__).joinpath("models").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def load(name: str) -> dict[str, Any]:
    """Return the config of a model in the catalog, with Hugging Face's field names.

    ConfigError: the catalog has no such model; the message names the nearest one.
    """
    if name not in names():
        raise ConfigError(
            f"no model {name!r} in the catalog; did you mean {nearest(name, names())}? "
            "fix: give a name that megatron-fsdp plan --list-models lists"
        )
    config: dict[str, Any] = json.loads(files(__name__).joinpath("models", f"{name}.json").read_text(encoding="utf-8"))
    return config


def is_norm(name: str) -> bool:
    """Return whether a parameter belongs to a normalisation layer, by its name."""
    return "norm" in name or name.startswith("ln_")


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the units and sizes of a model from its Hugging Face config.

    Args:
        config: the content of a config.json. A gemma3 config gives its text model, a siglip config its vision model.
            DeepSeek's extra layer for multi-token prediction (MTP) is left out, as in transformers.
    Raises:
        ConfigError: the family is not in the catalog, or the config lacks a field.
    """
    model_type = config.get("model_type")
    part, inner_type = _DATA["inside"].get(model_type, ("", ""))
    if part in config:
        return architecture({"model_type": inner_type, **config[part]})
    if not isinstance(model_type, str) or model_type not in _DATA["families"]:
        raise ConfigError(
            f"model_type {model_type!r} is not in the catalog, which knows {', '.join(SUPPORTED)}. fix: for another "
            "model pass a function that builds it (--factory package.module:function)"
        )
    family = {**_DATA["usual"], **_DATA["families"][model_type]}
    fields = _Fields(config, family)
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    made = Architecture(
        model_type=model_type,
        units=tuple(_units(fields, family)),
        tied=fields.flag("tie_word_embeddings"),
        num_layers=fields["num_hidden_layers"],
        num_active_parameters=0,
        **{name: fields[name] for name in sizes},
    )
    experts = made.num_routed_parameters
    used = experts * fields["num_experts_per_tok"] // fields["num_experts"] if experts else 0
    return replace(made, num_active_parameters=made.num_parameters - experts + used)


class _Fields(dict[str, Any]):
    """A config with its family's fixed values; omitted fields are computed on access."""

    def __init__(self, config: Mapping[str, Any], family: Mapping[str, Any]) -> None:
        super().__init__({name: each for name, each in config.items() if each is not None} | family.get("fixed", {}))
        self._defaults = {**_DATA["defaults"], **family.get("defaults", {})}

    def flag(self, name: str) -> bool:
        """Return a boolean field; absent ones are false."""
        default = self._defaults.get(name)
        return bool(self.get(name, self.flag(default) if isinstance(default, str) else default))

    def __getitem__(self, name: str) -> int:
        value = self.get(name)
        if value is None and name in self._defaults:
            return self.number(self._defaults[name])
        if type(value) is not int or value < (name not in _MAY_BE_ZERO):
            wanted = f"give an integer >= {int(name not in _MAY_BE_ZERO)}"
            raise ConfigError(f"config of a {self.get('model_type')} model: {name} is {value!r}. fix: {wanted}")
        return value

    def number(self, expression: str | int) -> int:
        """Return the value of an expression of families.json."""
        return int(eval(str(expression), {"__builtins__": {}}, self))


def _units(fields: _Fields, family: Mapping[str, Any]) -> Iterator[UnitShapes]:
    embedding, last = _parameters(family["embedding"], fields), _parameters(family["last"], fields)
    tied = fields.flag("tie_word_embeddings")
    if tied:
        # The tied unit also has the last norm, and is used at both ends.
        embedding += last
    elif len(embedding) == 1:
        # The unit is the embedding module itself, so its parameter has no prefix.
        embedding = (("weight", embedding[0][1]),)
    yield UnitShapes("embedding", 1, embedding)
    num_layers = fields["num_hidden_layers"]
    layers = range(fields["first_k_dense_replace"], num_layers) if "experts" in family else ()
    dense, step = fields.get("mlp_only_layers", ()), fields["decoder_sparse_step"]
    sparse = sum(layer not in dense and (layer + 1) % step == 0 for layer in layers)
    if num_layers > sparse:
        name = "dense_layer" if "experts" in family else "layer"
        yield UnitShapes(name, num_layers - sparse, _parameters(family["layer"], fields))
    for name in ("moe_layer", "experts") if sparse else ():
        yield UnitShapes(name, sparse, _parameters(family[name], fields))
    if not tied:
        yield UnitShapes("head", 1, (*last, *_parameters(family["head"], fields)))


def _parameters(description: Sequence[str], fields: _Fields) -> Parameters:
    found: list[tuple[str, tuple[int, ...]]] = []
    for line in description:
        found += _parameters(_DATA["parts"][line[1:]], fields) if line[0] == "@" else _of_line(line, fields)
    return tuple(found)


def _of_line(line: str, fields: _Fields) -> Iterator[tuple[str, tuple[int, ...]]]:
    words, _, condition = line.partition(" if ")
    if condition and fields.flag(condition.removeprefix("not ")) is condition.startswith("not "):
        return
    kind, *rest = words.split()
    num_dims = {"linear": 2, "norm": 1}.get(kind)
    if num_dims is None:
        yield kind, tuple(map(fields.number, rest))
        return
    name, dims, flags = rest[0], [fields.number(word) for word in rest[1 : num_dims + 1]], rest[num_dims + 1 :]
    yield f"{name}.weight", tuple(dims)
    if any(map(fields.flag, flags)):
        yield f"{name}.bias", (dims[0],)
