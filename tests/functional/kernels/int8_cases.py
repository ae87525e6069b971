"""Correctness of the Triton kernel of ``int8_adamw``, run by test_triton.py in its own process.

The step is compared with ``adamw`` on FP32 moments and a quantizer
written down here in numpy, element by element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dbuffer_kernels import (
    AdamWBuffers,
    CodedSegment,
    CodedSegments,
    Int8AdamWBuffers,
    Int8Moments,
    Segment,
    Segments,
    adamw,
    adamw_row,
    int8_adamw,
)
from dbuffer_kernels.dynamic_map import map_tables
from dbuffer_kernels.int8_adamw import code_below
from dbuffer_kernels.launch import launch
from tests.unit.kernels.int8_oracle import decoded, encoded
from tests.unit.kernels.on_backend import CHOOSE, DEVICE, only_kernels

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["only_kernels"]

NUMEL = 9001
# Whole programs of 4096, parts of them, a last partial block, plain moments in between, a gap.
SEGMENTS = (
    CodedSegment(0, 4096, 0),
    CodedSegment(4096, 4196, 1, plain=0),
    CodedSegment(4352, 8999, 1),
)


def random(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Magnitudes over six decades, as gradients have.
    return torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 6 - 6)


def make_moments() -> tuple[Int8Moments, torch.Tensor, torch.Tensor]:
    """Return coded moments, and their FP32 values (garbage beyond the coded segments)."""
    generator = torch.Generator().manual_seed(5)
    codes = [torch.randint(0, 256, (NUMEL,), generator=generator, dtype=torch.uint8).to(DEVICE) for _ in range(2)]
    scales = [torch.rand(36, generator=generator).to(DEVICE) for _ in range(2)]
    plain = [random(100, 8).to(DEVICE), random(100, 9).abs().to(DEVICE)]
    values = [decoded(codes[0], scales[0], signed=True), decoded(codes[1], scales[1], signed=False)]
    for value, own in zip(values, plain, strict=True):
        value[4096:4196] = own
    return Int8Moments(*codes, *scales, *plain), values[0], values[1]


def rows() -> torch.Tensor:
    found = [
        adamw_row(3, lr=0.02, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
        adamw_row(1, lr=0.5, betas=(0.3, 0.9), eps=1e-3, weight_decay=0.0, maximize=True),
    ]
    return torch.tensor(found, dtype=torch.float64, device=DEVICE)


def weights(kind: str) -> dict[str, Any]:
    weight = random(NUMEL, 2).to(DEVICE)
    if kind == "fp32":
        return {"weight": weight, "model_weight": torch.zeros(NUMEL, dtype=torch.bfloat16, device=DEVICE)}
    if kind == "split":
        rest = torch.arange(NUMEL, dtype=torch.int32).to(torch.int16).to(DEVICE)
        return {"weight": weight.bfloat16(), "remainder": rest}
    return {"weight": weight.bfloat16()}


@pytest.mark.parametrize("kind", CHOOSE(["split", "fp32", "bf16"]))
def test_int8_adamw_steps_as_adamw_does_and_stores_the_nearest_codes(kind: str) -> None:
    moments, exp_avg, exp_avg_sq = make_moments()
    before = [tensor.clone() for tensor in (moments.exp_avg, moments.exp_avg_scale)]
    gradient = random(NUMEL, 1).to(DEVICE)
    own, wanted = weights(kind), weights(kind)
    clip = torch.tensor(0.3, device=DEVICE)
    buffers = Int8AdamWBuffers(gradient, moments=moments, **own)
    version = buffers.weight._version
    int8_adamw(buffers, CodedSegments(SEGMENTS, NUMEL), rows(), clip=clip)
    assert buffers.weight._version > version
    plain = AdamWBuffers(gradient, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, **wanted)
    adamw(plain, Segments([Segment(s.start, s.stop, s.row) for s in SEGMENTS], NUMEL), rows(), clip=clip)
    for name, tensor in wanted.items():
        assert torch.equal(own[name], tensor), name
    assert torch.equal(moments.plain_exp_avg, exp_avg[4096:4196])
    assert torch.equal(moments.plain_exp_avg_sq, exp_avg_sq[4096:4196])
    for segment in SEGMENTS[::2]:
        part, blocks = slice(segment.start, segment.stop), slice(segment.start // 256, -(-segment.stop // 256))
        for number, (values, codes, scales) in enumerate(
            (
                (exp_avg, moments.exp_avg, moments.exp_avg_scale),
                (exp_avg_sq, moments.exp_avg_sq, moments.exp_avg_sq_scale),
            )
        ):
            found = encoded(values[part], signed=number == 0)
            assert np.array_equal(codes[part].cpu().numpy(), found.codes)
            assert np.array_equal(scales[blocks].cpu().numpy(), found.scales)
    # The kernel writes neither the gap nor elements behind the last segment.
    assert torch.equal(moments.exp_avg[4196:4352], before[0][4196:4352])
    assert torch.equal(moments.exp_avg[8999:], before[0][8999:])
    assert torch.equal(moments.exp_avg_scale[16:17], before[1][16:17])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_int8_adamw_keeps_zero_blocks_zero_and_a_nan_in_its_block() -> None:
    numel = 4096
    zeros = [torch.zeros(numel, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    scales = [torch.zeros(16, device=DEVICE) for _ in range(2)]
    nothing = [torch.zeros(0, device=DEVICE) for _ in range(2)]
    moments = Int8Moments(*zeros, *scales, *nothing)
    gradient, weight = torch.zeros(numel, device=DEVICE), torch.ones(numel, device=DEVICE)
    gradient[600] = float("nan")
    segments = CodedSegments([CodedSegment(0, numel)], numel)
    int8_adamw(Int8AdamWBuffers(gradient, weight, moments), segments, rows()[:1])
    is_spoiled = torch.arange(16, device=DEVICE) == 2
    for scale in scales:
        assert torch.equal(scale.isnan(), is_spoiled)
        assert not scale[~is_spoiled].any()
    assert weight.isnan().nonzero().tolist() == [[600]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_int8_adamw_keeps_small_squares_nonzero_and_finite_neighbours_of_overflows() -> None:
    numel = 4096 + 700
    codes = [torch.full((numel,), zero, dtype=torch.uint8, device=DEVICE) for zero in (127, 0)]
    scales = [torch.zeros(19, device=DEVICE) for _ in range(2)]
    nothing = [torch.zeros(0, device=DEVICE) for _ in range(2)]
    moments = Int8Moments(*codes, *scales, *nothing)
    gradient = torch.zeros(numel, device=DEVICE)
    gradient[::3] = 1.0
    gradient[0], gradient[300], gradient[4800 - 5] = 1e15, -1e30, 1e30
    exp_avg, exp_avg_sq = torch.zeros_like(gradient), torch.zeros_like(gradient)
    weight = torch.ones(numel, device=DEVICE)
    plain = AdamWBuffers(gradient, weight.clone(), exp_avg, exp_avg_sq)
    segments = CodedSegments([CodedSegment(0, numel)], numel)
    int8_adamw(Int8AdamWBuffers(gradient, weight, moments), segments, rows()[:1])
    adamw(plain, Segments([Segment(0, numel, 0)], numel), rows()[:1])
    assert torch.equal(weight, plain.weight)
    for number, values in enumerate((exp_avg, exp_avg_sq)):
        found = encoded(values, signed=number == 0)
        assert np.array_equal(codes[number].cpu().numpy(), found.codes)
        assert np.array_equal(scales[number].cpu().numpy(), found.scales)
    assert torch.equal(codes[1] > 0, exp_avg_sq > 0)
    assert torch.stack(scales).isfinite().all()


def below_kernel(ratios: tl.tensor, codes: tl.tensor, MAP: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Write the result of ``code_below`` for each ratio."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes + index, code_below(tl.load(ratios + index), MAP))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("signed", [True, False])
def test_a_computed_code_is_the_one_that_a_search_finds_or_the_one_before(signed: bool) -> None:
    tables = map_tables(torch.device("cpu"))
    values, middles = tables[0 if signed else 1], tables[2 if signed else 3][:-1]
    # The code is monotonic in the ratio. If it is right at both ends of an interval, it is right inside: test all ends.
    ends = torch.cat([values, middles])
    above, below = torch.nextafter(ends, torch.tensor(9.0)), torch.nextafter(ends, torch.tensor(-9.0))
    drawn = (torch.rand(9000) * 2 - 1) * 10 ** (-9 * torch.rand(9000))
    odd = torch.tensor([0.0, -0.0, 1e-40, 1e-30, -1e-30, 1.0, -1.0, 1e19, -1e19, float("inf"), -float("inf")])
    ratios = torch.cat([ends, above, below, drawn, odd])
    ratios = (ratios if signed else ratios[ratios >= 0]).sort().values
    padded = torch.nn.functional.pad(ratios, (0, -len(ratios) % 4096)).to(DEVICE)
    codes = torch.zeros(len(padded), dtype=torch.int32, device=DEVICE)
    launch(below_kernel, len(padded) // 4096, codes.device, padded, codes, MAP=0 if signed else 256)
    found = codes[: len(ratios)].cpu()
    wanted = torch.bucketize(ratios, middles)
    assert set((wanted - found).tolist()) == {0, 1}
    assert found.min() >= 0
    assert found.max() <= 254
    assert (found.diff() >= 0).all()
