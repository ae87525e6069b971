"""Correctness of the Triton kernel of ``decode_rows``, run by test_triton.py in its own process."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from dbuffer_kernels import decode_rows
from dbuffer_kernels.quantize import reference_decode, row_bytes
from tests.unit.kernels.on_backend import CHOOSE, DEVICE, INTERPRETS, only_kernels

__all__ = ["only_kernels"]

RANKS = 3


# Rows of bytes begin at odd offsets, or at multiples of 16.
@pytest.mark.parametrize(
    ("shard_numel", "dtype"), CHOOSE(product([4352, 5120], [torch.float32, torch.bfloat16, torch.float16]))
)
def test_decoded_rows_are_the_reference_s_to_the_bit(shard_numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (RANKS, row_bytes(shard_numel)), generator=generator, dtype=torch.uint8)
    own = rows[:, shard_numel:]
    own.copy_(torch.rand(RANKS, own.shape[1] // 4, generator=generator).view(torch.uint8))
    rows, numel = rows.view(-1).to(DEVICE), RANKS * shard_numel
    buffer = torch.full((numel + 16,), 5.0, dtype=dtype, device=DEVICE)
    found, wanted = buffer[8 : 8 + numel], torch.zeros(numel, dtype=dtype, device=DEVICE)
    decode_rows(rows, shard_numel, found)
    reference_decode(rows, shard_numel, wanted)
    if INTERPRETS and dtype is torch.bfloat16:
        # The interpreter truncates fp32 (docs/design/kernels.md): ignore the one bit that rounding may add.
        assert set((wanted.view(torch.int16).int() - found.view(torch.int16).int()).tolist()) <= {0, 1}
    else:
        assert torch.equal(found, wanted)
    assert buffer[:8].eq(5.0).all()
    assert buffer[-8:].eq(5.0).all()


@pytest.mark.parametrize(("num_bytes", "numel"), [(521, 512), (520, 511)])
def test_memory_of_another_length_is_refused(num_bytes: int, numel: int) -> None:
    with pytest.raises(ValueError, match=r"wanted contiguous"):
        decode_rows(torch.zeros(num_bytes, dtype=torch.uint8), 256, torch.zeros(numel))
