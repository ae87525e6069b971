"""AdamW steps, the halves of weights and checksums on each backend (``on_backend``)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from dbuffer_kernels import (
    AdamWBuffers,
    Segment,
    Segments,
    adamw,
    adamw_row,
    checksum,
    join_weight,
    split_weight,
)
from tests.unit.kernels.on_backend import (
    CHOOSE,
    DEVICE,
    INTERPRETS,
    KERNELS,
    count_launches,
    guarded,
    only_kernels,
    random,
)
from tests.unit.kernels.oracle import exact
from tests.unit.kernels.step_oracle import (
    Hyperparameters,
    awkward_values,
    bits_of,
    checksum_of,
    step_of,
)

__all__ = ["only_kernels"]

HOW = (Hyperparameters(), Hyperparameters(step=1, lr=0.5, betas=(0.3, 0.9), weight_decay=0.0, maximize=True))

# numpy, which does the interpreter's arithmetic, warns of infinities and NaNs.
with_infinities = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_guards(buffer: torch.Tensor, numel: int) -> None:
    assert (torch.cat([buffer[:3], buffer[3 + numel :]]) == 5).all()


# ---------------------------------------------------------------------- checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("numel", "first"), [(0, 5), (1, 0), (4097, 4095), (9001, 12_288), (12_288, 4096)])
def test_a_checksum_is_that_of_integer_arithmetic(dtype: torch.dtype, numel: int, first: int) -> None:
    source = (random(numel, torch.float32, 3) * 100).abs().to(dtype)
    found = checksum(source, key=2**64 - 3, first_element=first).item() % 2**64
    assert found == checksum_of(source, 2**64 - 3, first)


def test_programs_share_the_blocks_of_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbuffer_kernels.bit_sums.MAX_PROGRAMS", 2)
    source = random(4096 * 5 + 17, torch.float32, seed=8)
    assert checksum(source, key=7, first_element=9).item() % 2**64 == checksum_of(source, 7, 9)


# ---------------------------------------------------------------------- split and join


def test_a_weight_comes_back_from_its_two_halves_to_the_bit() -> None:
    main = awkward_values().to(DEVICE)
    (model_buffer, model), (rest_buffer, rest) = guarded(len(main), torch.bfloat16), guarded(len(main), torch.int16)
    out_buffer, out = guarded(len(main), torch.float32)
    versions = model._version, rest._version
    split_weight(main, model, rest)
    assert model._version > versions[0]
    assert rest._version > versions[1]
    assert join_weight(model, rest, out) is out
    is_nan = main.isnan().cpu().numpy()
    wanted = np.where(is_nan, bits_of(main) | 0x400000, bits_of(main))
    assert np.array_equal(bits_of(out), wanted)
    assert np.array_equal(model.isnan().cpu().numpy(), is_nan)
    for buffer in (model_buffer, rest_buffer, out_buffer):
        assert_guards(buffer, len(main))


def test_the_upper_half_is_the_nearest_bf16_and_ties_leave_zero() -> None:
    main = awkward_values()
    main = main[main.isfinite()].to(DEVICE)
    model, rest = torch.empty_like(main, dtype=torch.bfloat16), torch.empty_like(main, dtype=torch.int16)
    split_weight(main, model, rest)
    patterns = bits_of(main)
    assert np.array_equal(bits_of(model), (patterns >> 16) + ((patterns & 0xFFFF) >= 0x8000))


# ---------------------------------------------------------------------- AdamW

# The dtypes of gradient, weight and moments; and whether there is a model weight.
DTYPE_SETS = (
    (torch.float32, torch.float32, torch.float32, True),
    (torch.float32, torch.float32, torch.float32, False),
    (torch.bfloat16, torch.float32, torch.float32, True),
    (torch.float16, torch.float32, torch.bfloat16, True),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
    (torch.bfloat16, torch.float16, torch.float32, True),
    (torch.float64, torch.float64, torch.float64, True),
)


def make_buffers(numel: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, bool]) -> AdamWBuffers:
    gradient, weight, moments, has_model = dtypes
    return AdamWBuffers(
        random(numel, gradient, 1),
        random(numel, weight, 2),
        random(numel, moments, 3),
        random(numel, moments, 4).abs(),
        torch.full((numel,), 5.0, dtype=torch.bfloat16, device=DEVICE) if has_model else None,
    )


def rows_of(*how: Hyperparameters) -> torch.Tensor:
    rows = [
        adamw_row(h.step, lr=h.lr, betas=h.betas, eps=h.eps, weight_decay=h.weight_decay, maximize=h.maximize)
        for h in how
    ]
    return torch.tensor(rows, dtype=torch.float64, device=DEVICE)


def copied(buffers: AdamWBuffers) -> AdamWBuffers:
    return AdamWBuffers(**{name: tensor.clone() for name, tensor in buffers.named().items()})


@pytest.mark.parametrize(("dtypes", "clip"), CHOOSE(product(DTYPE_SETS, [None, 0.3])), ids=str)
def test_adamw_steps_each_segment_with_its_row_and_nothing_else(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, bool], clip: float | None
) -> None:
    numel = 9001
    # Whole blocks, parts of blocks, one element, neighbours, a gap.
    segments = (Segment(4099, 8999, 1), Segment(3, 4098, 0), Segment(4098, 4099, 1), Segment(9000, 9000, 0))
    buffers = make_buffers(numel, dtypes)
    before = copied(buffers)
    clip_tensor = None if clip is None else torch.tensor(clip, device=DEVICE)
    version = buffers.weight._version
    adamw(buffers, Segments(segments, numel), rows_of(*HOW), clip=clip_tensor)
    assert buffers.weight._version > version
    touched = np.zeros(numel, dtype=bool)
    for segment in segments:
        part = slice(segment.start, segment.stop)
        touched[part] = True
        factor = 1.0 if clip is None else float(np.float32(clip))
        moments = (exact(before.exp_avg[part]), exact(before.exp_avg_sq[part]))
        wanted = step_of(exact(before.gradient[part]), exact(before.weight[part]), moments, HOW[segment.row], factor)
        for name, tensor in buffers.named().items():
            if name != "gradient":
                wanted.assert_near(name, tensor[part], truncates_bf16=INTERPRETS)
    for name, tensor in buffers.named().items():
        assert np.array_equal(exact(tensor)[~touched], exact(before.named()[name])[~touched]), name


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_on_a_bf16_weight_with_remainder_equals_adamw_on_the_fp32_weight(moments: torch.dtype) -> None:
    numel = 5000
    plain = make_buffers(numel, (torch.float32, torch.float32, moments, False))
    model, rest = (torch.empty(numel, dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.int16))
    split_weight(plain.weight, model, rest)
    split = AdamWBuffers(plain.gradient, model, plain.exp_avg.clone(), plain.exp_avg_sq.clone(), remainder=rest)
    segments = Segments((Segment(0, 4999),), numel)
    for step in (1, 2, 3):
        rows = rows_of(Hyperparameters(step=step))
        adamw(plain, segments, rows)
        adamw(split, segments, rows)
    main = join_weight(model, rest, torch.empty_like(plain.weight))
    # The same kernel, except for the format of the weight; compiled, it may fuse another multiplication with an
    # addition.
    wanted = bits_of(plain.weight)
    assert np.max(np.abs(bits_of(main) - wanted)) <= (8 if KERNELS == "compiled" else 0)
    assert np.array_equal(bits_of(main)[4999:], wanted[4999:])


def test_adamw_starts_one_kernel_for_all_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch)
    buffers = make_buffers(6000, DTYPE_SETS[0])
    segments = Segments([Segment(0, 2048, 0), Segment(2048, 2050, 1), Segment(4000, 6000, 0)], 6000)
    adamw(buffers, segments, rows_of(*HOW))
    adamw(buffers, Segments([], 6000), rows_of(*HOW))
    assert started == ([] if KERNELS == "reference" else [1 + 1 + 2])


@with_infinities
def test_adamw_with_a_clip_that_is_nan_spoils_the_weights_and_not_their_neighbours() -> None:
    buffers = make_buffers(100, DTYPE_SETS[0])
    adamw(buffers, Segments([Segment(10, 20)], 100), rows_of(HOW[0]), clip=torch.tensor(float("nan"), device=DEVICE))
    assert buffers.weight[10:20].isnan().all()
    assert int(buffers.weight.isnan().sum()) == 10
