"""Part: one tensor of a combined collective, and which parts one collective may contain."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from dbuffer.mesh import MeshAxis
from dbuffer_kernels.switches import is_off

COPIES = is_off("in-place")
"""Send copies of the inputs, for a backend that cannot work in place."""

MOST_EXCHANGED_BYTES = 1 << 26
"""On gloo, larger buffers travel one by one: a copy costs more than a message. The choice depends on the size only, so
all ranks agree."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One tensor of a combined all-gather, reduce-scatter or all-reduce.

    Attributes:
        kind: the collective.
        axis: the mesh axis of the collective. whole: 1-D, ``axis.size`` shards in rank order. shard: 1-D, this rank's
            shard; it may be this rank's slice of ``whole``. For an all-reduce, ``whole`` itself.
        op: "sum" or "avg" for a reduction; empty for an all-gather.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    axis: MeshAxis
    whole: torch.Tensor
    shard: torch.Tensor
    op: str = ""


def alike(parts: Sequence[Part], key: Callable[[Part], object]) -> list[list[Part]]:
    """Return lists of parts with equal keys, in the order of each list's first part."""
    found: dict[object, list[Part]] = {}
    for part in parts:
        found.setdefault(key(part), []).append(part)
    return list(found.values())


def travel_together(parts: Sequence[Part], group: dist.ProcessGroup, *, by_gloo: bool, is_wide: bool = False) -> bool:
    """Return whether these parts can share a collective.

    Args:
        by_gloo: gloo transfers these tensors. is_wide: ranks exchange the tensors and add them up themselves.
    """
    if len(parts) == 1 or is_traced(parts[0].shard) or is_off("together"):
        return False
    if is_wide:
        return True
    if by_gloo:
        return 0 < sum(part.whole.nbytes for part in parts) <= MOST_EXCHANGED_BYTES
    return coalesces(group, parts[0].whole.device)


_COALESCES: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group's backend can issue several collectives as one."""
    known = _COALESCES.get(group)
    if known is None:
        try:
            known = bool(group._get_backend(device).supports_coalescing)
        except RuntimeError:
            # A process group written in Python has no backends; it implements the methods itself.
            known = True
        _COALESCES[group] = known
    return known


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` belongs to a compiler trace, which needs functional collectives instead of in-place."""
    return type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter)


def copy(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``output``, unless they share their memory."""
    if output.data_ptr() != source.data_ptr():
        output.copy_(source)
