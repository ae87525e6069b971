"""``send_weights`` and ``receive_weights``: from a trainer's ranks straight into the slices of an engine's ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checks.rendezvous import meet, report_failure
from megatron_fsdp.errors import TransferError
from megatron_fsdp.transfer.bucket import BucketEntry
from megatron_fsdp.transfer.layouts import Parts, TransferLayout, box_ranges
from megatron_fsdp.transfer.move import Mover
from megatron_fsdp.transfer.transfer_plan import TransferPlan
from megatron_fsdp.transfer.weight_layout import own_weights

__all__ = ["receive_weights", "send_weights"]


def send_weights(
    model: nn.Module,
    plan: TransferPlan,
    group: dist.ProcessGroup | None = None,
    *,
    into: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Send this rank's part of a model's weights to the ranks that need it, as ``plan_transfer`` says.

    Every rank of the plan calls it, or ``receive_weights``, at the same time, between steps. The model stays unchanged,
    also after an error. A weight sent in another dtype than its main weight needs a copy of this rank's part.

    Args:
        plan: from ``weight_layout(model)`` to the engine's layout.
        group: over the ranks of the plan, ascending; None makes one for this call.
        into: tensors by name that this rank receives, if it is a rank of the engine too.
    Raises:
        TransferError: the plan was made of another model, or for tensors of other shapes or dtypes.
        AgreementError: another rank raised, ended, or did not come. MeshError: another rank has another plan.

    Example:
        source = weight_layout(model)
        plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), ranks=[0]))
        state = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in source.metadata()}
        send_weights(model, plan, into=state)  # other engine ranks call receive_weights(state, plan)
    """
    _move(plan, group, model, into)


def receive_weights(
    tensors: Mapping[str, torch.Tensor], plan: TransferPlan, group: dist.ProcessGroup | None = None
) -> None:
    """Receive this rank's slices of a trainer's weights into tensors by name, such as ``model.state_dict()``.

    Args:
        tensors: contiguous, of the dtype that is sent; each has the shape of this rank's slice. plan, group: as in
            ``send_weights``.
    Raises:
        TransferError: a tensor is missing, or has another shape or dtype; nothing was written.
        AgreementError: another rank raised, ended, or did not come; tensors may have old and new values then.

    Example:
        source = weight_layout(model)
        plan = plan_transfer(source, TransferLayout.sliced(source.metadata(), ranks=[4, 5], dims={"head.weight": 0}))
        if dist.get_rank() in (4, 5):
            receive_weights(engine_state, plan)  # while ranks 0 to 3 call send_weights(model, plan)
    """
    _move(plan, group, None, tensors)


def _move(
    plan: TransferPlan,
    group: dist.ProcessGroup | None,
    model: nn.Module | None,
    into: Mapping[str, torch.Tensor] | None,
) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank not in plan.ranks:
        return
    action = "moves weights by a transfer plan"
    try:
        sources, targets = _sources(plan.source, rank, model), _targets(plan.target, rank, into or {})
        device = next((each.device for each in (*sources, *targets)), torch.device("cpu"))
    except BaseException as error:
        report_failure(plan.ranks, action, error)
        raise
    meet(
        plan.ranks, action, [f"transfer {plan.fingerprint()}"], "the ranks have different transfer plans",
        "fix: make the plan from the same layouts on every rank",
    )  # fmt: skip
    mover = Mover(plan, sources, targets, device, group)
    try:
        mover.run()
    finally:
        mover.close()


def _sources(layout: TransferLayout, rank: int, model: nn.Module | None) -> Sequence[torch.Tensor]:
    parts = layout.parts.get(rank)
    if parts is None or not len(parts.starts):
        return []
    if model is None:
        raise TransferError(
            f"rank {rank} holds weights in the plan's source layout, and called receive_weights. fix: "
            "send_weights(model, plan, into=...) on ranks of the trainer"
        )
    found = own_weights(model, layout.tensors)
    if sum(each.nbytes for each in found) != parts.num_bytes:
        raise TransferError(
            f"rank {rank} holds {sum(each.nbytes for each in found)} bytes of the model, and {parts.num_bytes} in the "
            "plan's source layout. fix: make the plan again with weight_layout(model): the model was resharded"
        )
    return found


def _targets(layout: TransferLayout, rank: int, into: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    parts, found = layout.parts.get(rank), []
    if parts is None:
        return []
    for entry in layout.tensors:
        wanted = _bytes_of(entry, parts)
        if not wanted:
            continue
        tensor = into.get(entry.name)
        if tensor is None:
            raise TransferError(
                f"the receiver has no tensor {entry.name!r}, of which rank {rank} gets {wanted} bytes. fix: give "
                "weight_layout(names={...}) the patterns that map the trainer's names to the receiver's"
            )
        if tensor.dtype is not entry.dtype or tensor.nbytes != wanted or not tensor.is_contiguous():
            raise TransferError(
                f"tensor {entry.name!r} is {tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()} at "
                f"rank {rank}, which gets {wanted} contiguous bytes of {entry.dtype} {entry.shape}. fix: "
                f"weight_layout(model, dtype={tensor.dtype}), and dims of TransferLayout.sliced that fit the engine"
            )
        shapes = _slice_shapes(entry, parts)
        if shapes and tuple(tensor.shape) not in shapes:
            raise TransferError(
                f"tensor {entry.name!r} is {tuple(tensor.shape)} at rank {rank}, which gets a slice of shape "
                f"{' or '.join(map(str, shapes))} of {entry.shape}. fix: dims of TransferLayout.sliced that fit the "
                "engine, or receive into a tensor of the slice's shape and transpose it"
            )
        found.append(tensor.detach())
    return found


def _slice_shapes(entry: BucketEntry, parts: Parts) -> list[tuple[int, ...]]:
    """Return the shapes that a rank's bytes of a tensor may have: slices along one dimension; empty for other parts."""
    begin, end = entry.offset, entry.offset + entry.num_bytes
    inside = (parts.starts < end) & (parts.stops > begin)
    held = torch.stack([parts.starts[inside].clamp(min=begin), parts.stops[inside].clamp(max=end)], dim=1)
    num_bytes, found = int((held[:, 1] - held[:, 0]).sum()), []
    if num_bytes == entry.num_bytes:
        return [entry.shape]
    for dim, size in enumerate(entry.shape):
        length, rest = divmod(num_bytes * size, entry.num_bytes)
        if rest:
            continue
        inner = math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize
        first = (int(held[0, 0]) - begin) // inner % size
        box = [range(each) for each in entry.shape]
        box[dim] = range(first, min(first + length, size))
        if torch.equal(_joined(box_ranges(entry, box)), _joined(held)):
            found.append((*entry.shape[:dim], length, *entry.shape[dim + 1 :]))
    return list(dict.fromkeys(found))


def _joined(ranges: torch.Tensor) -> torch.Tensor:
    """Join (start, stop) pairs, (n, 2) and ascending, that follow one another without a gap."""
    ends, edge = ranges[1:, 0] != ranges[:-1, 1], torch.ones(1, dtype=torch.bool)
    return torch.stack([ranges[torch.cat([edge, ends]), 0], ranges[torch.cat([ends, edge]), 1]], dim=1)


def _bytes_of(entry: BucketEntry, parts: Parts) -> int:
    end = entry.offset + entry.num_bytes
    lengths = parts.stops.clamp(max=end) - parts.starts.clamp(min=entry.offset)
    return int(lengths.clamp(min=0).sum())
