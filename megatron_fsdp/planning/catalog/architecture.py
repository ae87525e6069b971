"""Architecture: the parameters that a published model shards, unit by unit, as shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Architecture", "Parameters", "UnitShapes"]

Parameters = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class UnitShapes:
    """One FSDP unit: a kind of layer, its routed experts, the embedding, or the last norm with the output matrix.

    Attributes:
        name: ``layer``, ``dense_layer``, ``moe_layer``, ``experts``, ``embedding``, ``head``.
        count: how often the unit occurs in the model.
        parameters: name and shape of each, in order of registration. Names are those of Hugging Face transformers below
            the unit's module; in a unit of several modules (``head``) each name starts with its module.
    """

    name: str
    count: int
    parameters: Parameters

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes alone, as ``dbuffer.plan`` takes them."""
        return tuple(shape for _, shape in self.parameters)

    @property
    def num_parameters(self) -> int:
        """Elements of one such unit."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as its units and the sizes that decide its shapes and its arithmetic.

    Attributes:
        model_type: the family, as Hugging Face spells it.
        units: in order of the forward pass; every parameter is in one unit.
        tied: the output matrix is the embedding; both are counted once.
        hidden_size: width of the residual stream.
        num_layers: layers, of all kinds together.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of one query head.
        intermediate_size: width inside a dense MLP, as the config says it.
        vocab_size: rows of the embedding; 0 for a vision model.
        num_active_parameters: those that one token uses: all but the routed experts that it is not sent to. The
            embedding counts as a whole.
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
        """All of them."""
        return sum(unit.count * unit.num_parameters for unit in self.units)

    @property
    def num_routed_parameters(self) -> int:
        """Those of routed experts."""
        return sum(unit.count * unit.num_parameters for unit in self.units if unit.name == "experts")

    @property
    def expert_share(self) -> float:
        """The share of the routed experts' weights that one token uses."""
        routed = self.num_routed_parameters
        return 1 - (self.num_parameters - self.num_active_parameters) / routed if routed else 0.0

    def kinds(self) -> Iterator[tuple[UnitShapes, UnitShapes | None]]:
        """Yield each kind of unit with the one inside of it: routed experts follow their layer, with the same count."""
        for unit, following in zip(self.units, (*self.units[1:], None), strict=True):
            if unit.name != "experts":
                yield unit, following if following is not None and following.name == "experts" else None
