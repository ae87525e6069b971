"""Helpers for ``megatron_fsdp.Muon``: parameter groups, views of parameters as matrices, and the ownership plan."""

from megatron_fsdp.optim.matrix_views import MatrixView
from megatron_fsdp.optim.muon import explain_ownership
from megatron_fsdp.optim.newton_schulz import COEFFICIENT_SETS
from megatron_fsdp.optim.ownership import OwnershipReport
from megatron_fsdp.optim.param_groups import muon_param_groups

__all__ = [
    "COEFFICIENT_SETS",
    "MatrixView",
    "OwnershipReport",
    "explain_ownership",
    "muon_param_groups",
]
