"""Subject: the model to plan for, from the catalog, a config file or a function that builds it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigError, nearest
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.catalog import Architecture
from megatron_fsdp.planning.parallelism import Parallelism, Stage, in_flight
from megatron_fsdp.planning.played_step import StandIns
from megatron_fsdp.planning.stand_in import Sharding, put, shaped_stand_ins
from megatron_fsdp.planning.transformer import Transformer

__all__ = [
    "Subject",
    "build_on_meta",
    "factory_subject",
    "file_subject",
    "named_subject",
    "repeated_blocks",
    "shaped_module",
    "stage_subject",
]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as planning needs it: modules without memory, counts and operations.

    Attributes:
        num_parameters, num_active_parameters: all parameters, and those that one token uses.
        module: the model on the meta device. blocks: its units below the root.
        transformer: computation and activations, for models of the catalog and their stages. None: each parameter is
            assumed to be used in two operations per token, and activations are unknown.
        notes: sentences that say which quantities are unknown.
    """

    name: str
    num_parameters: int
    num_active_parameters: int
    module: nn.Module
    blocks: Sequence[nn.Module]
    transformer: Transformer | None = None
    notes: tuple[str, ...] = ()

    def stand_ins(self, sharding: Sharding, sequence_length: int, *, has_streams: bool = True) -> StandIns:
        """Return a function that makes stand-ins for the model under a sharding."""
        works = self.transformer.work(sequence_length) if self.transformer is not None else {}
        return partial(shaped_stand_ins, self.module, self.blocks, sharding, works, has_streams=has_streams)

    def shortened(self, num_layers: int) -> Subject | None:
        """Return the model with ``num_layers`` layers; None if its layers are unknown or several kinds have more."""
        units = self.transformer.architecture.units if self.transformer is not None else ()
        if self.transformer is None or sum(each.count > num_layers for each in units if each.is_layer) != 1:
            return None
        few = tuple(replace(each, count=min(each.count, num_layers)) for each in units)
        module, blocks = shaped_module(replace(self.transformer.architecture, units=few))
        return replace(self, module=module, blocks=blocks)


# ---------------------------------------------------------------------- the catalog


def named_subject(name: str) -> Subject:
    """Return a model of the catalog. ConfigError: the catalog has no such model."""
    return _catalog_subject(name, catalog.load(name))


def file_subject(path: str) -> Subject:
    """Return the model of a Hugging Face config.json.

    ConfigError: the file does not exist, is not a JSON object, or is of a family that the catalog does not have.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--hf-config {path}: {error}. fix: give the config.json of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"--hf-config {path}: it holds a {type(config).__name__}. fix: give a config.json with one JSON object"
        )
    return _catalog_subject(Path(path).stem if Path(path).stem != "config" else str(config.get("model_type")), config)


def _catalog_subject(name: str, config: Mapping[str, Any]) -> Subject:
    architecture = catalog.architecture(config)
    counts = architecture.num_parameters, architecture.num_active_parameters
    return Subject(name, *counts, *shaped_module(architecture), Transformer(architecture))


def stage_subject(subject: Subject, stage: Stage, parallelism: Parallelism, num_microbatches: int) -> Subject:
    """Return the part of one rank of a stage as a model; its name and counts are those of the whole model."""
    num_held = in_flight(stage, parallelism, num_microbatches)
    transformer = Transformer(stage.architecture, stage.has_head, parallelism.stream_ranks, num_held)
    module, blocks = shaped_module(stage.architecture, stage.layers[0])
    return replace(subject, module=module, blocks=blocks, transformer=transformer)


def shaped_module(architecture: Architecture, first_layer: int = 0) -> tuple[nn.Module, list[nn.Module]]:
    """Return a module with an architecture's parameters on the meta device, and its units below the root.

    The class name of a unit is its kind. Routed experts are a unit inside their layer. If the output matrix is tied,
    the embedding's unit also holds the last norm and encloses the layers, because it is used until the model's end.

    Args:
        first_layer: index of this module's first layer in the whole model.
    """
    root, blocks = _made("model", ""), list[nn.Module]()
    around, last = root, list[tuple[str, tuple[int, ...]]]()
    layer = first_layer
    for shapes, nested in architecture.kinds():
        # Registration order: norms follow the modules that hold nested units, both in layers and in whole models.
        inner = max((at for at, (each, _) in enumerate(shapes.parameters) if not catalog.is_norm(each)), default=-1) + 1
        is_layer = shapes.name not in ("embedding", "head")
        is_around = architecture.tied and shapes is architecture.units[0]
        for _ in range(shapes.count):
            unit = _made(shapes.name, f"{shapes.name}.{layer}" if is_layer else shapes.name)
            layer += is_layer
            blocks.append(unit)
            around.add_module(f"unit{len(blocks)}", unit)
            _register(unit, shapes.parameters[:inner])
            if nested is not None:
                blocks.append(_made(nested.name, f"{vars(unit)['path']}.{nested.name}"))
                _register(blocks[-1], nested.parameters)
                unit.add_module(nested.name, blocks[-1])
            if is_around:
                around, last = unit, list(shapes.parameters[inner:])
            else:
                _register(unit, shapes.parameters[inner:])
    _register(around, last)
    return root, blocks


def _made(kind: str, path: str) -> nn.Module:
    made: nn.Module = type(kind, (nn.Module,), {})()
    vars(made)["path"] = path
    return made


def _register(module: nn.Module, parameters: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    for name, shape in parameters:
        put(module, name, nn.Parameter(torch.empty(shape, device="meta")))


# ---------------------------------------------------------------------- models from a factory function


def factory_subject(target: str, unit_classes: tuple[str, ...] = ()) -> Subject:
    """Return the model that a function builds on the meta device.

    Args:
        target: ``package.module:function``, called without arguments.
        unit_classes: names of the classes whose modules are units; empty: the repeated blocks in the outermost
            ``ModuleList``s.
    Raises:
        ConfigError: the function cannot be imported or fails, or its model has no module of a unit class.
    """
    model = build_on_meta(_imported(target))
    blocks = repeated_blocks(model)
    if unit_classes:
        blocks = tuple(module for module in model.modules() if type(module).__name__ in unit_classes)
        missing = set(unit_classes) - {type(block).__name__ for block in blocks}
        if missing:
            found = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(
                f"--unit-class {', '.join(sorted(missing))}: no module has this class. fix: use classes of the model: "
                f"{', '.join(found)}"
            )
    notes = ["activations are not known: they take a run of the model; --activation-bytes gives them"]
    notes.append("compute is 6 operations per parameter and token, attention scores and looked-up embeddings alike")
    if not blocks:
        notes.append("no repeated blocks were found, so the whole model is one unit; --unit-class names units")
    count = sum(parameter.numel() for parameter in model.parameters())
    return Subject(target, count, count, model, blocks, notes=tuple(notes))


def repeated_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return a model's usual units: the modules of each outermost ``ModuleList`` with at least two modules."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not is_inside:
            lists.append((path, module))
    return tuple(block for _, blocks in lists for block in blocks)


def build_on_meta(factory: Callable[[], object]) -> nn.Module:
    """Return the module that ``factory`` builds, with all parameters on the meta device, without allocating memory.

    ConfigError: the factory does not return a module, or fails on the meta device.
    """
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        raise ConfigError(
            f"the factory failed on the meta device: {type(error).__name__}: {error}. Parameters have no values there. "
            "fix: build modules only, and leave initialisation that reads values to reset_parameters"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the factory returned {type(model).__name__}. fix: return the nn.Module to plan for")
    return model


def _imported(target: str) -> Callable[[], nn.Module]:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(f"--factory {target}. fix: write it as package.module:function")
    # `python -m` puts the current folder on sys.path; a console script puts its own folder there.
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"--factory {target}: importing {module} failed: {error}. fix: install it, or run in its folder"
            ) from error
        raise ConfigError(
            f"--factory {target}: {error}, neither in {folder} nor on PYTHONPATH. fix: run the command in the folder "
            f"of {module.split('.')[0]}.py, or name that folder in PYTHONPATH"
        ) from error
    except Exception as error:  # of the user's module
        raise ConfigError(
            f"--factory {target}: importing {module} failed: {type(error).__name__}: {error}. fix: make `python -c "
            f"'import {module}'` work"
        ) from error
    if not hasattr(imported, name):
        names = [each for each, value in vars(imported).items() if callable(value)]
        meant = f"the nearest is {nearest(name, names)}" if names else "name a function of it"
        raise ConfigError(f"--factory {target}: {module} has no {name!r}. fix: {meant}")
    found = getattr(imported, name)
    if not callable(found):
        raise ConfigError(
            f"--factory {target}: {name} is a {type(found).__name__}. fix: name a function without arguments"
        )
    function: Callable[[], nn.Module] = found
    return function
