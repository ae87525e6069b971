"""What the Triton kernel of ``decode_rows`` must do, run by test_triton.py in a process of its own."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from dbuffer_kernels import CodedRows, decode_rows
from dbuffer_kernels.quantize import reference_decode
from tests.unit.kernels.on_backend import CHOOSE, DEVICE, INTERPRETS, only_kernels

__all__ = ["only_kernels"]

# For each kind: elements of a rank, and where tensors begin, of which shapes. Tensors are cut anywhere between rows, so
# that scales of columns come with other ranks' codes; some rows of bytes begin at odd places.
CASES: dict[str, tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "fp8": (4100, (0, 2052, 2056), ((27, 76), (1, 3), (102, 95))),
    "int8_block": (4352, (0, 9216), ((96, 96), (2, 65, 29))),
    "mxfp8": (4128, (0, 6144), ((96, 64), (2, 32, 96))),
    "mxfp8 columns": (4448, (0, 6144, 7168), ((96, 64), (32, 32), (2, 32, 96))),
    "mxfp8 columns, aligned": (8192, (0, 4096), ((32, 128), (2, 64, 128))),
}
RANKS = 3


@pytest.mark.parametrize(("name", "dtype"), CHOOSE(product(CASES, [torch.float32, torch.bfloat16, torch.float16])))
def test_decoded_rows_are_the_reference_s_to_the_bit(name: str, dtype: torch.dtype) -> None:
    shard_numel, offsets, shapes = CASES[name]
    layout = CodedRows.of(name.partition(",")[0], shard_numel, RANKS, offsets, shapes)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (RANKS, layout.row_bytes), generator=generator, dtype=torch.uint8)
    own = rows[:, shard_numel:]
    if layout.kind == "int8_block":
        own.copy_(torch.rand(RANKS, own.shape[1] // 4, generator=generator).view(torch.uint8))
    elif layout.block:
        own.copy_(torch.randint(118, 132, own.shape, generator=generator))
        # Both ends of the format (the interpreter makes bf16 of subnormals wrongly).
        own[0, :2] = torch.tensor([0 if dtype is torch.float32 else 120, 255])
    rows, scales = rows.view(-1).to(DEVICE), None
    if layout.kind == "fp8":
        scales = torch.tensor([3.7, 0.011, 448.0][: len(shapes)], device=DEVICE)
    numel = RANKS * shard_numel
    buffer = torch.full((numel + 16,), 5.0, dtype=dtype, device=DEVICE)
    out, wanted = buffer[8 : 8 + numel], torch.zeros(numel, dtype=dtype, device=DEVICE)
    decode_rows(rows, layout, scales, out)
    reference_decode(rows, layout, scales, wanted)
    for offset, tensor_numel, _ in layout.tensors:
        found, right = out[offset : offset + tensor_numel], wanted[offset : offset + tensor_numel]
        if INTERPRETS and dtype is torch.bfloat16:
            # The interpreter cuts fp32 off (docs/design/kernels.md): the one bit that rounding may add is left out.
            found, right = (each.view(torch.int16).int() for each in (found.nan_to_num(), right.nan_to_num()))
            assert set((right - found).tolist()) <= {0, 1}
        else:
            assert torch.equal(found.isnan(), right.isnan())
            assert torch.equal(found.nan_to_num(), right.nan_to_num())
    assert buffer[:8].eq(5.0).all()
    assert buffer[-8:].eq(5.0).all()


@pytest.mark.parametrize(("num_bytes", "numel"), [(133, 128), (132, 127)])
def test_memory_of_another_length_is_refused(num_bytes: int, numel: int) -> None:
    layout = CodedRows.of("mxfp8", 64, 2, (0,), ((2, 64),))
    with pytest.raises(ValueError, match=r"wanted contiguous"):
        decode_rows(torch.zeros(num_bytes, dtype=torch.uint8), layout, None, torch.zeros(numel))
