"""Subject: the model that a plan is for, from a catalog, a config file or a function that builds it."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.catalog import Architecture
from megatron_fsdp.planning.from_shapes import (
    Sharding,
    architecture_facts,
    build_on_meta,
    module_facts,
    repeated_blocks,
)
from megatron_fsdp.planning.model_spec import ModelFacts, UnitFacts
from megatron_fsdp.planning.parallelism import Parallelism, Stage, in_flight
from megatron_fsdp.planning.transformer import Transformer, UnitWork, Workload

__all__ = ["Subject", "factory_subject", "file_subject", "named_subject", "stage_subject"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as far as a plan has to know it.

    Attributes:
        num_parameters, num_active_parameters: all, and those that one token uses.
        facts: its units under a way of sharding it. work: operations per token of a unit at a sequence length.
        activations: bytes kept for backward, from the workload and the compute dtype's size; None where only running
            the model would tell.
        notes: what is not known of it.
        architecture: its shapes, where it is one of the catalog.
    """

    name: str
    num_parameters: int
    num_active_parameters: int
    facts: Callable[[Sharding], ModelFacts]
    work: Callable[[UnitFacts, int], UnitWork]
    activations: Callable[[Workload, int], int] | None = None
    notes: tuple[str, ...] = ()
    architecture: Architecture | None = None


def stage_subject(subject: Subject, stage: Stage, parallelism: Parallelism, num_microbatches: int) -> Subject:
    """Return what one rank of a stage has, as a model of its own; the name and the counts are the whole model's."""
    transformer = Transformer.of(stage.architecture, has_head=stage.has_head, stream_ranks=parallelism.stream_ranks)
    num_held = in_flight(stage, parallelism, num_microbatches)
    return replace(
        subject,
        facts=lambda sharding: architecture_facts(stage.architecture, sharding, stage.layers[0]),
        work=_work_of(transformer),
        activations=lambda workload, itemsize: transformer.activation_bytes(workload, itemsize, num_held),
        architecture=stage.architecture,
    )


def _work_of(transformer: Transformer) -> Callable[[UnitFacts, int], UnitWork]:
    kinds = functools.cache(transformer.work)

    def work(unit: UnitFacts, sequence_length: int) -> UnitWork:
        # The kind of unit stands where a live model has the class of its module.
        return kinds(sequence_length).get(unit.modules[0], UnitWork(0))

    return work


def named_subject(name: str) -> Subject:
    """Return a model of the catalog.

    Raises:
        ConfigError: there is none of that name.
    """
    return _catalog_subject(name, catalog.load(name))


def file_subject(path: str) -> Subject:
    """Return the model of a Hugging Face config.json.

    Raises:
        ConfigError: no such file, no JSON object, or a family that the catalog does not know.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--hf-config {path}: {error}; give the config.json of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-config {path}: it holds a {type(config).__name__}, wanted a JSON object")
    return _catalog_subject(Path(path).stem if Path(path).stem != "config" else str(config.get("model_type")), config)


def _catalog_subject(name: str, config: Mapping[str, Any]) -> Subject:
    architecture = catalog.architecture(config)
    transformer = Transformer.of(architecture)
    return Subject(
        name,
        architecture.num_parameters,
        architecture.num_active_parameters,
        lambda sharding: architecture_facts(architecture, sharding),
        _work_of(transformer),
        transformer.activation_bytes,
        architecture=architecture,
    )


def factory_subject(target: str, unit_classes: tuple[str, ...] = ()) -> Subject:
    """Return the model that a function builds, on the meta device.

    Args:
        target: ``package.module:function``, called without arguments.
        unit_classes: names of the classes whose modules are units; empty: the repeated blocks of the outermost
            ``ModuleList``s.
    Raises:
        ConfigError: it cannot be imported or built, or has no module of those classes.
    """
    model = build_on_meta(_imported(target))
    blocks = repeated_blocks(model)
    if unit_classes:
        blocks = tuple(module for module in model.modules() if type(module).__name__ in unit_classes)
        missing = set(unit_classes) - {type(block).__name__ for block in blocks}
        if missing:
            found = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError(f"--unit-class {', '.join(sorted(missing))}: the model has {', '.join(found)}")
    count = sum(parameter.numel() for parameter in model.parameters())
    notes = ["activations are not known: they take a run of the model; --activation-bytes gives them"]
    notes.append("compute is 6 operations per parameter and token, attention scores and looked-up embeddings alike")
    if not blocks:
        notes.append("no repeated blocks were found, so the whole model is one unit; --unit-class names units")
    return Subject(
        target,
        count,
        count,
        lambda sharding: module_facts(model, blocks, sharding),
        lambda unit, _: UnitWork(2 * sum(group.plan.data_numel for group in unit.groups), is_layer=not unit.is_root),
        notes=tuple(notes),
    )


def _imported(target: str) -> Callable[[], nn.Module]:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(f"--factory {target}: wanted package.module:function")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--factory {target}: {error}; is its folder on PYTHONPATH?") from error
    if not callable(found):
        raise ConfigError(f"--factory {target}: {name} is a {type(found).__name__}, wanted a function")
    function: Callable[[], nn.Module] = found
    return function
