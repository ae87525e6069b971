"""The ops of a Muon step on each backend (``on_backend``)."""

from __future__ import annotations

import pytest
import torch

from dbuffer_kernels import MuonWeights, Segment, Segments, join_weight, muon_apply, muon_momentum
from dbuffer_kernels import split_weight as split
from tests.unit.kernels.on_backend import DEVICE, only_kernels

__all__ = ["only_kernels"]

NUMEL = 9001
# Whole blocks, parts of blocks, one element, neighbours, a gap.
SEGMENTS = (Segment(4099, 8999, 1), Segment(3, 4098, 0), Segment(4098, 4099, 1), Segment(9000, 9000, 0))
FP32, BF16 = torch.float32, torch.bfloat16


def random(dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def rows(*values: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def close(found: torch.Tensor, wanted: torch.Tensor, term: torch.Tensor | None = None) -> bool:
    """Compare two results of one formula up to rounding of a product and a sum, or two casts to bf16."""
    # The interpreter truncates where the GPU rounds.
    unit = 2**-6 if BF16 in (found.dtype, wanted.dtype) else 2**-21
    # The rounding error of a large term remains if the sum is small.
    size = wanted.double().abs() + (0 if term is None else term.double().abs())
    return bool(((found.double() - wanted.double()).abs() <= unit * size + 2**-20).all())


@pytest.mark.parametrize(
    ("gradient", "momentum", "clip"), [(FP32, FP32, None), (BF16, FP32, 0.3), (BF16, BF16, 0.3)], ids=str
)
def test_muon_momentum_is_torchs_lerp_in_each_segment_and_nothing_else(
    gradient: torch.dtype, momentum: torch.dtype, clip: float | None
) -> None:
    g, kept, out = random(gradient, 1), random(momentum, 2), torch.full((NUMEL,), 5.0, dtype=BF16, device=DEVICE)
    before = kept.clone()
    factor = None if clip is None else torch.tensor(clip, device=DEVICE)
    muon_momentum(g, kept, out, Segments(SEGMENTS, NUMEL), rows((0.95, 1.0), (0.4, 0.0)), clip=factor)
    touched = torch.zeros(NUMEL, dtype=torch.bool, device=DEVICE)
    for segment in SEGMENTS:
        part = slice(segment.start, segment.stop)
        touched[part] = True
        mu = (0.95, 0.4)[segment.row]
        scaled = g[part].float() * (1.0 if clip is None else clip)
        wanted = before[part].float().lerp(scaled, 1 - mu)
        # With a momentum of 16 bits, torch also rounds differences to 16 bits.
        terms = before[part].float().abs() + scaled.abs() if momentum is BF16 else None
        assert close(kept[part], wanted, terms)
        assert close(out[part], scaled.lerp(kept[part].float(), mu) if segment.row == 0 else kept[part], terms)
    assert torch.equal(kept[~touched], before[~touched])
    assert (out[~touched] == 5).all()


@pytest.mark.parametrize("weight", [FP32, BF16], ids=str)
@pytest.mark.parametrize("has_model", [True, False])
def test_muon_apply_decays_and_adds_in_each_segment_and_nothing_else(weight: torch.dtype, has_model: bool) -> None:
    update, w = random(BF16, 3), random(weight, 4)
    before = w.clone()
    model = torch.full((NUMEL,), 5.0, dtype=BF16, device=DEVICE) if has_model else None
    version = w._version
    muon_apply(update, MuonWeights(w, model), Segments(SEGMENTS, NUMEL), rows((0.998, -0.02), (1.0, 0.5)))
    assert w._version > version
    touched = torch.zeros(NUMEL, dtype=torch.bool, device=DEVICE)
    for segment in SEGMENTS:
        part = slice(segment.start, segment.stop)
        touched[part] = True
        decay, alpha = ((0.998, -0.02), (1.0, 0.5))[segment.row]
        decayed = (before[part].float() * decay).to(weight).float()
        assert close(w[part], decayed + alpha * update[part].float(), decayed)
        if model is not None:
            assert close(model[part], w[part])
    assert torch.equal(w[~touched], before[~touched])
    assert model is None or bool((model[~touched] == 5).all())


def test_muon_apply_on_a_bf16_weight_with_remainder_equals_that_on_the_fp32_weight() -> None:
    update, w = random(BF16, 5), random(FP32, 6)
    model, rest = (torch.empty(NUMEL, dtype=dtype, device=DEVICE) for dtype in (BF16, torch.int16))
    split(w, model, rest)
    segments = Segments(SEGMENTS, NUMEL)
    for values in (MuonWeights(w), MuonWeights(model, remainder=rest)):
        muon_apply(update, values, segments, rows((0.998, -0.02), (1.0, 0.5)))
    assert torch.equal(join_weight(model, rest, torch.empty_like(w)), w)
