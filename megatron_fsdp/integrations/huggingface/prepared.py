"""What transformers, accelerate and peft ask of a model that ``prepare_model`` sharded."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dbuffer.collectives_rare import barrier
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.huggingface.units import inner_model
from megatron_fsdp.runtime.lifecycle.module import register_fsdp_forward_method
from megatron_fsdp.runtime.step.unit import units_below

__all__ = ["announce", "keep_in_step"]

# An attribute of the classes of transformers: whether their model is sharded, so that nobody wraps it again.
_IS_SHARDED = "_is_distributed_loading_by_transformers"


def announce(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave what others look at: to not wrap the model again, to gather before they save, to generate in step."""
    keep_in_step(model)
    for module in model.modules():
        if module is model or hasattr(type(module), _IS_SHARDED):
            setattr(module, _IS_SHARDED, True)
    core: Any = inner_model(model)
    if hasattr(type(core), _IS_SHARDED) and hasattr(core, "config"):
        configuration = importlib.import_module("transformers.distributed.configuration_utils")
        # Replicas count as shards: how gradients are reduced over them is the engine's affair. And one rank counts as
        # two, because transformers gathers nothing before it saves on one rank, where parameters are DTensors all the
        # same.
        core.config.distributed_config = configuration.DistributedConfig(fsdp_size=max(2, mesh.size()))
    peft = sys.modules.get("peft")
    has_adapters = peft is not None and isinstance(model, peft.PeftModel)
    model.__class__ = _prepared_class(type(model), has_adapters)  # type: ignore[arg-type]  # classes are hashable
    if core is not model and hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")


def keep_in_step(model: nn.Module) -> None:
    """Let ranks run as many forwards as each other where transformers asks: when they generate, and drop layers."""
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]  # lands in the instance dictionary


class PreparedModel(nn.Module):
    """Mixed into the class of a model that ``prepare_model`` sharded."""

    @property
    def hf_device_map(self) -> Any:
        """Where ``from_pretrained(device_map=...)`` put the parts of the model, if it did.

        The Trainer and ``Accelerator.prepare`` ask each model for it before they do anything else with it.

        Raises:
            ConfigError: accelerate is set up to shard models itself.
        """
        _refuse_second_sharding(type(self).__name__)
        found = vars(self).get("hf_device_map")
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'hf_device_map'")
        return found


class PreparedPeftModel(PreparedModel):
    """The same, for a model with adapters."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], *values: Any, **options: Any) -> None:
        """Save the adapters, gathered; every rank calls it, the first one writes.

        Args:
            save_directory, values, options: as in ``peft.PeftModel.save_pretrained``.
        """
        save: Any = super().save_pretrained  # type: ignore[misc]  # the class this is mixed into
        given = inspect.signature(save).bind(save_directory, *values, **options)
        arguments = {**given.arguments, **given.arguments.pop("kwargs", {})}
        arguments["state_dict"] = _gathered_adapters(self, arguments)
        axes = [axis for unit in units_below(self) for group in unit.groups for axis in group.main_weight.axes]
        arguments["is_main_process"] = arguments.get("is_main_process", True) and not any(axis.rank for axis in axes)
        save(**arguments)
        barrier()


# ---------------------------------------------------------------- parts


@functools.cache
def _prepared_class(cls: type[nn.Module], has_adapters: bool) -> type[nn.Module]:
    # The name stays: FSDP<Class>, which transformers knows to strip.
    added = PreparedPeftModel if has_adapters else PreparedModel
    return type(cls.__name__, (added, cls), {"__module__": cls.__module__})


def _refuse_second_sharding(name: str) -> None:
    state = sys.modules.get("accelerate.state")
    shared: Mapping[str, Any] = state.AcceleratorState._shared_state if state is not None else {}
    if str(getattr(shared.get("distributed_type"), "value", "")) == "FSDP":
        raise ConfigError(
            f"{name} was sharded by prepare_model, and accelerate is set up to shard it again: by `accelerate launch` "
            "with distributed_type FSDP (or ACCELERATE_USE_FSDP), TrainingArguments(fsdp=...) or an fsdp_plugin. "
            "Either leave out prepare_model and train inside of `with accelerate_fsdp2():`, which shards with this "
            "engine as that config says; or leave out FSDP there: torchrun, or distributed_type MULTI_GPU"
        )


def _gathered_adapters(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what peft saves of the state dict as whole tensors; of the other weights nothing is gathered."""
    state: dict[str, Any] = arguments.get("state_dict") or model.state_dict()
    names_of = {id(value): name for name, value in state.items()}
    choose: Any = importlib.import_module("peft").get_peft_model_state_dict
    adapters = arguments.get("selected_adapters") or list(model.peft_config)
    embeddings = arguments.get("save_embedding_layers", "auto")
    chosen = [
        (id(value), adapter)
        for adapter in adapters
        for value in choose(model, state, adapter_name=adapter, save_embedding_layers=embeddings).values()
    ]
    # What peft computes of the state dict needs whole tensors; prompts it computes by their module.
    is_choice = all(key in names_of or model.peft_config[adapter].is_prompt_learning for key, adapter in chosen)
    names = {names_of[key] for key, _ in chosen if key in names_of} if is_choice else set(state)
    return {
        name: value.full_tensor().cpu() if isinstance(value, DTensor) else value
        for name, value in state.items()
        if name in names
    }
