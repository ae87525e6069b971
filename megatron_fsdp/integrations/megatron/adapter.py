"""megatron-core, over this engine: a data-parallel wrapper for its models, and its optimizer over sharded weights.

megatron.core is imported when something here is first used, so that the package works without it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dbuffer.dtensor.flat_dtensor import FlatDTensor
from megatron_fsdp.errors import CheckpointError, ConfigError
from megatron_fsdp.integrations.megatron.checkpoint import lay_out_for_megatron
from megatron_fsdp.integrations.megatron.data_parallel import DataParallelMethods, shard_for_megatron
from megatron_fsdp.integrations.megatron.groups import ModelGroups, size_of
from megatron_fsdp.integrations.megatron.optimizer import OptimizerMethods, adopt_optimizer, weight_norm
from megatron_fsdp.integrations.megatron.settings import refuse_arguments, refuse_configs, refuse_optimizer
from megatron_fsdp.optim.muon.megatron_muon import MUON_NAMES

__all__ = ["ShardedDataParallel", "assign_everywhere", "get_megatron_optimizer", "install", "uninstall"]

if TYPE_CHECKING:
    ShardedDataParallel: Any

# Attribute of a function that is put in place of one of Megatron's: that one.
_ORIGINAL = "_megatrons_own"


def __getattr__(name: str) -> Any:
    """Make ``ShardedDataParallel`` when it is first asked for: its base class is megatron.core's."""
    if name == "ShardedDataParallel":
        return _data_parallel_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _data_parallel_class(megatrons: Any = None) -> type[Any]:
    """Return the wrapper's class: below Megatron's adapter class, for its isinstance checks, or below their base."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    def __init__(
        self: Any,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: Any = None,
        **others: Any,
    ) -> None:
        refuse_configs(config, ddp_config)
        refuse_arguments(others)
        # Before the module is registered here: sharding it changes its class in place.
        groups = _groups(ddp_config, pg_collection)
        units = _own_units(module) if fsdp_unit_modules is None else fsdp_unit_modules
        found = next((p.device.type for p in module.parameters() if not p.is_meta), None)
        device_type = device.type if device is not None else found or ("cuda" if torch.cuda.is_available() else "cpu")
        with _megatrons_initialisers(module):
            sharded = shard_for_megatron(module, config, ddp_config, groups, device_type, units)
        # Past the constructor of Megatron's adapter, which starts its engine.
        _BaseDataParallel.__init__(self, config=config, module=sharded)
        # get_megatron_optimizer gives parameters and experts to one optimizer under this switch.
        self.ddp_config = dataclasses.replace(ddp_config, use_megatron_fsdp=True)
        self.force_all_reduce = False

    members = {"__init__": __init__, "__module__": __name__, "__doc__": DataParallelMethods.__doc__}
    name = "ShardedDataParallel" if megatrons is None else megatrons.__name__
    return type(name, (DataParallelMethods, megatrons or _BaseDataParallel), members)


# Fields of ModelGroups, and those of Megatron's ProcessGroupCollection.
_FIELDS = {
    "data": "dp_cp", "expert_data": "expt_dp", "tensor": "tp", "expert_tensor": "expt_tp", "expert": "ep",
    "pipeline": "pp", "model": "mp", "embedding": "embd",
}  # fmt: skip
_HYBRID_FIELDS = {"data_inner": "intra_dp_cp", "expert_data_inner": "intra_expt_dp", "outer": "inter_dist_opt"}


def _groups(ddp_config: Any, pg_collection: Any) -> ModelGroups:
    """Return Megatron's groups: those of ``pg_collection``, and of ``parallel_state`` where it leaves a field unset."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    for field in ("gtp_remat", "expt_gtp_remat"):
        if size_of(getattr(pg_collection, field, None)) > 1:
            raise ConfigError(
                f"pg_collection.{field} has more than one rank. fix: leave it out, weights are sharded anyway"
            )
    is_hybrid = ddp_config.num_distributed_optimizer_instances > 1
    fields = _FIELDS | (_HYBRID_FIELDS if is_hybrid else {})
    found: dict[str, Any] = {ours: getattr(pg_collection, theirs, None) for ours, theirs in fields.items()}
    for ours, theirs in fields.items():
        if found[ours] is None:
            # Without parallel_state, only the groups of the collection exist.
            with contextlib.suppress(AssertionError):
                found[ours] = getattr(ProcessGroupCollection.use_mpu_process_groups([theirs]), theirs, None)
    if found["data"] is None:
        raise ConfigError(
            "found no data-parallel group. fix: set pg_collection.dp_cp, or initialize_model_parallel() first"
        )
    return ModelGroups(**found)


def _own_units(module: nn.Module) -> list[type[nn.Module]]:
    """Return the classes to make units of: layers, and the embedding where the output layer does not share its weight.

    A shared weight stays with the root, for the model's own forward hands it to the output layer.
    """
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    is_tied = any(getattr(part, "share_embeddings_and_output_weights", False) for part in module.modules())
    classes = [BaseTransformerLayer] if is_tied else [BaseTransformerLayer, LanguageModelEmbedding]
    return [cls for cls in classes if any(isinstance(part, cls) for part in module.modules())]


@contextlib.contextmanager
def _megatrons_initialisers(module: nn.Module) -> Iterator[None]:
    """Let embeddings on the meta device be drawn as Megatron's constructors draw them; PyTorch's have variance 1."""
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

    drawn = [
        (child, part.config.embedding_init_method)
        for part in module.modules()
        if isinstance(part, LanguageModelEmbedding)
        for child in part.children()
        if isinstance(child, nn.Embedding) and child.weight.is_meta
    ]
    for child, draw in drawn:
        vars(child)["reset_parameters"] = lambda child=child, draw=draw: draw(child.weight)
    try:
        yield
    finally:
        for child, _ in drawn:
            del vars(child)["reset_parameters"]


def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *positional: Any, **options: Any) -> Any:
    """Return Megatron's FP32 optimizer over the sharded weights of a ``ShardedDataParallel`` model.

    Main weights are FP32 for each compute dtype, so the optimizer needs no copies of its own. The gradient norm and the
    number of zeros count each element of the whole gradient once.

    Args:
        config: ``megatron.core.optimizer.OptimizerConfig``: adam, sgd or muon.
        model_chunks: a list of ``ShardedDataParallel``: one, or the chunks of an interleaved pipeline's stage.
        positional, options: the other arguments of ``megatron.core.optimizer.get_megatron_optimizer``.

    Example:
        model = ShardedDataParallel(transformer_config, ddp_config, gpt_model)
        optimizer = get_megatron_optimizer(optimizer_config, [model])
    """
    if not model_chunks or not all(isinstance(chunk, DataParallelMethods) for chunk in model_chunks):
        raise ConfigError(
            f"get_megatron_optimizer takes a list of ShardedDataParallel, found "
            f"{[type(chunk).__name__ for chunk in model_chunks]}. fix: use megatron.core's function for other models"
        )
    refuse_optimizer(config)
    chunks = [chunk.module for chunk in model_chunks]
    groups = chunks[0].model_groups
    if config.optimizer in MUON_NAMES and (size_of(groups.tensor) > 1 or len(chunks) > 1):
        raise ConfigError(
            f"optimizer={config.optimizer!r} with {size_of(groups.tensor)} tensor-parallel ranks and {len(chunks)} "
            "chunks of a stage: it needs whole matrices of one chunk. fix: 1 of each, or optimizer='adam'"
        )
    from megatron.core import optimizer as megatron_optimizers

    # Megatron's Muon needs whole weights, so only the param groups of Megatron's Adam are used.
    kind = "adam" if config.optimizer in MUON_NAMES else config.optimizer
    plain = dataclasses.replace(config, optimizer=kind, bf16=False, fp16=False, use_distributed_optimizer=False)
    make = megatron_optimizers.get_megatron_optimizer
    made = getattr(make, _ORIGINAL, make)(plain, list(model_chunks), *positional, **options)
    cls: Any = type(made)
    sharded: Any = object.__new__(_optimizer_class(cls))
    vars(sharded).update(vars(made))
    return adopt_optimizer(sharded, chunks, groups, config, scaler=_grad_scaler(config))


def _grad_scaler(config: Any) -> Any:
    """Return Megatron's grad scaler for FP16, constant or dynamic; None for other dtypes."""
    if not config.fp16:
        return None
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


@functools.cache
def _optimizer_class(cls: Any) -> Any:
    return type(f"Sharded{cls.__name__}", (OptimizerMethods, cls), {"__module__": __name__})


# ---------------------------------------------------------------- replace Megatron's engine


def install() -> list[str]:
    """Make Megatron use this engine instead of Megatron-FSDP (version 1 or 2). Call it before building a model.

    Replaces Megatron's adapter classes by subclasses, and four of its functions: ``get_megatron_optimizer``, preparing
    and loading ``fsdp_dtensor`` checkpoints, and the norm of weights. The new functions call Megatron's for models of
    other wrappers. Only names in loaded modules are reassigned: no file changes, ``uninstall`` restores the names, and
    a second call has no effect.

    Returns:
        The names that changed, as "module.name".
    Raises:
        ConfigError: megatron.core cannot be imported.

    Example:
        from megatron_fsdp.megatron import install

        install()  # before the script imports megatron.core
    """
    if _INSTALLED:
        return []
    changed: list[str] = []
    # All replacements are made before the first name changes, so that a failure leaves Megatron unchanged.
    for found, wanted in list(_replacements()):
        changed += assign_everywhere(found, wanted)
        _INSTALLED.append((found, wanted))
    return changed


def uninstall() -> None:
    """Restore Megatron's own classes and functions. Existing models do not change.

    Example:
        install()
        model = Float16Module(config, gpt_model)
        uninstall()
    """
    while _INSTALLED:
        found, wanted = _INSTALLED.pop()
        assign_everywhere(wanted, found)


_INSTALLED: list[tuple[Any, Any]] = []


def _replacements() -> Iterator[tuple[Any, Any]]:
    """Yield each of Megatron's classes and functions with its replacement."""
    try:
        from megatron.core import optimizer as megatron_optimizers
    except ImportError as error:
        raise ConfigError(
            f"install() cannot import megatron.core ({error}). fix: put a checkout of Megatron-LM on PYTHONPATH"
        ) from error
    for cls in _adapter_classes():
        yield cls, _data_parallel_class(cls)  # type: ignore[arg-type]  # classes are hashable
    make = megatron_optimizers.get_megatron_optimizer
    yield make, _in_place_of(make, _make_optimizer)
    # A wheel of megatron.core may lack the package of training scripts, or its dependencies.
    with contextlib.suppress(ImportError):
        scripts = importlib.import_module("megatron.training.checkpointing")
        measure = importlib.import_module("megatron.training.utils").calc_params_l2_norm
        prepare, load = scripts.preprocess_fsdp_dtensor_state_dict, scripts.load_checkpoint
        for theirs, ours in ((prepare, _prepare), (load, _load), (measure, _measure)):
            yield theirs, _in_place_of(theirs, ours)


def _adapter_classes() -> list[type[Any]]:
    """Return Megatron's wrappers for Megatron-FSDP: the subclasses of their base class."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    place = "megatron.core.distributed.fsdp"
    importlib.import_module(f"{place}.mcore_fsdp_adapter")
    return [cls for cls in _BaseDataParallel.__subclasses__() if cls.__module__.startswith(f"{place}.")]


def _in_place_of(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of Megatron: call ``ours``, and ``original`` if that returns NotImplemented."""

    @functools.wraps(original)
    def function(*positional: Any, **options: Any) -> Any:
        found = ours(original, *positional, **options)
        return original(*positional, **options) if found is NotImplemented else found

    setattr(function, _ORIGINAL, original)
    return function


def _ours_among(model: Any) -> list[Any]:
    """Return the chunks of a model (or the model itself) that this engine has wrapped."""
    chunks = model if isinstance(model, (list, tuple)) else [model]
    return [chunk for chunk in chunks if isinstance(chunk, DataParallelMethods)]


def _make_optimizer(_: Any, config: Any, model_chunks: Sequence[Any], *positional: Any, **options: Any) -> Any:
    if not _ours_among(model_chunks):
        return NotImplemented
    return get_megatron_optimizer(config, model_chunks, *positional, **options)


def _prepare(_: Any, args: Any, raw_state_dict: dict[str, Any], model: Any) -> Any:
    # Megatron has already removed the wrapper from the model, so look at the type of the weights.
    if not any(isinstance(value, FlatDTensor) for value in raw_state_dict["model"].values()):
        return NotImplemented
    return lay_out_for_megatron(raw_state_dict, model, is_gated=bool(getattr(args, "swiglu", False)))


def _load(original: Any, ddp_model: Any, *positional: Any, **options: Any) -> Any:
    if not _ours_among(ddp_model):
        return NotImplemented
    try:
        return original(ddp_model, *positional, **options)
    except CheckpointException as error:
        # A checkpoint has one random state per pipeline stage and tensor-parallel rank of the job that saved it.
        if "rng_state.(" not in str(error):
            raise
        raise CheckpointError(
            "the checkpoint has no random states for some ranks of this job: it was saved with other numbers of "
            "pipeline stages or tensor-parallel ranks. fix: --no-load-rng, so that generators start from --seed"
        ) from error


def _measure(_: Any, model: Any, *positional: Any, **options: Any) -> Any:
    own = [chunk.module for chunk in _ours_among(model)]
    return weight_norm(own, own[0].model_groups).item() if own else NotImplemented


def assign_everywhere(found: Any, wanted: Any) -> list[str]:
    """Assign ``wanted`` to every module-level name that is bound to ``found``; return the names, sorted.

    Modules that import a name later get ``wanted`` too. Classes, default arguments and containers that refer to
    ``found`` do not change.
    """
    loaded: list[object] = list(sys.modules.values())
    # A module may have bound another object to this name.
    modules = [module for module in loaded if isinstance(module, ModuleType)]
    places = [(module, name) for module in modules for name, value in list(vars(module).items()) if value is found]
    for module, name in places:
        setattr(module, name, wanted)
    return sorted(f"{module.__name__}.{name}" for module, name in places)
