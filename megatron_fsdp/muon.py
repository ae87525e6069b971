"""Helpers for ``megatron_fsdp.Muon``: parameter groups, views of parameters as matrices, and the ownership plan."""

from megatron_fsdp.optim.muon.matrix_views import MatrixView
from megatron_fsdp.optim.muon.muon import explain_ownership
from megatron_fsdp.optim.muon.newton_schulz import COEFFICIENT_SETS
from megatron_fsdp.optim.muon.ownership import OwnershipReport
from megatron_fsdp.optim.muon.param_groups import muon_param_groups

__all__ = [
    "COEFFICIENT_SETS",
    "MatrixView",
    "OwnershipReport",
    "explain_ownership",
    "muon_param_groups",
]
