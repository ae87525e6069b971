"""A bucket of a weight stream as SGLang's ``FlattenedTensorBucket``; the bytes are the same memory."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fsdp.transfer.bucket import WeightBucket

__all__ = ["flattened_bucket"]


def flattened_bucket(bucket: WeightBucket) -> Any:
    """Return SGLang's bucket for ``update_weights_from_tensor(load_format="flattened_bucket")``; nothing is copied.

    Example:
        for bucket in weight_stream(model).buckets():
            engine.update_weights(flattened_bucket(bucket))
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

    table = [
        FlattenedTensorMetadata(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=entry.dtype,
            start_idx=entry.offset,
            end_idx=entry.offset + entry.num_bytes,
            numel=entry.num_bytes,
        )
        for entry in bucket.entries
    ]
    return FlattenedTensorBucket(flattened_tensor=bucket.data, metadata=table)
