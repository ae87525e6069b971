"""A source of weights for vLLM's weight transfer: it describes the weights, and iterates them anew in each update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megatron_fsdp.transfer.stream import WeightStream, weight_stream

__all__ = ["StreamWeightSource"]


class StreamWeightSource:
    """vLLM's ``WeightSource`` over a sharded model: ``metadata()``, and iteration over names and whole tensors.

    Every rank of the trainer must iterate it, as ``send_weights`` does; vLLM packs the tensors into buffers of its own.

    Args:
        options: of ``weight_stream``: ``dtype``, ``names``, ``bucket_bytes``, ``merge_lora``.

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
