"""A source of weights for vLLM's weight transfer: it describes the weights, and iterates them anew in each update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import TransferError
from megatron_fsdp.transfer.local_shards import local_shards
from megatron_fsdp.transfer.stream import WeightStream, weight_stream

__all__ = ["ManifestEntry", "ManifestSource", "StreamWeightSource"]


class StreamWeightSource:
    """vLLM's ``WeightSource`` over a sharded model: ``metadata()``, and iteration over names and whole tensors.

    Every rank of the trainer must iterate over it, as vLLM's ``send_weights`` does. vLLM copies the tensors into its
    own buffers.

    Args:
        model: a sharded model.
        options: options of ``weight_stream``: ``dtype``, ``names``, ``bucket_bytes``, ``merge_lora``.

    Example:
        source = StreamWeightSource(model, names={"blocks.*.project.weight": "model.layers.*.mlp.weight"})
        engine.send_weights(source)
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._model, self._options = model, options

    def metadata(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield the name, dtype and shape of each tensor in the order of the iteration; nothing is sent."""
        yield from weight_stream(self._model, **self._options).metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return a new iterator over the current weights."""
        stream: WeightStream = weight_stream(self._model, **self._options)
        return stream


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One piece of a weight on this rank, for engines that read shards in place (vLLM's ``M2NManifestEntry``).

    Attributes:
        name, dtype, global_shape: name, dtype and shape of the whole weight.
        offset: position of the piece's first element in the flattened weight.
        start, stop: the piece's elements in this rank's part of the weight.
        address: memory address of the piece's first element.
    """

    name: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offset: int
    start: int
    stop: int
    address: int


class ManifestSource:
    """A model's local shards with their offsets and addresses, for vLLM's ``ManifestM2NWeightSource``.

    Nothing is copied. Each element of the model is in the manifest of exactly one rank, even with replicas. Addresses
    and manifest stay valid until the model is sharded or materialized again; each optimizer step changes the values.

    Raises:
        TransferError: tensor parallelism cuts a weight: its pieces are no ranges of the flattened weight.

    Example:
        source = ManifestSource(model)
        for entry in source.manifest():
            register(entry.address, source.tensor(entry.name))
    """

    def __init__(self, model: nn.Module) -> None:
        self._shards = local_shards(model)
        for name, shard in self._shards.items():
            if shard.part_shape != shard.shape:
                raise TransferError(
                    f"weight {name!r} of shape {shard.shape} is cut by tensor parallelism into parts of shape "
                    f"{shard.part_shape}, which are no ranges of the flattened weight. fix: StreamWeightSource, or "
                    "send_weights with a transfer plan"
                )

    def manifest(self) -> list[ManifestEntry]:
        """Return the pieces that this rank offers."""
        return [
            ManifestEntry(
                name,
                shard.local.dtype,
                shard.shape,
                shard.offset,
                0,
                shard.local.numel(),
                shard.local.data_ptr(),
            )
            for name, shard in self._shards.items()
            if shard.contributes
        ]

    def tensor(self, name: str) -> torch.Tensor:
        """Return this rank's part of a weight, 1-D: the memory that the optimizer updates."""
        return self._shards[name].local
