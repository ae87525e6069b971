"""Compares the flat AdamW with ``torch.optim.AdamW`` over the same sharded parameters."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import fully_shard_optimizer
from megatron_fsdp.engine.param_group import ParameterGroup, group_of_parameter

__all__ = ["differing_state", "groups_of", "torch_adamw", "two_groups"]


def torch_adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Make the oracle: torch's AdamW, one parameter after the other."""
    return fully_shard_optimizer(torch.optim.AdamW(groups, foreach=False, **options))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split the trainable parameters in the usual way: weight decay for matrices, none for vectors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1, "betas": (0.8, 0.95)},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def differing_state(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> list[str]:
    """Compare two optimizers' state dicts entry by entry: keys, types, rows and bits."""
    found, wanted = mine.state_dict(), theirs.state_dict()
    wrong = differing_values(found["state"], wanted["state"])
    for group, other in zip(wanted["param_groups"], found["param_groups"], strict=True):
        wrong += [] if group | {"foreach": None} == other else [f"{group} {other}"]
    return wrong


def differing_values(found: dict[Any, dict[str, Any]], wanted: dict[Any, dict[str, Any]]) -> list[str]:
    """Compare the state of two optimizers: keys, types, rows and bits."""
    assert found.keys() == wanted.keys()
    wrong = []
    for key, values in wanted.items():
        assert list(found[key]) == list(values)
        for name, value in values.items():
            other = found[key][name]
            assert type(other) is type(value)
            if value is None:
                continue
            assert other.dtype is value.dtype
            if isinstance(value, DTensor):
                assert list(map(repr, other.placements)) == list(map(repr, value.placements))
                same = torch.equal(other.full_tensor(), value.full_tensor())
            else:
                same = torch.equal(other, value) and other.device == value.device
            wrong += [] if same else [f"{key}: {name}"]
    return wrong


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    """Return the parameter groups of a sharded model."""
    groups = {id(group): group for p in model.parameters() if (group := group_of_parameter(p)) is not None}
    return list(groups.values())
