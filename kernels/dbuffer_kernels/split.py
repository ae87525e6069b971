"""``split_weight`` and ``join_weight``: an fp32 weight as a bf16 weight and its missing 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dbuffer_kernels.elementwise import flat_chunks
from dbuffer_kernels.launch import BLOCK, check_tensor, device_function, launch, runs_on_triton, without_grad

if TYPE_CHECKING:
    # At run time launch.jit binds this name, so that importing the package does not import Triton.
    import triton.language as tl


@without_grad
def split_weight(main: Tensor, model: Tensor, remainder: Tensor) -> None:
    """Split ``main`` into the nearest bf16 weight (``model``) and the difference of the bits (``remainder``).

    ``bits(main) == (bits(model) << 16) + remainder`` in 32-bit integers. Ties go away from zero, while a plain cast
    goes to even: with ties to even the remainder would need 17 bits. ``join_weight`` restores every fp32 value bit for
    bit, including both zeros, subnormals and infinities. For a NaN, ``model`` holds the upper half with the quiet bit
    set, so that it is a NaN too, and ``remainder`` holds the lower half. A signalling NaN therefore comes back quiet,
    with its sign and the rest of its payload unchanged.

    Memory traffic: 8 bytes per element.

    Args:
        main: fp32, contiguous. Read.
        model: bf16, contiguous, same numel. Written.
        remainder: int16, contiguous, same numel. Written. The three tensors must not overlap.
    Raises:
        ValueError: a tensor has another dtype, numel or device, or is not contiguous.
    """
    _check("split_weight", main, model, remainder)
    if not runs_on_triton(model):
        reference_split(main, model, remainder)
        return
    launch(split_kernel, -(-main.numel() // BLOCK), main.device, main, model, remainder, main.numel())
    # Every operator that writes in place does this.
    torch.autograd.graph.increment_version((model, remainder))


@without_grad
def join_weight(model: Tensor, remainder: Tensor, main: Tensor) -> Tensor:
    """Join ``model`` and ``remainder`` into ``main`` and return it; arguments and errors as in ``split_weight``.

    If ``model`` is NaN, ``remainder`` is the lower half unchanged.
    """
    _check("join_weight", main, model, remainder)
    if not runs_on_triton(main):
        return reference_join(model, remainder, main)
    launch(join_kernel, -(-main.numel() // BLOCK), main.device, model, remainder, main, main.numel())
    return main


def reference_split(main: Tensor, model: Tensor, remainder: Tensor) -> None:
    """Do the same as ``split_weight`` in plain torch, in chunks."""
    for piece, upper, lower in zip(flat_chunks(main), flat_chunks(model), flat_chunks(remainder), strict=True):
        bits = piece.view(torch.int32)
        # The addition can overflow only for a NaN, where its result is not used.
        rounded = torch.where(piece.isnan(), bits | 0x400000, bits + 0x8000)
        upper.view(torch.int16).copy_(rounded >> 16)
        lower.copy_(bits)


def reference_join(model: Tensor, remainder: Tensor, main: Tensor) -> Tensor:
    """Do the same as ``join_weight`` in plain torch, in chunks."""
    for upper, lower, piece in zip(flat_chunks(model), flat_chunks(remainder), flat_chunks(main), strict=True):
        low = torch.where(upper.isnan(), lower.to(torch.int32) & 0xFFFF, lower.to(torch.int32))
        piece.view(torch.int32).copy_((upper.view(torch.int16).to(torch.int32) << 16) + low)
    return main


def _check(op: str, main: Tensor, model: Tensor, remainder: Tensor) -> None:
    for name, tensor, dtype in (
        ("main", main, torch.float32), ("model", model, torch.bfloat16), ("remainder", remainder, torch.int16),
    ):  # fmt: skip
        check_tensor(f"{op}: {name}", tensor, main.shape, (dtype,), main.device)


def split_kernel(main: tl.tensor, model: tl.tensor, remainder: tl.tensor, numel: tl.int64, BLOCK: tl.constexpr) -> None:
    """Split one block of contiguous memory; ``elementwise_kernel`` explains the branches."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        store_split(model + index, remainder + index, tl.load(main + index), None)
    else:
        mask = index < numel
        store_split(model + index, remainder + index, tl.load(main + index, mask=mask), mask)


def join_kernel(model: tl.tensor, remainder: tl.tensor, main: tl.tensor, numel: tl.int64, BLOCK: tl.constexpr) -> None:
    """Join one block of contiguous memory; ``elementwise_kernel`` explains the branches."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        tl.store(main + index, load_joined(model + index, remainder + index, None))
    else:
        mask = index < numel
        tl.store(main + index, load_joined(model + index, remainder + index, mask), mask=mask)


@device_function
def store_split(model: tl.tensor, remainder: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    """Write fp32 values as bf16 weights (nearest, ties away from zero, NaN quiet) and remainders.

    The remainder is the lower half. Its sign bit tells that the upper half was rounded up.
    """
    bits = value.to(tl.uint32, bitcast=True)
    upper = tl.where(value == value, (bits + 0x8000) >> 16, (bits >> 16) | 0x40)
    tl.store(model, upper.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    tl.store(remainder, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)


@device_function
def load_joined(model: tl.tensor, remainder: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return the fp32 values of bf16 weights and their remainders."""
    upper = tl.load(model, mask=mask).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    unsigned = tl.load(remainder, mask=mask).to(tl.uint16, bitcast=True).to(tl.uint32)
    is_nan = (upper & 0x7FFFFFFF) > 0x7F800000
    # If the weight was rounded up, the remainder is negative and borrows from the upper half.
    borrow = tl.where(is_nan | (unsigned < 0x8000), 0, 0x10000).to(tl.uint32)
    return (upper + unsigned - borrow).to(tl.float32, bitcast=True)
