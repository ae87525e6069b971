"""What Megatron's training loop calls on a data-parallel model, over units of this engine; imports no Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.precision import MixedPrecisionPolicy
from megatron_fsdp.quickstart import fully_shard_model
from megatron_fsdp.quickstart_module import MegatronFSDP

__all__ = ["DataParallelMethods", "refuse_configs", "shard_for_megatron"]

# Field, what it may be, and what to do where it is something else.
_MODEL_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("tensor_model_parallel_size", lambda size: size == 1, "this wrapper is data-parallel only: give 1"),
    ("pipeline_model_parallel_size", lambda size: size == 1, "this wrapper is data-parallel only: give 1"),
    ("expert_model_parallel_size", lambda size: size == 1, "experts are sharded like other weights: give 1"),
    (
        "gradient_accumulation_fusion",
        lambda is_on: not is_on,
        "its kernels write to weight.main_grad, which gathered weights do not have: --no-gradient-accumulation-fusion",
    ),
    ("fp16", lambda is_on: not is_on, "there is no loss scaler: use bf16"),
    ("fp8", lambda recipe: not recipe, "weights are stored in the dtypes of PyTorch: leave it off"),
    ("fp4", lambda recipe: not recipe, "weights are stored in the dtypes of PyTorch: leave it off"),
    ("cuda_graph_impl", lambda kind: kind == "none", "graphs do not record the gathers: give 'none'"),
    ("enable_cuda_graph", lambda is_on: not is_on, "graphs do not record the gathers: leave it off"),
)
_DDP_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("num_distributed_optimizer_instances", lambda number: number == 1, "hybrid sharding is not wired up: give 1"),
    ("outer_dp_sharding_strategy", lambda name: name == "no_shard", "hybrid sharding is not wired up: 'no_shard'"),
    ("fp8_param_gather", lambda is_on: not is_on, "weights are gathered in the dtype they compute in: leave it off"),
    ("delay_wgrad_compute", lambda is_on: not is_on, "gradients are reduced when backward has them: leave it off"),
)


def refuse_configs(config: Any, ddp_config: Any) -> None:
    """Check what Megatron's configs ask for before anything is sharded.

    Args:
        config: ``TransformerConfig``. ddp_config: ``DistributedDataParallelConfig``.
    Raises:
        ConfigError: for all settings that this engine does not do under Megatron, with the cure for each.
    """
    found = [
        f"{field}={getattr(owner, field)!r}: {cure}"
        for owner, rules in ((config, _MODEL_RULES), (ddp_config, _DDP_RULES))
        for field, is_allowed, cure in rules
        if hasattr(owner, field) and not is_allowed(getattr(owner, field))
    ]
    if config.calculate_per_token_loss and ddp_config.average_in_collective:
        found.append(
            "calculate_per_token_loss=True and average_in_collective=True: gradients are either summed and divided by "
            "tokens, or averaged over ranks; give one of them"
        )
    if found:
        raise ConfigError("; ".join(found))


def shard_for_megatron(
    module: nn.Module,
    config: Any,
    ddp_config: Any,
    mesh: DeviceMesh,
    units: Sequence[type[nn.Module] | str],
) -> MegatronFSDP:
    """Shard a model in place as Megatron's configs ask for.

    Gradients are divided by the number of data-parallel ranks, on every rank or in the collective, and only summed
    under ``calculate_per_token_loss``: ``finalize_model_grads`` divides them by the number of tokens.

    Args:
        config, ddp_config: see ``refuse_configs``.
        mesh: one axis over the data-parallel ranks.
        units: classes of modules that become units.
    """
    reduce_dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else None
    return fully_shard_model(
        module,
        list(units) or None,
        ddp_config.data_parallel_sharding_strategy,
        device_mesh=mesh,
        init_model_with_meta_device=getattr(config, "init_model_with_meta_device", False),
        mixed_precision_policy=MixedPrecisionPolicy(
            reduce_dtype=reduce_dtype,
            main_params_dtype=torch.float32 if ddp_config.preserve_fp32_weights else None,
            main_grads_dtype=reduce_dtype,
            # Float16Module casts what goes into the model; positions and masks are nobody's to cast.
            cast_forward_inputs=False,
        ),
        # finalize_model_grads says when gradients are final, with or without no_sync around the microbatches before.
        sync_model_each_microbatch=False,
        report_nan_in_param_grad=ddp_config.check_for_nan_in_grad,
        calculate_per_token_loss=config.calculate_per_token_loss,
    )


class DataParallelMethods:
    """A model of megatron.core whose weights, gradients and optimizer state are sharded over data-parallel ranks.

    It takes the place of ``megatron.core.distributed.DistributedDataParallel`` in a training loop, with the optimizer
    of ``megatron_fsdp.mcore_adapter.get_megatron_optimizer``. ``ddp_config.data_parallel_sharding_strategy`` says what
    is sharded. Parameters between steps are DTensors that keep the attributes Megatron gave them.

    Args:
        config: ``TransformerConfig``. ddp_config: ``DistributedDataParallelConfig``.
        module: the model, on this rank's device; it is sharded in place.
        fsdp_unit_modules: classes of modules that become units. None: layers, and the embedding where it is not tied.
        disable_bucketing: Megatron's; units are not split into buckets.
        pg_collection: Megatron's process groups; ``dp_cp`` is the one to shard over. None: that of parallel_state.
    Raises:
        ConfigError: settings that this engine does not do under Megatron, each with a cure.
    """

    module: MegatronFSDP
    config: Any
    ddp_config: Any
    force_all_reduce: bool

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run all but the last microbatch of a step: as outside of it, gradients are final in ``finish_grad_sync``."""
        with self.module.no_sync():
            yield

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start the gather that the next forward needs first; ``force_sync`` makes compute wait for it as well."""
        self.module.start_param_sync(force_sync=force_sync)

    def synchronize_param_gather(self) -> None:
        """Make compute wait for the gathers that were started."""
        self.module.synchronize_param_gather()

    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing: backward starts each unit's reduction when its last gradient is there."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Make the gradients of all microbatches so far final, and show them as ``.grad``.

        Args:
            force_all_reduce: Megatron's; gradients are always reduced over all ranks.
        """
        self.module.finish_grad_sync()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients, after ``finish_grad_sync``; a 0-d tensor will do."""
        self.module.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients, those of microbatches that are not final yet among them."""
        self.module.zero_grad_buffer()

    def stop_communication(self) -> None:
        """Make compute wait for everything under way, before an evaluation or a checkpoint."""
        self.module.synchronize_gradient_reduce()
        self.module.synchronize_param_gather()

    def broadcast_params(self) -> None:
        """Give all replicas the weights of the first one; see ``MegatronFSDP.broadcast_params``."""
        self.module.broadcast_params()

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the model's state dict with DTensors, for torch.distributed.checkpoint."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the model's state dict with DTensors, the format that Megatron calls fsdp_dtensor.

        Megatron's own ShardedTensors describe equal slices of the first dimension, which shards of a flat buffer are
        not.

        Args:
            prefix: before each name. metadata: Megatron's; the format is the same whatever it says.
        Raises:
            ConfigError: ``sharded_offsets``, which pipeline stages add.
        """
        if sharded_offsets:
            raise ConfigError(
                f"sharded_state_dict(sharded_offsets={sharded_offsets!r}): wanted (); there are no stages"
            )
        return self.state_dict_for_save_checkpoint(prefix=prefix)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load what ``state_dict`` returned, or whole tensors, into the model; return what is missing or unexpected."""
        found = self.module.load_state_dict(state_dict, strict=strict)
        self.module.install_optimized_model_weights()
        return found
