"""Calls of ``fully_shard`` that are written for Megatron-FSDP's function of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from megatron_fsdp.errors import ConfigError, nearest

__all__ = ["refuse_megatron_call"]

_MEGATRONS = frozenset(
    """optimizer fsdp_unit_modules zero_dp_strategy outer_dp_sharding_strategy device_mesh dp_shard_dim dp_outer_dim
    tp_dim expt_device_mesh hybrid_fsdp_group hybrid_fsdp_expt_group device init_model_with_meta_device
    mixed_precision_policy report_nan_in_param_grad sync_model_each_microbatch overlap_grad_reduce
    overlap_param_gather preproc_state_dict_for_dcp_ckpt calculate_per_token_loss nccl_ub
    fsdp_double_buffer""".split()
)
_OWN = """mesh placements reshard_after_forward mp_policy offload_policy ignored_params granularity grad_divisor
    shard_placement_fn dp_mesh_dims""".split()


def refuse_megatron_call(mesh: object, others: Mapping[str, Any]) -> None:
    """Refuse arguments that ``fully_shard`` does not have.

    Args:
        mesh: its second argument, which in Megatron-FSDP is the optimizer. others: keywords that it does not know.
    Raises:
        ConfigError: they are Megatron-FSDP's; it says what to call.
        TypeError: they are not, as Python itself would raise it.
    """
    found = [f"{name}=" for name in others if name in _MEGATRONS]
    if isinstance(mesh, Optimizer):
        found.insert(0, f"an {type(mesh).__name__} as its second argument")
    if found:
        raise ConfigError(
            f"fully_shard got {found[0]}, as in Megatron-FSDP. Its fully_shard(module, optimizer, ...) is "
            "fully_shard_model_and_optimizer(module, optimizer, ...) here, and its fully_shard_model keeps its name; "
            "this fully_shard is PyTorch's: one call for each unit, with mesh= and mp_policy="
        )
    for name in others:
        raise TypeError(
            f"fully_shard() got an unexpected keyword argument {name!r}; the nearest is {nearest(name, _OWN)!r}"
        )
