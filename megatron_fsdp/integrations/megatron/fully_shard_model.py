"""fully_shard_model: shard a whole model in one call, with Megatron-FSDP's arguments."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from megatron_fsdp.api import fully_shard
from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import ConfigError, FsdpError, nearest
from megatron_fsdp.integrations.megatron.groups import is_expert
from megatron_fsdp.integrations.megatron.module import MegatronFSDP, as_megatron
from megatron_fsdp.lifecycle.make_param_group import set_divisor, set_reduction
from megatron_fsdp.lifecycle.module import FSDPModule, unit_of
from megatron_fsdp.meta_init import materialize
from megatron_fsdp.optim.stock.sharded_optimizer import fully_shard_optimizer
from megatron_fsdp.policy.mesh import buffer_device, sharding_target
from megatron_fsdp.policy.precision import MixedPrecisionPolicy, as_policy

__all__ = ["ACCEPTED", "Accepted", "fully_shard_model", "fully_shard_model_and_optimizer"]

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Accepted(NamedTuple):
    """One argument of Megatron-FSDP: its default, and the reason why another value does nothing here."""

    name: str
    default: bool | None
    reason: str


# One row per argument; the formatter would split each row over several lines.
# fmt: off
ACCEPTED = (
    Accepted("tp_dim", None, "tensor-parallel DTensors name their mesh dimensions themselves"),
    Accepted("hybrid_fsdp_group", None, "device_mesh gives the groups of its dimensions"),
    Accepted("hybrid_fsdp_expt_group", None, "expt_device_mesh gives the groups of its dimensions"),
    Accepted("fsdp_group_ag", None, "all-gathers and reductions always have separate communicators"),
    Accepted("expt_fsdp_group_ag", None, "all-gathers and reductions always have separate communicators"),
    Accepted("overlap_grad_reduce", True, "reductions always overlap with backward"),
    Accepted("overlap_param_gather", True, "all-gathers always overlap with compute"),
    Accepted("preproc_state_dict_for_dcp_ckpt", True, "state dicts hold DTensors of true shapes and need no "
             "preparation for torch.distributed.checkpoint"),
    Accepted("average_in_collective", False, "the engine reduces sums and divides when it accumulates"),
    Accepted("disable_bucketing", False, "units are the buckets"),
    Accepted("keep_fp8_transpose_cache", False, "FP8 weights need Transformer Engine, which is not used"),
    Accepted("fsdp_db_use_persist_buf_on_alloc_fail", False, "a unit that fits no slot always gets memory of its own"),
    Accepted("enable_fine_grained_param_gather", False, "a unit is gathered as a whole; make smaller units"),
    Accepted("cuda_graph_mode", False, "nothing is captured"),
)
# fmt: on


def fully_shard_model(
    module: nn.Module,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    zero_dp_strategy: int | str = 3,
    outer_dp_sharding_strategy: int | str = 0,
    device_mesh: DeviceMesh | None = None,
    *,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    device: torch.device | str | int | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: Any = None,
    sync_model_each_microbatch: bool = True,
    report_nan_in_param_grad: bool = False,
    calculate_per_token_loss: bool = False,
    use_decoupled_grad: bool = False,
    fsdp_double_buffer: bool = False,
    maxpool_double_buffer: bool = False,
    nccl_ub: bool = False,
    disable_symmetric_registration: bool = False,
    **accepted: Any,
) -> MegatronFSDP:
    """Shard a model in place with the arguments of Megatron-FSDP's ``fully_shard_model``.

    Args:
        module: the model. Modules that ``fully_shard`` was called on before keep their units.
        fsdp_unit_modules: the modules that become units: classes, class names, or import paths
            ("package.file.Class"). None: the whole model is one unit, so gathers do not overlap with compute.
        zero_dp_strategy: 0 to 3, or "no_shard", "optim", "optim_grads", "optim_grads_params".
        outer_dp_sharding_strategy: the strategy along ``dp_outer_dim``. 0 or "no_shard": replicate. 1 or "optim": shard
            main weights and optimizer state along this axis too.
        device_mesh: data-parallel device mesh. None: one axis over all ranks.
        dp_shard_dim, dp_outer_dim: names of the axes of ``device_mesh`` to shard over and to replicate over; flattened
            axes are allowed. None for both: the mesh has one axis, or the axes (outer, inner).
        expt_device_mesh: the mesh for experts: modules all of whose parameters have Megatron's mark ``allreduce =
            False``. It has the same axis names. Gradients of experts are divided by the size of the dense mesh.
        device: the mesh's device, to which the model moves. Without a mesh it selects the device type.
        init_model_with_meta_device: initialise parameters on the meta device. False: leave them for a checkpoint.
        mixed_precision_policy: ``MixedPrecisionPolicy`` of this package or of Megatron-FSDP. None: FP32 main weights.
        sync_model_each_microbatch: gradients are final after each backward. False: gradients are final after
            ``finish_grad_sync()`` or after the backward inside ``sync()``.
        report_nan_in_param_grad: raise FsdpError in the backward in which a reduced gradient is NaN. Replaces a
            function set by ``set_all_reduce_hook``, and makes the host wait for each reduction.
        calculate_per_token_loss: sum gradients over ranks instead of averaging them; see ``scale_gradients``.
        fsdp_double_buffer, maxpool_double_buffer, nccl_ub, disable_symmetric_registration: settings of the memory
            slots, see ``FSDPModule.set_slot_pool``: slots for units of equal size, slots as large as the largest
            unit, and registration with NCCL.
        accepted: Megatron-FSDP's other arguments. They have no effect here; this module's logger warns with the reason
            if one differs from its default.
    Returns:
        ``module``, whose class is now a ``MegatronFSDP``.
    Raises:
        ConfigError: an argument does not fit this model or mesh, or is unknown to Megatron-FSDP.

    Example:
        model = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy="optim_grads_params")
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
        model(batch).square().mean().backward()
    """
    if isinstance(module, MegatronFSDP):
        raise ConfigError(f"{type(module).__name__} is sharded already. fix: call fully_shard_model once per model")
    if use_decoupled_grad:
        raise ConfigError("use_decoupled_grad=True: gradients are in .grad (main_grads_dtype). fix: leave it out")
    lines = _notices_for(accepted)
    mesh = _data_parallel_mesh(_mesh_on(device_mesh, device), dp_shard_dim, dp_outer_dim)
    strategy = _strategy_name("zero_dp_strategy", zero_dp_strategy, _STRATEGIES)
    outer = _strategy_name("outer_dp_sharding_strategy", outer_dp_sharding_strategy, _STRATEGIES[:2])
    config = FsdpConfig(
        data_parallel_sharding_strategy=strategy,
        outer_dp_sharding_strategy=outer,
        fsdp_double_buffer=fsdp_double_buffer,
        megatron_fsdp_max_pool_double_buffer=maxpool_double_buffer,
        nccl_ub=nccl_ub,
        disable_symmetric_registration=disable_symmetric_registration,
    )
    policy = _policy(mixed_precision_policy)
    options: dict[str, Any] = {"placements": config.fully_shard_kwargs(mesh)["placements"], "mp_policy": policy}
    if fsdp_unit_modules is None:
        lines.append("fully_shard_model(fsdp_unit_modules=None): the whole model is one unit, so nothing overlaps")
    expert_mesh = expt_device_mesh and _data_parallel_mesh(expt_device_mesh, dp_shard_dim, dp_outer_dim)
    _make_units(module, fsdp_unit_modules or (), mesh, expert_mesh, options)
    if init_model_with_meta_device:
        materialize(module)
    config.apply(module)
    for group in (group for unit in units_below(module) for group in unit.groups):
        if calculate_per_token_loss:
            set_divisor(group, 1.0)
        if report_nan_in_param_grad:
            set_reduction(group, hook=functools.partial(_report_nan, weakref.ref(group)))
    model = as_megatron(module)
    model.set_model_auto_sync(sync_model_each_microbatch)
    for line in lines if not dist.is_initialized() or dist.get_rank() == 0 else ():
        logging.getLogger(__name__).warning(line)
    return model


def fully_shard_model_and_optimizer(
    module: nn.Module, optimizer: Optimizer, **options: Any
) -> tuple[MegatronFSDP, Optimizer]:
    """Shard a model and its optimizer, like Megatron-FSDP's ``fully_shard``.

    Args:
        module: the model.
        optimizer: an optimizer over the model's parameters that has not stepped. Its param groups get the sharded
            parameters.
        options: the arguments of ``fully_shard_model``.
    Returns:
        The model and the sharded optimizer.
    Raises:
        ConfigError: the optimizer has stepped, or as in ``fully_shard_model``.

    Example:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        model, optimizer = fully_shard_model_and_optimizer(model, optimizer, fsdp_unit_modules=[Block])
        model(batch).square().mean().backward()
    """
    if optimizer.state:
        raise ConfigError(
            "fully_shard_model_and_optimizer: the optimizer has stepped, so its state has the shapes of whole "
            "parameters. fix: shard the model with a new optimizer, then call optimizer.load_state_dict"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    model = fully_shard_model(module, **options)
    sharded = dict(module.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(old)]] if id(old) in names else old for old in group["params"]]
    return model, fully_shard_optimizer(optimizer)


def _notices_for(given: Mapping[str, Any]) -> list[str]:
    """Return one line, with the reason, for each argument that has no effect and differs from its default."""
    by_name = {each.name: each for each in ACCEPTED}
    for name in given.keys() - by_name.keys():
        meant = nearest(name, [*by_name, *list(inspect.signature(fully_shard_model).parameters)[:-1]])
        raise ConfigError(f"fully_shard_model has no argument {name!r}. fix: give {meant!r}, the most similar one")
    return [
        f"fully_shard_model({name}={value!r}) does nothing here: {by_name[name].reason}"
        for name, value in given.items()
        if value != by_name[name].default
    ]


# ---------------------------------------------------------------- the mesh


def _mesh_on(mesh: DeviceMesh | None, device: torch.device | str | int | None) -> DeviceMesh:
    """Return the given mesh, or a mesh of one axis over all ranks on the given device."""
    named = f"cuda:{device}" if isinstance(device, int) else device
    wanted = None if named is None else torch.device(named)
    if mesh is None and wanted is not None and dist.is_initialized():
        mesh = init_device_mesh(wanted.type, (dist.get_world_size(),))
    elif mesh is None:
        mesh = sharding_target(None, None, None).mesh
    found = buffer_device(mesh)
    if wanted is not None and (wanted.type != found.type or wanted.index not in (None, found.index)):
        raise ConfigError(
            f"device={device!r}, but this rank's device on the mesh is {found}. fix: pass a mesh of {wanted.type!r}"
        )
    return mesh


def _data_parallel_mesh(mesh: DeviceMesh, shard: str | None, outer: str | None) -> DeviceMesh:
    """Return the part of a mesh that is data-parallel: (outer, shard) or (shard)."""
    if shard is None and outer is None:
        if mesh.ndim > 2:
            names = mesh.mesh_dim_names or mesh.ndim
            raise ConfigError(
                f"device_mesh has axes {names}. fix: name the data-parallel axes with dp_shard_dim= and dp_outer_dim="
            )
        return mesh
    if shard is None:
        raise ConfigError(f"dp_outer_dim={outer!r} without dp_shard_dim. fix: name the inner axis with dp_shard_dim=")
    names = (shard,) if outer is None else (outer, shard)
    if tuple(mesh.mesh_dim_names or ()) == names:
        return mesh
    try:
        return mesh[names if outer is not None else shard]
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"device_mesh has axes {mesh.mesh_dim_names}, but dp_outer_dim={outer!r} and dp_shard_dim={shard!r}: "
            f"{error}. fix: name axes of the mesh"
        ) from error


def _strategy_name(argument: str, value: int | str, names: Sequence[str]) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    if value in names:
        return str(value)
    raise ConfigError(f"{argument}={value!r}. fix: give 0 to {len(names) - 1}, or one of {', '.join(names)}")


# ---------------------------------------------------------------- the units


def _make_units(
    model: nn.Module,
    wanted: Sequence[type[nn.Module] | str],
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    options: dict[str, Any],
) -> None:
    experts = set() if expert_mesh is None else {id(expert) for expert in _experts(model)}
    if expert_mesh is not None:
        _check_experts(model, experts)
    for unit in _units_wanted(model, wanted, experts):
        if not (experts and _is_expert(unit)):
            fully_shard(unit, mesh, **options)
            continue
        fully_shard(unit, expert_mesh, **options)
        # The exact divisor: the quotient of both mesh sizes, times the expert mesh's size, could be rounded.
        for group in unit_of(unit).groups:
            set_divisor(group, float(mesh.size()))
    if not isinstance(model, FSDPModule):
        fully_shard(model, mesh, **options)


def _units_wanted(
    model: nn.Module, wanted: Sequence[type[nn.Module] | str], experts: Container[int]
) -> list[nn.Module]:
    """Return the modules that become units, children first, without modules that already belong to a unit."""
    entries = (wanted,) if isinstance(wanted, (str, type)) else wanted
    modules = list(model.modules())
    for entry in entries:
        if not any(_is_instance(module, entry) for module in modules):
            classes = sorted({type(module).__name__ for module in modules})
            raise ConfigError(
                f"fsdp_unit_modules names {entry!r}, but the model has no such module. fix: name some of its classes: "
                f"{classes}"
            )
    taken = {id(below) for module in modules if isinstance(module, FSDPModule) for below in module.modules()}
    return [
        module
        for module in reversed(modules)
        if id(module) not in taken and (id(module) in experts or any(_is_instance(module, entry) for entry in entries))
    ]


def _is_instance(module: nn.Module, entry: type[nn.Module] | str) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    return any(entry in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for cls in type(module).__mro__)


def _experts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that are experts and can be called."""
    if _is_expert(module) and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield module
        return
    for child in module.children():
        yield from _experts(child)


def _is_expert(module: nn.Module) -> bool:
    """Return whether all parameters of a module have Megatron's mark of experts."""
    parameters = list(module.parameters())
    return bool(parameters) and all(is_expert(parameter) for parameter in parameters)


def _check_experts(model: nn.Module, experts: Container[int]) -> None:
    """Raise ConfigError if a module directly holds expert and dense weights: it is gathered over one mesh."""
    taken = {id(below) for module in model.modules() if id(module) in experts for below in module.modules()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(module) not in taken and is_expert(parameter):
                full = f"{path}.{name}".lstrip(".")
                raise ConfigError(
                    f"parameter {full!r} of a {type(module).__name__} is marked as an expert's (allreduce = False), "
                    "but the module's other parameters are not. fix: put experts into a module of their own, which is "
                    "then sharded over expt_device_mesh"
                )


def _policy(given: Any) -> MixedPrecisionPolicy:
    """Convert a policy of PyTorch or Megatron-FSDP; the latter sets no compute dtype."""
    if given is None:
        return MixedPrecisionPolicy(main_params_dtype=torch.float32)
    if hasattr(given, "grad_comm_dtype"):
        main_grads = given.main_grads_dtype
        return MixedPrecisionPolicy(
            reduce_dtype=given.grad_comm_dtype or main_grads,
            main_params_dtype=given.main_params_dtype,
            main_grads_dtype=main_grads,
        )
    return as_policy(given)


def _report_nan(reference: weakref.ref[ParameterGroup], gradient: torch.Tensor) -> None:
    group = reference()
    if group is not None and bool(gradient.isnan().any()):
        names = ", ".join(map(repr, group.parameters))
        raise FsdpError(
            f"unit {group.name!r}: a reduced gradient of one of {names} is NaN. fix: find the operation with "
            "torch.autograd.set_detect_anomaly(True)"
        )
