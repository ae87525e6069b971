"""Megatron-style FSDP on flat distributed buffers.

Names are imported on first use: ``from megatron_fsdp import fully_shard`` loads only the modules that it needs.
"""

# Before anything else of this package is imported: NVIDIA's distribution installs a file of this name over it.
__distribution__ = "megatron-fsdp-dbuffer"
__version__ = "0.1.0"

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from megatron_fsdp.installation import check_neighbour as _check_neighbour

if TYPE_CHECKING:
    from dbuffer import DBufferError, LayoutError, MeshError, PlacementError, ReadError, StorageError
    from megatron_fsdp.api import fully_shard, microbatch, no_sync, replicate, share_comm_ctx
    from megatron_fsdp.build.no_shard import fsdp_no_shard
    from megatron_fsdp.checkpoint.api import load_checkpoint, save_checkpoint
    from megatron_fsdp.checkpoint.async_save import SaveHandle
    from megatron_fsdp.checkpoint.manifest import DamagedCheckpointError
    from megatron_fsdp.checkpoint.model_state import full_state_dict
    from megatron_fsdp.checkpoint.safetensors_model import export_safetensors, import_safetensors
    from megatron_fsdp.checkpoint.series import CheckpointSeries
    from megatron_fsdp.config.flags import add_megatron_fsdp_args
    from megatron_fsdp.config.fsdp_config import FsdpConfig
    from megatron_fsdp.engine.fused_linear import expert_matmul
    from megatron_fsdp.engine.param_group import ParameterGroup as ParameterGroup
    from megatron_fsdp.errors import (
        AgreementError,
        CheckpointError,
        ConfigError,
        FsdpError,
        GradientScaleError,
        NonfiniteGradientError,
        OwnershipError,
        StateError,
        TransferError,
    )
    from megatron_fsdp.integrations.megatron.fully_shard_model import fully_shard_model as fully_shard_model
    from megatron_fsdp.lifecycle.module import (
        FSDPModule,
        GradientReductionHandle,
        UnshardHandle,
        register_fsdp_forward_method,
    )
    from megatron_fsdp.lifecycle.module import FsdpModule as FsdpModule
    from megatron_fsdp.meta_init import materialize
    from megatron_fsdp.observability.checksum import checksum, unit_checksums
    from megatron_fsdp.observability.gradient_scale import GradientScale, check_gradient_scale
    from megatron_fsdp.observability.timeline import Timeline
    from megatron_fsdp.observability.watch import Watch
    from megatron_fsdp.optim.adamw.adamw import AdamW
    from megatron_fsdp.optim.grad_norm import clip_grad_norm_
    from megatron_fsdp.optim.muon.muon import Muon
    from megatron_fsdp.optim.nonfinite import check_gradients
    from megatron_fsdp.optim.stock.sharded_optimizer import fully_shard_optimizer
    from megatron_fsdp.planning.report import Report, explain
    from megatron_fsdp.policy.mesh import DataParallelMeshDims
    from megatron_fsdp.policy.offload import CPUOffloadPolicy, OffloadPolicy
    from megatron_fsdp.policy.precision import MixedPrecisionPolicy
    from megatron_fsdp.policy.strategy import Placements
    from megatron_fsdp.transfer.bucket import BucketEntry, WeightBucket, apply_bucket
    from megatron_fsdp.transfer.delta import DeltaBucket, DeltaReport, DeltaStream, apply_delta, remember_weights
    from megatron_fsdp.transfer.layouts import TransferLayout
    from megatron_fsdp.transfer.local_shards import LocalShard, local_shards
    from megatron_fsdp.transfer.reshard import reshard_
    from megatron_fsdp.transfer.send import receive_weights, send_weights
    from megatron_fsdp.transfer.stream import WeightStream, weight_stream
    from megatron_fsdp.transfer.stream_plan import StreamReport
    from megatron_fsdp.transfer.transfer_plan import TransferPlan, plan_transfer
    from megatron_fsdp.transfer.versions import weight_version
    from megatron_fsdp.transfer.weight_layout import weight_layout
    from megatron_fsdp.uneven.join import JoinedBatches, join
    from megatron_fsdp.uneven.unsharded import unsharded

_check_neighbour(__file__)

_HOMES = {
    "api": "fully_shard microbatch no_sync replicate share_comm_ctx",
    "build.no_shard": "fsdp_no_shard",
    "checkpoint.api": "load_checkpoint save_checkpoint",
    "checkpoint.async_save": "SaveHandle",
    "checkpoint.manifest": "DamagedCheckpointError",
    "checkpoint.model_state": "full_state_dict",
    "checkpoint.safetensors_model": "export_safetensors import_safetensors",
    "checkpoint.series": "CheckpointSeries",
    "config.flags": "add_megatron_fsdp_args",
    "config.fsdp_config": "FsdpConfig",
    "dbuffer": "DBufferError LayoutError MeshError PlacementError ReadError StorageError",
    "engine.fused_linear": "expert_matmul",
    "engine.param_group": "ParameterGroup",
    "errors": (
        "AgreementError CheckpointError ConfigError FsdpError GradientScaleError NonfiniteGradientError OwnershipError "
        "StateError TransferError"
    ),
    "integrations.megatron.fully_shard_model": "fully_shard_model",
    "lifecycle.module": "FSDPModule FsdpModule GradientReductionHandle UnshardHandle register_fsdp_forward_method",
    "meta_init": "materialize",
    "observability.checksum": "checksum unit_checksums",
    "observability.gradient_scale": "GradientScale check_gradient_scale",
    "observability.timeline": "Timeline",
    "observability.watch": "Watch",
    "optim.adamw.adamw": "AdamW",
    "optim.grad_norm": "clip_grad_norm_",
    "optim.muon.muon": "Muon",
    "optim.nonfinite": "check_gradients",
    "optim.stock.sharded_optimizer": "fully_shard_optimizer",
    "planning.report": "Report explain",
    "policy.mesh": "DataParallelMeshDims",
    "policy.offload": "CPUOffloadPolicy OffloadPolicy",
    "policy.precision": "MixedPrecisionPolicy",
    "policy.strategy": "Placements",
    "transfer.bucket": "BucketEntry WeightBucket apply_bucket",
    "transfer.delta": "DeltaBucket DeltaReport DeltaStream apply_delta remember_weights",
    "transfer.layouts": "TransferLayout",
    "transfer.local_shards": "LocalShard local_shards",
    "transfer.reshard": "reshard_",
    "transfer.send": "receive_weights send_weights",
    "transfer.stream": "WeightStream weight_stream",
    "transfer.stream_plan": "StreamReport",
    "transfer.transfer_plan": "TransferPlan plan_transfer",
    "transfer.versions": "weight_version",
    "transfer.weight_layout": "weight_layout",
    "uneven.join": "JoinedBatches join",
    "uneven.unsharded": "unsharded",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, on its first use."""
    home = _HOME_OF.get(name)
    if home is not None:
        module = importlib.import_module(home if home == "dbuffer" else f"{__name__}.{home}")
        value = getattr(module, name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})


__all__ = [
    "AdamW", "AgreementError", "BucketEntry", "CPUOffloadPolicy", "CheckpointError", "CheckpointSeries",
    "ConfigError", "DBufferError", "DamagedCheckpointError", "DataParallelMeshDims", "DeltaBucket", "DeltaReport",
    "DeltaStream", "FSDPModule", "FsdpConfig", "FsdpError", "GradientReductionHandle", "GradientScale",
    "GradientScaleError", "JoinedBatches", "LayoutError", "LocalShard", "MeshError", "MixedPrecisionPolicy", "Muon",
    "NonfiniteGradientError", "OffloadPolicy", "OwnershipError", "PlacementError", "Placements", "ReadError",
    "Report", "SaveHandle", "StateError", "StorageError", "StreamReport", "Timeline", "TransferError",
    "TransferLayout", "TransferPlan", "UnshardHandle", "Watch", "WeightBucket", "WeightStream",
    "add_megatron_fsdp_args", "apply_bucket", "apply_delta", "check_gradient_scale", "check_gradients", "checksum",
    "clip_grad_norm_", "expert_matmul", "explain", "export_safetensors", "fsdp_no_shard", "full_state_dict",
    "fully_shard", "fully_shard_optimizer", "import_safetensors", "join", "load_checkpoint", "local_shards",
    "materialize", "microbatch", "no_sync", "plan_transfer", "receive_weights", "register_fsdp_forward_method",
    "remember_weights", "replicate", "reshard_", "save_checkpoint", "send_weights", "share_comm_ctx",
    "unit_checksums", "unsharded", "weight_layout", "weight_stream", "weight_version",
]  # fmt: skip
