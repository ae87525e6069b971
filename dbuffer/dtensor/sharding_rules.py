"""Refuses operators that reach a sharded tensor without asking its class.

Inside of ``torch.func`` transforms (``vmap``, ``grad``, ``vjp``, ``functionalize``) PyTorch wraps the tensor, and does
not call ``__torch_function__``. DTensor's dispatch then runs the operator by its sharding rules, which do not know the
rows of a ``RaggedShard``: the result would be a plain ``Shard(0)`` of other rows, without an error
(docs/design/facade.md, "Limits").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dbuffer.dtensor.distribution import RaggedShard

__all__ = ["refuse_rules_of_slices"]

# They make another tensor on the same memory.
_SAME_ROWS = frozenset([torch.ops.aten.detach.default, torch.ops.aten.alias.default])
# Autograd adds up gradients in place.
_IN_PLACE = frozenset([torch.ops.aten.add_.Tensor])


def refuse_rules_of_slices() -> None:
    """Make DTensor's dispatch refuse operators whose output it would lay out without the rows, from now on.

    PyTorch asks a rule once for each operator and layout, and then keeps the answer. A refusal is not kept.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    checked = _check_rows(propagator.propagate_op_sharding_non_cached)
    cache = type(propagator.propagate_op_sharding)
    propagator.propagate_op_sharding_non_cached, propagator.propagate_op_sharding = checked, cache(checked)


def _check_rows(propagate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def propagate_or_refuse(schema: Any) -> Any:
        ragged = [spec for spec in schema.args_spec if any(isinstance(each, RaggedShard) for each in spec.placements)]
        if not ragged:
            return propagate(schema)
        is_same = schema.op in _SAME_ROWS
        if not is_same and (schema.op not in _IN_PLACE or any(spec != ragged[0] for spec in schema.args_spec)):
            raise NotImplementedError(
                f"{schema.op}: the operator reached a sharded tensor of shape {tuple(ragged[0].shape)} without asking "
                "its class, as inside of torch.func transforms (vmap, grad, vjp). PyTorch's sharding rules do not know "
                "which rows of it each rank holds. fix: give the transform p.full_tensor(), on every rank"
            )
        sharding = propagate(schema)
        if is_same:
            # PyTorch 2.15 makes a plain ``Shard(0)``.
            sharding.output_spec = ragged[0]
        return sharding

    return propagate_or_refuse
