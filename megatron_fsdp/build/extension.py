"""Extension: a parameter of a tensor subclass that defines its own all-gather, and its representation in buffers.

FSDP2's contract: ``fsdp_pre_all_gather`` of this rank's part returns the tensors to gather, and
``fsdp_post_all_gather`` makes the whole parameter from the gathered tensors. A subclass around one tensor of the same
shape (torchao's float8 weights) is laid out by rows like any parameter, so that optimizers can step it. Any other
subclass (NF4: quantized data and scales) cuts itself into one part per rank. Buffers store the parts as bytes, and the
parameter cannot be trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_fsdp.errors import ConfigError

__all__ = ["ByteLayout", "Extension", "extension_of"]

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """The places of several tensors in a run of bytes.

    Attributes:
        spans: where each lies. num_bytes: of the run.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    spans: tuple[slice, ...] = field(compare=False)
    num_bytes: int = field(compare=False)

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> ByteLayout:
        """Return the layout of tensors with these shapes and dtypes."""
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        starts = list(itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        spans = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=False))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return cls(shapes, tuple(tensor.dtype for tensor in tensors), spans, starts[-1])

    def write(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the tensors into ``num_bytes`` bytes."""
        for tensor, span in zip(tensors, self.spans, strict=True):
            out[span].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))

    def views(self, run: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of a run of bytes."""
        each = zip(self.spans, self.dtypes, self.shapes, strict=True)
        return [run[span].view(dtype).view(shape) for span, dtype, shape in each]


@dataclass(frozen=True, slots=True)
class Extension:
    """The way to take a parameter of a subclass apart and to put it together.

    Attributes:
        kind: the subclass. shape, stride, dtype: of the whole parameter.
        data: the tensor that buffers lay out: the inner tensor, or uint8 (ranks, bytes of a part).
        names, context: of ``__tensor_flatten__``, of a part. num_parts: number of ranks that it is sharded over.
        packed: the places of a part's inner tensors in its bytes; None for a parameter that is laid out by rows.
    """

    kind: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    data: torch.Tensor
    names: tuple[str, ...]
    context: Any
    num_parts: int
    packed: ByteLayout | None = None

    def emptied(self) -> Extension:
        """Return a copy without the whole parameter's values."""
        return replace(self, data=self.data.new_empty(0))

    @property
    def is_packed(self) -> bool:
        """Return whether buffers store the parameter as bytes."""
        return self.packed is not None

    def part(self, resting: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, as the subclass, over the sharded memory: rows, or bytes."""
        inner, size, stride = [resting], resting.shape, resting.stride()
        if self.packed is not None:
            size, stride = torch.Size((self.shape[0] // self.num_parts, *self.shape[1:])), self.stride
            inner = self.packed.views(resting.view(-1))
        named = dict(zip(self.names, inner, strict=True))
        found: torch.Tensor = self.kind.__tensor_unflatten__(named, self.context, size, stride)
        return found


def extension_of(name: str, parameter: torch.Tensor, num_parts: int) -> Extension | None:
    """Return the extension of a parameter with its own all-gather; None for any other.

    Args:
        name: for messages. num_parts: number of ranks that weights are sharded over.
    Raises:
        ConfigError: a subclass that cannot be taken apart, or not evenly; or one of the two hooks is missing.
    """
    data = parameter.data
    hooks = [hasattr(data, hook) for hook in ("fsdp_pre_all_gather", "fsdp_post_all_gather")]
    kind = type(data)
    where = f"parameter {name!r} is a {kind.__name__}"
    if not any(hooks):
        if hasattr(data, "__tensor_flatten__") and not isinstance(data, torch.distributed.tensor.DTensor):
            raise ConfigError(
                f"{where}, a tensor subclass without fsdp_pre_all_gather and fsdp_post_all_gather, so its bytes cannot "
                "be gathered. fix: give the class both methods, shard the plain weight, or list it in ignored_params"
            )
        return None
    if not all(hooks) or not hasattr(data, "__tensor_flatten__"):
        raise ConfigError(
            f"{where}; wanted fsdp_pre_all_gather, fsdp_post_all_gather, __tensor_flatten__ and __tensor_unflatten__. "
            "fix: give the class all four, shard the plain weight, or list it in ignored_params"
        )
    if parameter.is_meta:
        raise ConfigError(
            f"{where} on the meta device. fix: make it on the device of its values, then call fully_shard"
        )
    names, context = data.__tensor_flatten__()
    if len(names) == 1 and getattr(data, names[0]).shape == data.shape:
        inner = getattr(data, names[0])
        _check_rows(where, data.shape, num_parts)
        return Extension(kind, data.shape, data.stride(), data.dtype, inner.detach(), (names[0],), context, num_parts)
    return _packed(where, data, num_parts, is_trained=parameter.requires_grad)


def _check_rows(where: str, shape: Sequence[int], num_parts: int) -> None:
    if not shape or shape[0] % num_parts:
        raise ConfigError(
            f"{where} of shape {tuple(shape)}, which {num_parts} ranks cannot share evenly: its hooks need equal "
            "numbers of rows. fix: choose a first dimension that the ranks divide, or list it in ignored_params"
        )


def _packed(where: str, data: torch.Tensor, num_parts: int, *, is_trained: bool) -> Extension:
    if is_trained:
        raise ConfigError(
            f"{where} of several inner tensors, {', '.join(data.__tensor_flatten__()[0])}, and requires a gradient: no "  # type: ignore[attr-defined]
            "optimizer could step its bytes. fix: freeze it with requires_grad_(False), and train adapters instead"
        )
    _check_rows(where, data.shape, num_parts)
    try:
        parts = torch.split(data, data.shape[0] // num_parts)
        names, context = parts[0].__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [[getattr(part, name) for name in part.__tensor_flatten__()[0]] for part in parts]  # type: ignore[attr-defined]
        layouts = [ByteLayout.of(each) for each in inner]
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{where} of shape {tuple(data.shape)}, which its class does not split into {num_parts} parts: {error}. "
            "fix: choose sizes that its blocks divide, or list it in ignored_params"
        ) from error
    if any(layout != layouts[0] for layout in layouts):
        raise ConfigError(
            f"{where}: its class makes {num_parts} parts whose inner tensors have different sizes. fix: choose sizes "
            "that its blocks divide, or list it in ignored_params"
        )
    rests = torch.zeros(num_parts, layouts[0].num_bytes, dtype=torch.uint8, device=inner[0][0].device)
    for tensors, row in zip(inner, rests, strict=True):
        layouts[0].write(tensors, row)
    kind, shape, stride = type(data), data.shape, data.stride()
    return Extension(kind, shape, stride, data.dtype, rests, tuple(names), context, num_parts, layouts[0])
