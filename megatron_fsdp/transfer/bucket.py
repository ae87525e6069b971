"""WeightBucket: whole tensors in one run of bytes, with a table; and the receiver's functions for a bucket.

A receiver needs this file alone: no model of this library, no ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import dbuffer_kernels
from megatron_fsdp.errors import TransferError

__all__ = ["BucketEntry", "WeightBucket", "apply_bucket", "tensor_checksums"]


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One tensor of a bucket.

    Attributes:
        name: of the tensor. aliases: its other names, where weights are tied.
        dtype, shape: of the whole tensor. offset: of its first byte in the bucket.
        checksum: 64 bits over its values; None where the sender was not asked for checksums.

    Example:
        for bucket in weight_stream(model).buckets():
            for entry in bucket.entries:
                print(entry.name, entry.view(bucket.data).sum())
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    aliases: tuple[str, ...] = ()
    checksum: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the bucket's bytes."""
        return data[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


class WeightBucket:
    """A flattened bucket: bytes and a table.

    The stream that yields a bucket takes its memory back when the caller asks for the next bucket. After that, ``data``
    raises. A tensor taken from the bucket before keeps its memory, and its values, for as long as it lives.

    Args:
        data: 1-D, uint8. entries: where each tensor lies in it; bytes that belong to no entry are undefined.
        version: of the model's weights (``weight_version``). index: of the bucket in its stream, from 0.
        num_buckets: of the stream.

    Example:
        for bucket in weight_stream(model, checksums=True).buckets():
            bucket.verify()
            print(bucket.index, bucket.num_buckets, bucket.data.numel(), "bytes")
    """

    def __init__(
        self, data: torch.Tensor, entries: Sequence[BucketEntry], *, version: int = 0, index: int = 0,
        num_buckets: int = 1,
    ) -> None:  # fmt: skip
        self._data: torch.Tensor | None = data
        self.entries = tuple(entries)
        self.version, self.index, self.num_buckets = version, index, num_buckets

    @property
    def data(self) -> torch.Tensor:
        """The whole bucket as bytes, 1-D uint8.

        Raises:
            TransferError: the stream that yielded it has gone on.
        """
        if self._data is None:
            raise TransferError(
                f"bucket {self.index}: its memory went back to the weight stream when the next bucket was asked for. "
                "fix: use bucket.data inside of the loop, or keep `data = bucket.data` there"
            )
        return self._data

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the view of each tensor; no data is copied."""
        data = self.data
        for entry in self.entries:
            yield entry.name, entry.view(data)

    def verify(self) -> None:
        """Compare the bytes with the checksums of the table.

        Raises:
            TransferError: a tensor differs from the sent one; or the table has no checksums.
        """
        data = self.data
        unchecked = [entry.name for entry in self.entries if entry.checksum is None]
        if unchecked:
            raise TransferError(
                f"bucket {self.index}: the table has no checksum of {unchecked[0]!r}. fix: make the stream with "
                "weight_stream(model, checksums=True)"
            )
        found = tensor_checksums([(entry.name, entry.view(data)) for entry in self.entries])
        for entry, number in zip(self.entries, found, strict=True):
            if number != entry.checksum:
                raise TransferError(
                    f"bucket {self.index} of version {self.version}: tensor {entry.name!r} arrived changed: its "
                    f"checksum is {number:016x}, and {entry.checksum:016x} was sent. fix: send the bucket again; look "
                    "at the transport between trainer and receiver"
                )

    def expire(self) -> torch.Tensor | None:
        """Give the memory back to the stream; ``data`` raises from now on."""
        data, self._data = self._data, None
        return data

    def __repr__(self) -> str:
        size = "expired" if self._data is None else f"{self._data.numel()} bytes"
        return f"WeightBucket({self.index} of {self.num_buckets}, {len(self.entries)} tensors, {size})"


def apply_bucket(state: Mapping[str, torch.Tensor], bucket: WeightBucket, *, verify: bool = True) -> None:
    """Copy a bucket into the tensors of a receiver, such as ``model.state_dict()``; each tensor is cast to theirs.

    A name may be missing in ``state`` if one of its aliases is present: a receiver may name tied weights once.

    Args:
        verify: compare the checksums first, if the table has any. Nothing is written when one differs.
    Raises:
        TransferError: a tensor has no place in ``state``, or another shape there; or it arrived changed.

    Example:
        generator = Model()
        for bucket in weight_stream(model, checksums=True).buckets():
            apply_bucket(generator.state_dict(), bucket)
    """
    if verify and any(entry.checksum is not None for entry in bucket.entries):
        bucket.verify()
    targets = [places_of(state, entry.name, entry.aliases, entry.shape) for entry in bucket.entries]
    data = bucket.data
    with torch.no_grad():
        for entry, places in zip(bucket.entries, targets, strict=True):
            for place in places:
                place.copy_(entry.view(data))


def places_of(
    state: Mapping[str, torch.Tensor], name: str, aliases: Sequence[str], shape: Sequence[int]
) -> list[torch.Tensor]:
    """Return the receiver's tensors of one name and its aliases, tied ones once.

    Raises:
        TransferError: there is none, or its shape differs.
    """
    places = {state[each].data_ptr(): state[each] for each in (name, *aliases) if each in state}
    if not places:
        raise TransferError(
            f"the receiver has no tensor {name!r}, which the trainer sent. fix: give weight_stream(names={{...}}) the "
            "patterns that map the trainer's names to the receiver's"
        )
    for place in places.values():
        if tuple(place.shape) != tuple(shape):
            raise TransferError(
                f"tensor {name!r} is {tuple(place.shape)} at the receiver, and {tuple(shape)} was sent. fix: load the "
                "same model configuration on both sides, or map the name to another tensor with names={...}"
            )
    return list(places.values())


def tensor_checksums(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
    """Return 64 bits over each named tensor; the host waits for the device once.

    The checksum of a whole tensor is the sum of its parts' checksums modulo 2**64 (``dbuffer_kernels.checksum``).
    """
    if not tensors:
        return []
    real = [(name, torch.view_as_real(each) if each.is_complex() else each) for name, each in tensors]
    found = [dbuffer_kernels.checksum(tensor.contiguous(), key=checksum_key(name)) for name, tensor in real]
    return [int(number) % (1 << 64) for number in torch.stack([each.to(found[0].device) for each in found]).tolist()]


def checksum_key(name: str) -> int:
    """Return the key of a tensor's checksum, which a receiver can make from the name alone."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
