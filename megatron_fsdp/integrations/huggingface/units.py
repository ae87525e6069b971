"""Which modules of a Hugging Face model become units of the sharding engine."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from megatron_fsdp.config.hf_settings import HfSettings
from megatron_fsdp.errors import ConfigError

__all__ = ["PlannedUnit", "ignored_parameters", "inner_model", "plan_units"]


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """Modules that form one unit.

    Attributes:
        modules: in the order in which forward runs them. keeps_weights: whether the weights stay gathered between
            forward and backward, because backward needs them first.
        is_layer: whether it is one of the repeated layers, whose activations may be computed again.
    """

    modules: tuple[nn.Module, ...]
    keeps_weights: bool = False
    is_layer: bool = False


def plan_units(model: nn.Module, settings: HfSettings) -> list[PlannedUnit]:
    """Return the units below ``model``, inner ones first; what is left belongs to the model itself.

    Each layer is a unit, the input embedding is one, and the last norm and the head are one together, which keeps its
    weights after forward. An embedding whose weight is the head's joins them. Inside of a wrapper (peft's), the model
    that it wraps is a unit too, since ``generate`` calls that one.

    Raises:
        ConfigError: a class that no module has, or no classes where the model does not name its own.
    """
    if settings.auto_wrap_policy == "NO_WRAP":
        return _prompts(model)
    core = inner_model(model)
    around = [] if core is model else [PlannedUnit((core,), keeps_weights=True), *_prompts(model)]
    ends = _ends(core)
    taken = {id(below) for unit in ends for module in unit.modules for below in module.modules()}
    if settings.auto_wrap_policy == "SIZE_BASED_WRAP":
        layers = _large_modules(core, settings.min_num_params, taken)
    else:
        classes = settings.transformer_layer_cls_to_wrap or _own_classes(core)
        layers = [module for module in _instances(model, classes) if id(module) not in taken]
    return [*ends, *(PlannedUnit((layer,), is_layer=True) for layer in layers), *around]


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model that a wrapper such as peft's is around: the outermost one that knows its embedding itself.

    Wrappers hand on the attributes of what they wrap, so only classes tell. Without any such module it is ``model``.
    """
    return next((module for module in model.modules() if hasattr(type(module), "get_input_embeddings")), model)


def _prompts(model: nn.Module) -> list[PlannedUnit]:
    """Return peft's encoders of learned prompts, which it calls before the model and when it saves."""
    encoders = getattr(model, "prompt_encoder", None)
    return [PlannedUnit((encoder,)) for encoder in encoders.values()] if isinstance(encoders, nn.ModuleDict) else []


def ignored_parameters(model: nn.Module, ignored: str | Iterable[str | nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of the modules that settings ignore.

    Args:
        ignored: a regular expression that whole names of modules match, or names and modules.
    """
    modules = dict(model.named_modules())
    if isinstance(ignored, str):
        try:
            pattern = re.compile(ignored)
        except re.error as error:
            raise ConfigError(f"ignored_modules: {ignored!r} is no regular expression: {error}") from None
        found = [module for name, module in modules.items() if pattern.fullmatch(name)]
        if not found:
            raise ConfigError(f"ignored_modules: {ignored!r} matches no whole name of a module; {_examples(modules)}")
    else:
        found = [_named_module(modules, entry) for entry in ignored]
    return list({id(parameter): parameter for module in found for parameter in module.parameters()}.values())


def _named_module(modules: dict[str, nn.Module], entry: str | nn.Module) -> nn.Module:
    if isinstance(entry, nn.Module):
        if not any(entry is module for module in modules.values()):
            raise ConfigError(f"ignored_modules: a {type(entry).__name__} that is no part of the model")
        return entry
    if entry not in modules:
        raise ConfigError(f"ignored_modules: {entry!r} names no module; {_examples(modules)}")
    return modules[entry]


def _examples(modules: dict[str, nn.Module]) -> str:
    return "there are " + ", ".join(repr(name) for name in list(modules)[1:6]) + ", ..."


# ---------------------------------------------------------------- the two ends of the model


def _ends(model: nn.Module) -> list[PlannedUnit]:
    embedding, head = _call(model, "get_input_embeddings"), _call(model, "get_output_embeddings")
    norm = _final_norm(model) if head is not None else None
    tail = [module for module in (norm, head) if module is not None]
    weight = getattr(embedding, "weight", None)
    holders = [part for part in model.modules() if any(p is weight for p in part._parameters.values() if p is not None)]
    if head is not None and any(module is head for module in holders):
        # The embedding comes first: its forward is when the shared weight is needed first.
        inside = {id(below) for module in tail for below in module.modules()}
        firsts = [module for module in holders if module is not head and id(module) not in inside]
        return [PlannedUnit((*firsts, *tail), keeps_weights=True)]
    units = [PlannedUnit(tuple(holders))] if holders else []
    return [*units, *([PlannedUnit(tuple(tail), keeps_weights=True)] if tail else [])]


def _call(model: nn.Module, method: str) -> nn.Module | None:
    found = getattr(model, method, None)
    try:
        module = found() if callable(found) else None
    except NotImplementedError:
        return None
    return module if isinstance(module, nn.Module) else None


def _final_norm(model: nn.Module) -> nn.Module | None:
    """Return the last child of the base model that is a norm: the one before the head, by convention."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    base = base if isinstance(base, nn.Module) else model
    norms = [child for child in base.children() if "norm" in type(child).__name__.lower()]
    return norms[-1] if norms else None


# ---------------------------------------------------------------- the layers


def _own_classes(model: nn.Module) -> tuple[str, ...]:
    names = getattr(model, "_no_split_modules", None)
    present = {type(module).__name__ for module in model.modules()}
    # A model lists the layers of all its parts, also of those that this one was built without.
    found = tuple(name for name in names or () if name in present)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} does not say which of its modules are layers (_no_split_modules is {names!r}); "
            "give transformer_layer_cls_to_wrap, or auto_wrap_policy NO_WRAP"
        )
    return found


def _instances(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    """Return the modules below the model of these classes, inner ones first."""
    modules = list(model.modules())[1:]
    found = [module for module in modules if any(cls.__name__ in classes for cls in type(module).__mro__)]
    present = {cls.__name__ for module in found for cls in type(module).__mro__}
    missing = [name for name in classes if name not in present]
    if missing:
        names = sorted({type(module).__name__ for module in modules})
        raise ConfigError(f"transformer_layer_cls_to_wrap: no module is a {', '.join(missing)}; there are {names}")
    return found[::-1]


def _large_modules(model: nn.Module, minimum: int, taken: Container[int]) -> list[nn.Module]:
    """Return, inner ones first, modules with at least ``minimum`` parameters that no unit inside of them has."""
    units: list[nn.Module] = []
    owned = {id(p) for module in model.modules() if id(module) in taken for p in module.parameters()}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        rest = [parameter for parameter in module.parameters() if id(parameter) not in owned]
        is_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if module is not model and is_called and sum(parameter.numel() for parameter in rest) >= minimum:
            units.append(module)
            owned.update(map(id, rest))

    visit(model)
    return units
