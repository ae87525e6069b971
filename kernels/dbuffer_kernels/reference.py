"""Plain-torch versions of the ops: what runs on CPU, and what the Triton kernels must agree with.

Those of ``cast_copy`` and ``accumulate`` stand beside them in ``elementwise``.

They trust their arguments; the public ops of the package check them first. Numerics (docs/design/kernels.md): fp32
arithmetic, fp64 when source or out is fp64, then one cast to ``out.dtype`` with round-to-nearest-even. An fp64 result
reaches a 16-bit ``out`` by way of fp32, as torch's own conversion does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dbuffer_kernels.dtypes import FLOAT_DTYPES, compute_dtype
from dbuffer_kernels.elementwise import CHUNK_NUMEL

_LOW_32 = 0xFFFFFFFF


def rounding_keys(seed: int) -> tuple[int, int]:
    """Return the two 32-bit keys of a seed: the halves of its splitmix64 value, so that near seeds share nothing.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the finalizer of
    Vigna's splitmix64.
    """
    mixed = (seed + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return mixed & _LOW_32, mixed >> 32


def rounding_bits(index: Tensor, low_key: int, high_key: int) -> Tensor:
    """Return 16 random bits for each index (int64), which both keys and all 64 bits of the index decide.

    A multiply-xorshift hash of 32 bits with the constants of Wellons' "hash prospector"; the second key goes in
    between the multiplications, so that two seeds do not give the same bits at swapped indices.
    """
    mixed = (index & _LOW_32) ^ low_key ^ ((((index >> 32) & _LOW_32) * 0x9E3779B9) & _LOW_32)
    mixed = ((mixed ^ (mixed >> 16)) * 0x21F0AAAD) & _LOW_32
    mixed = (mixed + high_key) & _LOW_32
    # The product may pass 2**63 and turn negative, but its lower half is right.
    mixed = ((mixed ^ (mixed >> 15)) * 0xD35A2D97) & _LOW_32
    return mixed >> 16


CHECKSUM_BLOCK = 4096
"""Elements of a whole tensor that share the second of the two odd numbers of ``checksum``."""
# At once: 512 KiB in int64, which stay in a core's cache between the passes.
_CHECKSUM_BLOCKS = 16


def checksum(bits: Tensor, *, key: int, first_element: int) -> Tensor:
    """Return the sum modulo 2**64 of ``bits[i] * odd(place) * odd(key + block)``, 0-d int64.

    Element ``first_element + i`` of the whole tensor is at ``place`` of block ``block`` of ``CHECKSUM_BLOCK`` elements.
    Allocates ``_CHECKSUM_BLOCKS`` blocks in int64, and 8 bytes for each block that ``bits`` reaches into.

    Args:
        bits: 1-D integers, signed. key: within 64 bits, signed.
    """
    weights = _weights_of_places(bits.device)
    block, place = divmod(first_element, CHECKSUM_BLOCK)
    # What is cut off at either end goes by itself, whole blocks some at a time.
    head = min(-place % CHECKSUM_BLOCK, bits.numel())
    tail = (bits.numel() - head) % CHECKSUM_BLOCK
    start, body, end = bits.split([head, bits.numel() - head - tail, tail])
    sums = [(start * weights[place : place + head]).sum().view(1)] if head else []
    products = torch.empty(_CHECKSUM_BLOCKS, CHECKSUM_BLOCK, dtype=torch.int64, device=bits.device)
    for blocks in body.view(-1, CHECKSUM_BLOCK).split(_CHECKSUM_BLOCKS) if len(body) else ():
        sums.append(products[: len(blocks)].copy_(blocks).mul_(weights).sum(dim=1))
    if tail:
        sums.append((end * weights[:tail]).sum().view(1))
    of_blocks = torch.cat([products.new_empty(0), *sums])
    numbers = torch.arange(block, block + len(of_blocks), device=bits.device)
    return (of_blocks * odd_numbers(numbers + key)).sum()


@functools.cache
def _weights_of_places(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return odd_numbers(torch.arange(CHECKSUM_BLOCK, device=device))


def odd_numbers(numbers: Tensor) -> Tensor:
    """Return a random odd number of 64 bits for each integer (int64): splitmix64 of it, with the lowest bit set."""
    mixed = (numbers + 1) * signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * signed(0x94D049BB133111EB)
    return (mixed ^ _shifted(mixed, 31)) | 1


def signed(number: int) -> int:
    """Return the low 64 bits of an integer as int64 holds them."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(numbers: Tensor, places: int) -> Tensor:
    # torch shifts signs in.
    return (numbers >> places) & ((1 << (64 - places)) - 1)


def sum_of_squares(source: Tensor, out: Tensor) -> Tensor:
    """Write (sum of squares, number of non-finite values) into fp64 ``out`` of shape (2,) and return it.

    Chunks of ``CHUNK_NUMEL`` are summed in fp32 (fp64 for fp64), their sums in fp64. Allocates temporaries of
    ``CHUNK_NUMEL`` elements.

    Args:
        source: contiguous; fp32, bf16, fp16 or fp64.
    """
    compute = compute_dtype(source.dtype, source.dtype)
    total = torch.zeros((), dtype=torch.float64, device=source.device)
    num_bad = torch.zeros((), dtype=torch.float64, device=source.device)
    for piece in _flat_chunks(source):
        # Not torch.dot, which adds 65,536 products in a row and loses two digits.
        subtotal = piece.to(compute).square().sum()
        total += subtotal
        # On the CPU looking costs nothing, and a finite sum proves that every value is finite.
        if not source.is_cpu or not subtotal.isfinite():
            num_bad += piece.numel() - piece.isfinite().sum()
    out[0], out[1] = total, num_bad
    return out


def split_weight(main: Tensor, model: Tensor, remainder: Tensor) -> None:
    """Take fp32 ``main`` apart into bf16 ``model`` and int16 ``remainder``; see the op of this name in ``split``.

    All contiguous and of one numel. Allocates temporaries of ``CHUNK_NUMEL`` int32 elements.
    """
    for piece, upper, lower in zip(_flat_chunks(main), _flat_chunks(model), _flat_chunks(remainder), strict=True):
        bits = piece.view(torch.int32)
        # Only a NaN's bits can overflow here, and its sum is not taken.
        rounded = torch.where(piece.isnan(), bits | 0x400000, bits + 0x8000)
        upper.view(torch.int16).copy_(rounded >> 16)
        lower.copy_(bits)


def join_weight(model: Tensor, remainder: Tensor, main: Tensor) -> Tensor:
    """Undo ``split_weight`` and return ``main``; arguments and temporaries as there."""
    for upper, lower, piece in zip(_flat_chunks(model), _flat_chunks(remainder), _flat_chunks(main), strict=True):
        low = torch.where(upper.isnan(), lower.to(torch.int32) & 0xFFFF, lower.to(torch.int32))
        piece.view(torch.int32).copy_((upper.view(torch.int16).to(torch.int32) << 16) + low)
    return main


def _flat_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.view(-1), CHUNK_NUMEL)


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``stop`` of a flat buffer, updated with one row of hyperparameters."""

    start: int
    stop: int
    row: int = 0


@dataclass(frozen=True, slots=True)
class AdamWBuffers:
    """The flat buffers of AdamW steps: 1-D, contiguous, of one length, on one device, 16-byte aligned for speed.

    Checked when it is made, not in every step: keep it as long as the buffers are the same.

    Attributes:
        gradient: read; fp32, bf16, fp16 or fp64.
        weight: updated; fp32, bf16, fp16 or fp64 (bf16 with a ``remainder``).
        exp_avg, exp_avg_sq: the moments, updated; fp32, bf16, fp16 or fp64.
        model_weight: the compute copy, written with the new weight rounded to nearest even; None where there is none.
        remainder: int16, updated; with ``weight`` it is the fp32 weight, as in ``split_weight``. None otherwise.
        compute_dtype: what the arithmetic runs in: fp64 when a buffer is fp64, else fp32.
        is_uniform: whether gradient, weight and moments all have that dtype.
    Raises:
        ValueError: a tensor of another shape, device or dtype than these.
    """

    gradient: Tensor
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    model_weight: Tensor | None = None
    remainder: Tensor | None = None
    compute_dtype: torch.dtype = field(init=False)
    is_uniform: bool = field(init=False)

    def __post_init__(self) -> None:
        shape, device = (self.weight.numel(),), self.weight.device
        for name, tensor in self.named().items():
            if tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
                raise ValueError(
                    f"AdamWBuffers: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
                    f"{tensor.device}; wanted contiguous {shape} on {device}, where weight is. Pass flat buffers of "
                    "one length."
                )
            if name != "remainder" and tensor.dtype not in FLOAT_DTYPES:
                raise ValueError(f"AdamWBuffers: {name} is {tensor.dtype}; wanted fp32, bf16, fp16 or fp64.")
        self._check_remainder()
        is_double = any(tensor.dtype is torch.float64 for tensor in self.named().values())
        object.__setattr__(self, "compute_dtype", torch.float64 if is_double else torch.float32)
        dtypes = {tensor.dtype for tensor in (self.gradient, self.weight, self.exp_avg, self.exp_avg_sq)}
        object.__setattr__(self, "is_uniform", dtypes == {self.compute_dtype})

    def _check_remainder(self) -> None:
        if self.remainder is None:
            return
        is_split = self.remainder.dtype is torch.int16 and self.weight.dtype is torch.bfloat16
        if not is_split or self.model_weight is not None:
            raise ValueError(
                f"AdamWBuffers: with a remainder ({self.remainder.dtype}) the weight is {self.weight.dtype} and "
                f"model_weight {'absent' if self.model_weight is None else 'given'}; wanted an int16 remainder, a "
                "bfloat16 weight, which is the model weight, and no other one."
            )

    def named(self) -> dict[str, Tensor]:
        """Return the buffers that are there, by name."""
        names = ("gradient", "weight", "exp_avg", "exp_avg_sq", "model_weight", "remainder")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


NUM_COLUMNS = 8
"""Of a row of hyperparameters: sign, decay, 1 - beta1, beta2, 1 - beta2, -step size, sqrt(bias correction 2), eps."""


def adamw(buffers: AdamWBuffers, segments: Sequence[Segment], rows: Tensor, *, clip: Tensor | None = None) -> None:
    """Take the AdamW step that the op of this name states, in batches of pieces that share a row.

    Allocates temporaries of ``CHUNK_NUMEL`` elements, one for each buffer that has not the compute dtype and two more.

    Args:
        segments: disjoint, in bounds. rows: fp64 (rows, 8). clip: 0-d, multiplied into the gradients.
    """
    values = rows.tolist()
    numel = buffers.weight.numel()
    if len(segments) == 1 and segments[0].stop - segments[0].start == numel <= CHUNK_NUMEL:
        row = values[segments[0].row]
        if buffers.is_uniform:
            _adamw_whole(buffers, row, clip)
        else:
            _adamw_batch(buffers, (slice(None),), row, clip)
        return
    for row in {segment.row for segment in segments}:
        for batch in _batches(segment for segment in segments if segment.row == row):
            _adamw_batch(buffers, batch, values[row], clip)


def _batches(segments: Iterable[Segment]) -> Iterator[list[slice]]:
    """Yield pieces of the segments in lists of at most ``CHUNK_NUMEL`` elements: one call of torch serves a list."""
    batch: list[slice] = []
    room = CHUNK_NUMEL
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            stop = min(start + room, segment.stop)
            batch.append(slice(start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], CHUNK_NUMEL
    if batch:
        yield batch


def _adamw_whole(buffers: AdamWBuffers, row: Sequence[float], clip: Tensor | None) -> None:
    """Do what ``_adamw_batch`` does to whole buffers of the compute dtype, without lists: the same operators."""
    sign, decay, towards, beta2, rest2, minus_step_size, root_correction, eps = row
    weight, exp_avg, exp_avg_sq, gradient = buffers.weight, buffers.exp_avg, buffers.exp_avg_sq, buffers.gradient
    if clip is not None:
        gradient = gradient * (clip.to(gradient.dtype) * sign)
    elif sign != 1.0:
        gradient = gradient * sign
    weight.mul_(decay)
    exp_avg.lerp_(gradient, towards)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=rest2)
    denominator = exp_avg_sq.sqrt().div_(root_correction).add_(eps)
    weight.addcdiv_(exp_avg, denominator, value=minus_step_size)
    if buffers.model_weight is not None:
        buffers.model_weight.copy_(weight)


def _adamw_batch(buffers: AdamWBuffers, parts: Sequence[slice], row: Sequence[float], clip: Tensor | None) -> None:
    sign, decay, towards, beta2, rest2, minus_step_size, root_correction, eps = row
    compute = buffers.compute_dtype
    gradients = _widened(_cut(buffers.gradient, parts), compute)
    if clip is not None:
        gradients = list(torch._foreach_mul(gradients, clip.to(compute) * sign))
    elif sign != 1.0:
        gradients = list(torch._foreach_mul(gradients, sign))
    stored = [_cut(tensor, parts) for tensor in (buffers.weight, buffers.exp_avg, buffers.exp_avg_sq)]
    # A piece that has the compute dtype is not copied: the arithmetic happens in place.
    weights, exp_avgs, exp_avg_sqs = (_widened(pieces, compute) for pieces in stored)
    # With a remainder the stored weight is bf16, so this list is a new one.
    remainders = [] if buffers.remainder is None else _cut(buffers.remainder, parts)
    for index, remainder in enumerate(remainders):
        weights[index] = join_weight(stored[0][index], remainder, torch.empty_like(gradients[index]))
    torch._foreach_mul_(weights, decay)
    torch._foreach_lerp_(exp_avgs, gradients, towards)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, rest2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, root_correction)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(weights, exp_avgs, denominators, minus_step_size)
    for index, remainder in enumerate(remainders):
        split_weight(weights[index], stored[0][index], remainder)
    if not remainders:
        _store(stored[0], weights)
    _store(stored[1], exp_avgs)
    _store(stored[2], exp_avg_sqs)
    if buffers.model_weight is not None:
        torch._foreach_copy_(_cut(buffers.model_weight, parts), weights)


def _store(pieces: list[Tensor], values: list[Tensor]) -> None:
    # Pieces of the compute dtype were changed in place.
    if pieces is not values:
        torch._foreach_copy_(pieces, values)


def _cut(tensor: Tensor, parts: Sequence[slice]) -> list[Tensor]:
    return [tensor[part] for part in parts]


def _widened(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return tensors if tensors[0].dtype is dtype else [tensor.to(dtype) for tensor in tensors]
