"""Megatron-style FSDP on flat distributed buffers."""

# Before anything else of this package is imported: NVIDIA's distribution installs a file of this name over it.
__distribution__ = "megatron-fsdp-dbuffer"

from megatron_fsdp.adamw import AdamW
from megatron_fsdp.api import fully_shard, microbatch, no_sync, replicate, share_comm_ctx
from megatron_fsdp.arguments import add_megatron_fsdp_args
from megatron_fsdp.audit import Audit
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint_background import SaveHandle
from megatron_fsdp.checkpoint_full import full_state_dict
from megatron_fsdp.checkpoint_manifest import DamagedCheckpointError
from megatron_fsdp.checkpoint_series import CheckpointSeries
from megatron_fsdp.config import FsdpConfig
from megatron_fsdp.errors import (
    AgreementError,
    CheckpointError,
    ConfigError,
    FsdpError,
    NonfiniteGradientError,
    OwnershipError,
    StateError,
)
from megatron_fsdp.exclusion import fsdp_no_shard
from megatron_fsdp.flat_optimizer import FlatOptimizer
from megatron_fsdp.flat_parameters import flat_parameters
from megatron_fsdp.fused_linear import expert_matmul
from megatron_fsdp.huggingface import prepare_model
from megatron_fsdp.installation import check_neighbour as _check_neighbour
from megatron_fsdp.lanes import record_transcript
from megatron_fsdp.materialize import materialize
from megatron_fsdp.meshes import DataParallelMeshDims
from megatron_fsdp.module import FsdpModule, UnshardHandle, register_fsdp_forward_method
from megatron_fsdp.nonfinite import check_gradients
from megatron_fsdp.offload import CPUOffloadPolicy, OffloadPolicy
from megatron_fsdp.optim import MatrixView, Muon, MuonOptions, muon_param_groups
from megatron_fsdp.optimizer import clip_grad_norm_, fully_shard_optimizer
from megatron_fsdp.parameter_group import ParameterGroup
from megatron_fsdp.precision import MixedPrecisionPolicy
from megatron_fsdp.quickstart import fully_shard_model, fully_shard_model_and_optimizer
from megatron_fsdp.quickstart_module import MegatronFSDP
from megatron_fsdp.report import Report, explain
from megatron_fsdp.safetensors_model import export_safetensors, import_safetensors
from megatron_fsdp.strategy import Placements
from megatron_fsdp.timeline import Timeline
from megatron_fsdp.watch import Watch

FSDPModule = FsdpModule

_check_neighbour(__file__)

__all__ = [
    "AdamW",
    "AgreementError",
    "Audit",
    "CPUOffloadPolicy",
    "CheckpointError",
    "CheckpointSeries",
    "ConfigError",
    "DamagedCheckpointError",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatOptimizer",
    "FsdpConfig",
    "FsdpError",
    "FsdpModule",
    "MatrixView",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "Muon",
    "MuonOptions",
    "NonfiniteGradientError",
    "OffloadPolicy",
    "OwnershipError",
    "ParameterGroup",
    "Placements",
    "Report",
    "SaveHandle",
    "StateError",
    "Timeline",
    "UnshardHandle",
    "Watch",
    "add_megatron_fsdp_args",
    "check_gradients",
    "clip_grad_norm_",
    "expert_matmul",
    "explain",
    "export_safetensors",
    "flat_parameters",
    "fsdp_no_shard",
    "full_state_dict",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_model_and_optimizer",
    "fully_shard_optimizer",
    "import_safetensors",
    "load_checkpoint",
    "materialize",
    "microbatch",
    "muon_param_groups",
    "no_sync",
    "prepare_model",
    "record_transcript",
    "register_fsdp_forward_method",
    "replicate",
    "save_checkpoint",
    "share_comm_ctx",
]
