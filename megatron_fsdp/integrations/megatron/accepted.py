"""Arguments of Megatron-FSDP's one-call form that are accepted and change nothing here, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_fsdp.errors import ConfigError, nearest

__all__ = ["ACCEPTED", "Accepted", "notices_for"]


class Accepted(NamedTuple):
    """One argument of Megatron-FSDP's, its default, which needs no notice, and why another value does nothing here."""

    name: str
    default: bool | None
    reason: str


# Rows stay rows: the formatter would give every field a line of its own.
# fmt: off
ACCEPTED = (
    Accepted("tp_dim", None, "parameters that are tensor-parallel DTensors say themselves over which axes"),
    Accepted("hybrid_fsdp_group", None, "the groups of outer and inner axis come from device_mesh"),
    Accepted("hybrid_fsdp_expt_group", None, "the groups of outer and inner axis come from expt_device_mesh"),
    Accepted("fsdp_group_ag", None, "gathers and reductions have a communicator each in any case"),
    Accepted("expt_fsdp_group_ag", None, "gathers and reductions have a communicator each in any case"),
    Accepted("overlap_grad_reduce", True, "reductions always overlap with backward"),
    Accepted("overlap_param_gather", True, "gathers always overlap with compute"),
    Accepted("preproc_state_dict_for_dcp_ckpt", True, "state dicts hold DTensors of true shapes and need no "
             "preparation for torch.distributed.checkpoint"),
    Accepted("average_in_collective", False, "sums are reduced, and the division is part of the accumulation"),
    Accepted("disable_bucketing", False, "units are the buckets"),
    Accepted("keep_fp8_transpose_cache", False, "FP8 weights need Transformer Engine, which is not used"),
    Accepted("fsdp_db_use_persist_buf_on_alloc_fail", False, "units that fit no buffer always have one of their own"),
    Accepted("enable_fine_grained_param_gather", False, "a unit is gathered as a whole; make smaller units"),
    Accepted("cuda_graph_mode", False, "nothing is captured"),
)
# fmt: on


def notices_for(given: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """Return one line, with the reason, for every argument whose value is not the default and does nothing.

    Args:
        given: arguments that are not acted on. known: names of those that are, to name the nearest of all.
    Raises:
        ConfigError: an argument that Megatron-FSDP does not have.
    """
    by_name = {each.name: each for each in ACCEPTED}
    for name in given.keys() - by_name.keys():
        meant = nearest(name, [*by_name, *known])
        raise ConfigError(f"fully_shard_model has no argument {name!r}; the nearest is {meant!r}")
    return [
        f"fully_shard_model({name}={value!r}) does nothing here: {by_name[name].reason}"
        for name, value in given.items()
        if value != by_name[name].default
    ]
