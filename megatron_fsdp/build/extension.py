"""Extension: a parameter of a tensor subclass that brings an all-gather of its own, and what the buffers hold of it.

FSDP2's contract: ``fsdp_pre_all_gather`` of this rank's part returns the tensors to gather, ``fsdp_post_all_gather``
makes the whole parameter of what was gathered. A subclass around one tensor of its own shape (torchao's float8 weights)
is laid out by rows like any parameter, so that optimizers step it. Any other (NF4: quantized data and scales) is cut by
the subclass itself into as many parts as there are ranks, and rests as their bytes; it cannot be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_fsdp.errors import ConfigError

__all__ = ["Extension", "extension_of"]

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Piece:
    """One inner tensor of a packed part: its name, and where and as what it lies in the part's bytes."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """Return it, a view of the bytes of a part."""
        return part[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Extension:
    """How a parameter of a subclass is taken apart and put together.

    Attributes:
        kind: the subclass. shape, stride, dtype: of the whole parameter.
        data: what the buffers lay out: the inner tensor, or uint8 (ranks, bytes of a part).
        context: of ``__tensor_flatten__``, of a part. inner: the name of the one inner tensor; empty if packed.
        pieces: of a packed part. num_parts: ranks over which it is sharded.
    """

    kind: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    data: torch.Tensor
    context: Any
    inner: str
    pieces: tuple[_Piece, ...]
    num_parts: int

    def emptied(self) -> Extension:
        """Return the same without the whole parameter's values."""
        return replace(self, data=self.data.new_empty(0))

    @property
    def is_packed(self) -> bool:
        """Whether it rests as bytes."""
        return not self.inner

    def part(self, resting: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, of the subclass, over its memory at rest: rows, or bytes."""
        inner, size, stride = {self.inner: resting}, resting.shape, resting.stride()
        if self.is_packed:
            size, stride = torch.Size((self.shape[0] // self.num_parts, *self.shape[1:])), self.stride
            inner = {piece.name: piece.of(resting.view(-1)) for piece in self.pieces}
        found: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, size, stride)
        return found


def extension_of(name: str, parameter: torch.Tensor, num_parts: int) -> Extension | None:
    """Return how a parameter brings its own all-gather; None for one that does not.

    Args:
        name: for messages. num_parts: ranks over which weights are sharded.
    Raises:
        ConfigError: a subclass that cannot be taken apart, or not evenly; or hooks of which one is missing.
    """
    data = parameter.data
    hooks = [hasattr(data, hook) for hook in ("fsdp_pre_all_gather", "fsdp_post_all_gather")]
    kind = type(data)
    where = f"parameter {name!r} is a {kind.__name__}"
    if not any(hooks):
        if hasattr(data, "__tensor_flatten__") and not isinstance(data, torch.distributed.tensor.DTensor):
            raise ConfigError(
                f"{where}, a tensor subclass without fsdp_pre_all_gather and fsdp_post_all_gather: its bytes have no "
                "way to other ranks. Give the class both methods, shard the plain weight, or list it in ignored_params."
            )
        return None
    if not all(hooks) or not hasattr(data, "__tensor_flatten__"):
        raise ConfigError(
            f"{where}; wanted fsdp_pre_all_gather, fsdp_post_all_gather, __tensor_flatten__ and __tensor_unflatten__. "
            "Give the class all four, shard the plain weight, or list it in ignored_params."
        )
    if parameter.is_meta:
        raise ConfigError(f"{where} on the meta device; make it on the device of its values, then call fully_shard")
    names, context = data.__tensor_flatten__()
    if len(names) == 1 and getattr(data, names[0]).shape == data.shape:
        inner = getattr(data, names[0])
        _check_rows(where, data.shape, num_parts)
        return Extension(kind, data.shape, data.stride(), data.dtype, inner.detach(), context, names[0], (), num_parts)
    return _packed(where, data, num_parts, is_trained=parameter.requires_grad)


def _check_rows(where: str, shape: Sequence[int], num_parts: int) -> None:
    if not shape or shape[0] % num_parts:
        raise ConfigError(
            f"{where} of shape {tuple(shape)}, which {num_parts} ranks cannot share evenly: its hooks need as many "
            "rows on every rank. Choose a first dimension that the ranks divide, or list it in ignored_params."
        )


def _packed(where: str, data: torch.Tensor, num_parts: int, *, is_trained: bool) -> Extension:
    if is_trained:
        raise ConfigError(
            f"{where} of several inner tensors, {', '.join(data.__tensor_flatten__()[0])}, and requires a gradient: no "  # type: ignore[attr-defined]
            "optimizer could step its bytes. Freeze it with requires_grad_(False), and train adapters beside it."
        )
    _check_rows(where, data.shape, num_parts)
    try:
        parts = torch.split(data, data.shape[0] // num_parts)
        described = [_described(part) for part in parts]
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{where} of shape {tuple(data.shape)}, which its class does not split into {num_parts} parts: {error}. "
            "Choose sizes that its blocks divide, or list it in ignored_params."
        ) from error
    (pieces, _), context = described[0], parts[0].__tensor_flatten__()[1]  # type: ignore[attr-defined]
    if any(found != pieces for found, _ in described):
        raise ConfigError(f"{where}: the {num_parts} parts that its class makes have inner tensors of other sizes")
    data_bytes = torch.stack([packed for _, packed in described])
    return Extension(type(data), data.shape, data.stride(), data.dtype, data_bytes, context, "", pieces, num_parts)


def _described(part: torch.Tensor) -> tuple[tuple[_Piece, ...], torch.Tensor]:
    """Return where the inner tensors of a part lie in its bytes, and the bytes."""
    pieces, chunks, cursor = [], [], 0
    for name in part.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(part, name).detach()
        flat = inner.contiguous().reshape(-1).view(torch.uint8)
        pieces.append(_Piece(name, cursor, cursor + flat.numel(), tuple(inner.shape), inner.dtype))
        cursor += -(-flat.numel() // _ALIGNMENT) * _ALIGNMENT
        chunks.append(torch.nn.functional.pad(flat, (0, cursor - pieces[-1].stop)))
    return tuple(pieces), torch.cat(chunks)
