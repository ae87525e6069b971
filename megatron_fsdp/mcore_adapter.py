"""megatron-core, over this engine: a data-parallel wrapper for its models, and its optimizer over sharded weights.

megatron.core is imported when something here is first used, so that the package works without it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.mcore_model import DataParallelMethods, refuse_configs, shard_for_megatron
from megatron_fsdp.mcore_optimizer import OptimizerMethods, adopt_optimizer, refuse_optimizer

__all__ = ["ShardedDataParallel", "get_megatron_optimizer"]

if TYPE_CHECKING:
    ShardedDataParallel: Any


def __getattr__(name: str) -> Any:
    """Make ``ShardedDataParallel`` when it is first asked for: its base class is megatron.core's."""
    if name == "ShardedDataParallel":
        return _data_parallel_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _data_parallel_class() -> type[Any]:
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    def __init__(
        self: Any,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
    ) -> None:
        refuse_configs(config, ddp_config)
        # Before the module is registered here: sharding it changes its class in place.
        mesh = _data_parallel_mesh(module, pg_collection)
        units = _own_units(module) if fsdp_unit_modules is None else fsdp_unit_modules
        sharded = shard_for_megatron(module, config, ddp_config, mesh, units)
        _BaseDataParallel.__init__(self, config=config, module=sharded)
        # get_megatron_optimizer gives parameters and experts to one optimizer under this switch.
        self.ddp_config = dataclasses.replace(ddp_config, use_megatron_fsdp=True)
        self.force_all_reduce = False

    members = {"__init__": __init__, "__module__": __name__, "__doc__": DataParallelMethods.__doc__}
    return type("ShardedDataParallel", (DataParallelMethods, _BaseDataParallel), members)


def _data_parallel_mesh(module: nn.Module, pg_collection: Any) -> DeviceMesh:
    """Return the mesh over Megatron's data-parallel ranks, context-parallel ones among them."""
    from megatron.core import parallel_state

    group = getattr(pg_collection, "dp_cp", None)
    if group is None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found = next((parameter.device.type for parameter in module.parameters() if not parameter.is_meta), None)
    return DeviceMesh.from_group(group, found or ("cuda" if torch.cuda.is_available() else "cpu"))


def _own_units(module: nn.Module) -> list[type[nn.Module]]:
    """Return the classes to make units of: layers, and the embedding where the output layer does not share its weight.

    A shared weight stays with the root, for the model's own forward hands it to the output layer.
    """
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    is_tied = any(getattr(part, "share_embeddings_and_output_weights", False) for part in module.modules())
    classes = [BaseTransformerLayer] if is_tied else [BaseTransformerLayer, LanguageModelEmbedding]
    return [cls for cls in classes if any(isinstance(part, cls) for part in module.modules())]


def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *positional: Any, **options: Any) -> Any:
    """Return Megatron's FP32 optimizer over the sharded weights of a ``ShardedDataParallel`` model.

    Main weights are FP32 whatever the model computes in, so the optimizer needs no copies of its own. The norm it
    logs, clips by, and the zeros it counts are those of the whole gradient, each element once.

    Args:
        config: ``megatron.core.optimizer.OptimizerConfig``: adam or sgd.
        model_chunks: a list of one ``ShardedDataParallel``.
        positional, options: the other arguments of ``megatron.core.optimizer.get_megatron_optimizer``.
    Returns:
        A ``megatron.core.optimizer.FP32Optimizer``.
    Raises:
        ConfigError: another kind of optimizer, or of model.
    """
    if len(model_chunks) != 1 or not isinstance(model_chunks[0], DataParallelMethods):
        raise ConfigError(
            f"get_megatron_optimizer takes a list of one ShardedDataParallel, found "
            f"{[type(chunk).__name__ for chunk in model_chunks]}; use megatron.core's own function for other models"
        )
    refuse_optimizer(config)
    from megatron.core import optimizer as megatron_optimizers

    plain = dataclasses.replace(config, bf16=False, use_distributed_optimizer=False)
    made = megatron_optimizers.get_megatron_optimizer(plain, list(model_chunks), *positional, **options)
    cls: Any = type(made)
    sharded: Any = object.__new__(_optimizer_class(cls))
    vars(sharded).update(vars(made))
    return adopt_optimizer(sharded, model_chunks[0].module)


@functools.cache
def _optimizer_class(cls: Any) -> Any:
    return type(f"Sharded{cls.__name__}", (OptimizerMethods, cls), {"__module__": __name__})
