"""Outputs that lie in the memory of gathered weights: a unit that returns its weight, or a slice or transpose of it.

The memory goes when the unit reshards. A plain model may use such an output as long as it likes, so it gets memory of
its own: autograd's clone, through which gradients come to the weight.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_fsdp.engine.outputs import map_tensors, watch_output
from megatron_fsdp.engine.unit import Call

__all__ = ["without_weights"]


def without_weights(call: Call, output: Any) -> Any:
    """Return the output of a call, with copies of the tensors that lie in gathered weights which will be released."""
    buffers = [group.gathered for group in call.unit.groups if not group.rests_whole]
    if not buffers or output is None:
        return output
    storages = {buffer.storage.tensor.untyped_storage()._cdata for buffer in buffers}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if _storage_of(tensor) in storages else tensor

    found = map_tensors(copied, output)
    if found is not output and torch.is_grad_enabled():
        watch_output(call, found)
    return found


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of the storage of a tensor; 0 where it has none, as wrappers have."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()._cdata if torch._C._has_storage(local) else 0
