"""The methods of Megatron-LM's data-parallel wrapper, for models that this engine shards. Imports no Megatron."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer.collectives.all_reduce import all_reduce
from dbuffer.collectives.broadcast import broadcast
from dbuffer.dtensor.flat_dtensor import FlatDTensor
from dbuffer.mesh import mesh_axes
from dbuffer_kernels import checksum
from megatron_fsdp.config.fsdp_config import prefetch_elements
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.megatron.checkpoint import (
    check_was_read,
    innermost,
    with_wrapper,
    without_wrappers,
)
from megatron_fsdp.integrations.megatron.fully_shard_model import fully_shard_model
from megatron_fsdp.integrations.megatron.groups import ModelGroups, is_expert, reduce_over
from megatron_fsdp.integrations.megatron.module import MegatronFSDP
from megatron_fsdp.integrations.megatron.names import WholeNames
from megatron_fsdp.integrations.megatron.settings import policy_of
from megatron_fsdp.policy.mesh import buffer_device
from megatron_fsdp.variants.forward_order import share_forward_order

__all__ = ["OWN_FLAGS", "DataParallelMethods", "OwnFlags", "shard_for_megatron"]


@dataclass
class OwnFlags:
    """Flags of the launcher for which Megatron's configs have no field."""

    fsdp_forward_order: bool = False


OWN_FLAGS = OwnFlags()


def _of_model(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def handed_on(self: Any, *positional: Any, **options: Any) -> Any:
        return method(self.module, *positional, **options)

    return handed_on


class DataParallelMethods:
    """A model of megatron.core whose weights, gradients and optimizer state are sharded over data-parallel ranks.

    Use it in a training loop instead of ``megatron.core.distributed.DistributedDataParallel``, with the optimizer of
    ``megatron_fsdp.megatron.get_megatron_optimizer``. ``ddp_config.data_parallel_sharding_strategy`` is the strategy.
    Between steps the parameters are DTensors that keep Megatron's attributes.

    Args:
        config: ``TransformerConfig``.
        ddp_config: ``DistributedDataParallelConfig``.
        module: the model, on this rank's device; it is sharded in place.
        fsdp_unit_modules: classes of modules that become units. None: layers, and an untied embedding.
        disable_bucketing: no effect; units are not split into buckets.
        pg_collection: Megatron's process groups; weights are sharded over ``dp_cp``. None: those of parallel_state.
    Raises:
        ConfigError: settings that this engine does not support under Megatron, with a fix for each.
    """

    module: MegatronFSDP
    config: Any
    ddp_config: Any
    force_all_reduce: bool

    no_sync = _of_model(MegatronFSDP.no_sync)
    start_param_sync = _of_model(MegatronFSDP.start_param_sync)
    synchronize_param_gather = _of_model(MegatronFSDP.synchronize_param_gather)
    start_grad_sync = _of_model(MegatronFSDP.start_grad_sync)
    finish_grad_sync = _of_model(MegatronFSDP.finish_grad_sync)
    scale_gradients = _of_model(MegatronFSDP.scale_gradients)
    zero_grad_buffer = _of_model(MegatronFSDP.zero_grad_buffer)
    broadcast_params = _of_model(MegatronFSDP.broadcast_params)

    def stop_communication(self) -> None:
        """Make compute wait for all pending collectives, before an evaluation or a checkpoint."""
        self.module.synchronize_gradient_reduce()
        self.module.synchronize_param_gather()

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the model's state dict with DTensors under Megatron-FSDP's names, for torch.distributed.checkpoint.

        Layers and experts are numbered as in the whole model. Tensor-parallel ranks save and load their parts of the
        whole tensors, in place.
        """
        state = self.module.state_dict(keep_vars=keep_vars)
        return with_wrapper(self.module.whole_names.outgoing(state), prefix)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the model's state dict with DTensors, the format that Megatron calls fsdp_dtensor.

        Megatron's own ShardedTensors describe equal slices of the first dimension; shards of a flat buffer are not
        equal slices. ``metadata`` does not change the format.

        Raises:
            ConfigError: ``sharded_offsets`` is not empty.
        """
        if sharded_offsets:
            raise ConfigError(
                f"sharded_state_dict(sharded_offsets={sharded_offsets!r}): layers are numbered without them. fix: "
                "leave sharded_offsets out"
            )
        return self.state_dict_for_save_checkpoint(prefix=prefix)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load a state dict of this wrapper, the model or Megatron-FSDP's wrapper, with DTensors or whole tensors.

        Raises:
            CheckpointError: ``strict`` is True and the checkpoint that was read into ``state_dict`` lacks weights.
        """
        check_was_read(self.module, strict=strict)
        own = self.module.whole_names.incoming(without_wrappers(state_dict, self.module))
        found = self.module.load_state_dict(own, strict=strict)
        self.module.install_optimized_model_weights()
        return found


def shard_for_megatron(
    module: nn.Module,
    config: Any,
    ddp_config: Any,
    groups: ModelGroups,
    device_type: str,
    units: Sequence[type[nn.Module] | str],
) -> MegatronFSDP:
    """Shard a model in place with the settings of Megatron's configs.

    Gradients are averaged over the data-parallel ranks. With ``calculate_per_token_loss`` they are summed, and
    ``finalize_model_grads`` divides them by the number of tokens.

    Args:
        module: the model.
        config, ddp_config: Megatron's configs, checked by ``refuse_configs``.
        groups: the process groups over which dense weights and experts are sharded.
        device_type: "cpu" or "cuda".
        units: classes of modules that become units, in addition to modules of experts.
    """
    _check_initialisers(module, config)
    _unfuse(module)
    for parameter in groups.tied(module):
        # In a group of its own, a parameter's shape alone decides where it is cut. Both stages then cut the tied
        # embedding alike, and Megatron sums its gradients shard by shard.
        parameter.fsdp_own_group = True  # type: ignore[attr-defined]
    mesh, expert_mesh = groups.dense_mesh(device_type), groups.expert_mesh(device_type)
    # Parameters on the meta device get their values later, equal on all ranks.
    held = [pair for pair in module.named_parameters() if not pair[1].is_meta]
    _make_alike([pair for pair in held if not is_expert(pair[1])], mesh)
    _make_alike([pair for pair in held if is_expert(pair[1])], expert_mesh or mesh)
    model = fully_shard_model(
        module,
        list(units) or None,
        ddp_config.data_parallel_sharding_strategy,
        ddp_config.outer_dp_sharding_strategy,
        device_mesh=mesh,
        expt_device_mesh=expert_mesh,
        init_model_with_meta_device=getattr(config, "init_model_with_meta_device", False),
        mixed_precision_policy=policy_of(ddp_config),
        # finalize_model_grads makes gradients final, whether or not earlier microbatches ran inside no_sync.
        sync_model_each_microbatch=False,
        # With FP16 gradients may overflow: the grad scaler then skips the step.
        report_nan_in_param_grad=ddp_config.check_for_nan_in_grad and not getattr(config, "fp16", False),
        calculate_per_token_loss=config.calculate_per_token_loss,
        fsdp_double_buffer=getattr(ddp_config, "fsdp_double_buffer", False),
        maxpool_double_buffer=getattr(ddp_config, "megatron_fsdp_max_pool_double_buffer", False),
        nccl_ub=getattr(ddp_config, "nccl_ub", False),
        disable_symmetric_registration=getattr(ddp_config, "disable_symmetric_registration", False),
    )
    model.model_groups = groups
    is_gated = bool(getattr(config, "gated_linear_unit", False))
    for part in (model, innermost(model)):
        # Megatron calls state_dict() of both.
        part.whole_names = WholeNames(part, groups, is_gated=is_gated)  # type: ignore[assignment]
    if not groups.is_data_parallel_only:
        model.checkpoint_refusal = (
            "save_checkpoint and load_checkpoint do not support ranks with different layers, experts or parts of "
            "weights. fix: save sharded_state_dict() of Megatron's wrapper with torch.distributed.checkpoint, or "
            "through Megatron"
        )
    for parameter in groups.tied(model):
        _check_cut(parameter, groups)
    if (num_elements := getattr(ddp_config, "suggested_communication_unit_size", None)) is not None:
        prefetch_elements(model, num_elements)
    if getattr(ddp_config, "fsdp_forward_order", OWN_FLAGS.fsdp_forward_order):
        share_forward_order(model)
    return model


@torch.no_grad()
def _make_alike(found: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
    """Copy the first rank's parameters to every rank of a mesh, in place, if they differ.

    Each rank takes its shard from its own copy of the model, so a sharded model would mix unequal copies. If all copies
    are equal, the check costs one checksum per parameter and one all-reduce.
    """
    if not found:
        return
    device, axes = buffer_device(mesh), mesh_axes(mesh)
    whole = [parameter.detach().contiguous() for _, parameter in found]
    real = [torch.view_as_real(value) if value.is_complex() else value for value in whole]
    checksums = torch.stack([checksum(value, key=0).to(device) for value in real])
    # The complement of x is largest where x is smallest.
    extremes = torch.stack([checksums, ~checksums])
    for axis in axes:
        all_reduce(extremes, axis, "max")
    is_alike = (extremes[0] == ~extremes[1]).tolist()
    differing = [pair for pair, alike in zip(found, is_alike, strict=True) if not alike]
    for _, parameter in differing:
        staged = parameter.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        for axis in axes:
            broadcast(staged, axis)
        parameter.copy_(staged)
    if differing and dist.get_rank() == 0:
        logging.getLogger(__name__).warning(
            "%d parameters differed between data-parallel ranks (the first one is %r). The first rank's values are "
            "used, because a sharded model has one copy of each parameter. Megatron's DDP uses them only with "
            "--data-parallel-random-init: give that flag to compare with it",
            len(differing),
            differing[0][0],
        )


def _check_initialisers(module: nn.Module, config: Any) -> None:
    """Raise ConfigError for layers that ``use_cpu_initialization`` left without values on the meta device."""
    if not (getattr(config, "init_model_with_meta_device", False) and getattr(config, "use_cpu_initialization", False)):
        return
    for name, part in module.named_modules():
        held = [key for key, value in part.named_parameters(recurse=False) if value.is_meta]
        if held and not any(hasattr(part, method) for method in ("reset_parameters", "_reset_parameters")):
            raise ConfigError(
                f"module {name!r} ({type(part).__name__}) has {held} on the meta device without values, and has no "
                "reset_parameters() to initialise them later. fix: leave out --use-cpu-initialization (the layers are "
                "then initialised on the GPU), or leave out --init-model-with-meta-device"
            )


def _check_cut(parameter: nn.Parameter, groups: ModelGroups) -> None:
    """Check that all stages cut a tied embedding into the same rows for the same data-parallel rank."""
    assert groups.embedding is not None
    assert isinstance(parameter, FlatDTensor)
    chunks = parameter.__create_chunk_list__()
    found = [*parameter.shape, *(number for chunk in chunks for number in (*chunk.offsets, *chunk.sizes))]
    # At most one run of rows, which is up to three boxes.
    cut = torch.tensor([len(chunks), *found, *[0] * 24][:24], device=parameter.to_local().device)
    extremes = torch.stack([cut, -cut])
    reduce_over(extremes, groups.embedding, "max")
    if not torch.equal(extremes[0], -extremes[1]):
        raise ConfigError(
            f"the tied embedding of shape {tuple(parameter.shape)} is cut differently on the first and the last "
            f"pipeline stage; this rank has {chunks}. fix: give both stages the same shape and number of data-parallel "
            "ranks, or train with --untie-embeddings-and-output-weights"
        )


def _unfuse(module: nn.Module) -> None:
    """Make linear layers of Megatron and TransformerEngine return weight gradients to autograd.

    The layers' fused kernels add to ``weight.main_grad`` instead, which gathered weights do not have.
    """
    switches = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
    switched = [(part, name) for part in module.modules() for name in switches if getattr(part, name, False) is True]
    for part, name in switched:
        setattr(part, name, False)
    if switched:
        logging.getLogger(__name__).info(
            "gradient_accumulation_fusion is off in %d layers: their kernels add to weight.main_grad, which gathered "
            "weights do not have",
            len(switched),
        )
