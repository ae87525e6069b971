"""Catalog: the shapes of published models, and of any model whose Hugging Face config belongs to a known family.

``architecture(load("llama3-8b"))`` gives its FSDP units; nothing is downloaded and no model is built. The data are the
fields of each published config.json that decide shapes, with the place of publication under "source".
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from megatron_fsdp.errors import ConfigError, nearest
from megatron_fsdp.planning.catalog.architecture import (
    SUPPORTED,
    Architecture,
    Parameters,
    UnitShapes,
    architecture,
    is_norm,
)

__all__ = ["SUPPORTED", "Architecture", "Parameters", "UnitShapes", "architecture", "is_norm", "load", "names"]


def names() -> tuple[str, ...]:
    """Return the names of the models in the catalog, sorted."""
    found = (entry.name for entry in files(__name__).joinpath("models").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def load(name: str) -> dict[str, Any]:
    """Return the config of a model in the catalog, in Hugging Face's words.

    ConfigError: the catalog has no such model; the message names the nearest.
    """
    if name not in names():
        raise ConfigError(
            f"no model {name!r} in the catalog; did you mean {nearest(name, names())}? "
            "megatron-fsdp plan --list-models lists them"
        )
    config: dict[str, Any] = json.loads(files(__name__).joinpath("models", f"{name}.json").read_text(encoding="utf-8"))
    return config
