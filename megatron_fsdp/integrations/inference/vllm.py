"""A source of weights for vLLM's weight transfer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megatron_fsdp.transfer.stream import WeightStream, weight_stream

__all__ = ["weight_source"]


def weight_source(model: nn.Module, **options: Any) -> Any:
    """Return vLLM's ``WeightSource`` over a sharded model, for ``trainer_init(..., source=)`` of its transfer engines.

    It is made of the classes of the vLLM that is installed: with vLLM 0.33 it has ``metadata``, a list, and
    ``iter_full()``; with 0.28 to 0.32 it has ``metadata()`` and is iterated itself. Each pass streams the current
    weights. Every rank of the trainer iterates it, as vLLM's ``send_weights`` does, and each reports that
    it owns all weights.

    Args:
        model: a sharded model.
        options: options of ``weight_stream``: ``dtype``, ``names``, ``bucket_bytes``, ``merge_lora``.

    Example:
        source = weight_source(model, names={"blocks.*.project.weight": "model.layers.*.mlp.weight"})
        engine = NCCLTrainerWeightTransferEngine.trainer_init(init_info, client=client, source=source)
        engine.send_weights()
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    def described() -> list[Any]:
        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in stream().metadata()]

    def stream() -> WeightStream:
        made: WeightStream = weight_stream(model, **options)
        return made

    if hasattr(WeightSource, "iter_full"):

        class FullSource(WeightSource):  # type: ignore[misc,unused-ignore]
            @cached_property
            def metadata(self) -> list[Any]:
                return described()

            def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
                return stream()

        return FullSource()

    class IteratedSource(WeightSource):  # type: ignore[misc,unused-ignore]
        def metadata(self) -> list[Any]:
            return described()

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return stream()

    return IteratedSource()
