"""What the ops of an optimizer step refuse, and what they say about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dbuffer_kernels import (
    AdamWBuffers,
    Segment,
    Segments,
    adamw,
    join_weight,
    split_weight,
    sum_of_squares,
)

BF16, I16 = torch.bfloat16, torch.int16


def test_the_sum_of_squares_refuses_integers_strides_and_another_out() -> None:
    with pytest.raises(ValueError, match=r"found torch\.int64"):
        sum_of_squares(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=re.escape("strides (2,)")):
        sum_of_squares(torch.ones(6)[::2])
    for out in (torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)[::2]):
        with pytest.raises(ValueError, match=r"wanted contiguous float64 \(2,\) on cpu"):
            sum_of_squares(torch.ones(6), out)


HALVES = {
    "another main dtype": (torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=BF16), torch.ones(4, dtype=I16)),
    "another remainder dtype": (torch.ones(4), torch.ones(4, dtype=BF16), torch.ones(4, dtype=torch.int32)),
    "a strided main": (torch.ones(8)[::2], torch.ones(4, dtype=BF16), torch.ones(4, dtype=I16)),
    "a short model": (torch.ones(4), torch.ones(3, dtype=BF16), torch.ones(4, dtype=I16)),
    "a short remainder": (torch.ones(4), torch.ones(4, dtype=BF16), torch.ones(3, dtype=I16)),
    "a strided remainder": (torch.ones(4), torch.ones(4, dtype=BF16), torch.ones(8, dtype=I16)[::2]),
}


@pytest.mark.parametrize("name", HALVES)
def test_split_and_join_refuse(name: str) -> None:
    main, model, remainder = HALVES[name]
    with pytest.raises(ValueError, match=r"split_weight.*wanted|split_weight.*Pass"):
        split_weight(main, model, remainder)
    with pytest.raises(ValueError, match=r"join_weight.*wanted|join_weight.*Pass"):
        join_weight(model, remainder, main)


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(0, 5), Segment(4, 6)],
        [Segment(4, 6), Segment(0, 5)],
        [Segment(-1, 2)],
        [Segment(0, 11)],
        [Segment(0, 1, -1)],
    ],
    ids=str,
)
def test_segments_refuse_overlaps_and_what_leaves_the_buffer(segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match=r"Segments: Segment\(.*wanted disjoint ranges inside the buffer"):
        Segments(segments, 10)


def test_segments_drop_empty_ranges_and_sort_the_rest() -> None:
    segments = Segments([Segment(7, 9, 2), Segment(3, 3, 5), Segment(1, 7)], 10)
    assert segments.ranges == (Segment(1, 7), Segment(7, 9, 2))
    assert segments.num_rows == 3


ROWS = torch.zeros(1, 8, dtype=torch.float64)
WRONG_BUFFERS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "a short gradient": ({"gradient": torch.ones(3)}, r"gradient has shape \(3,\).*wanted contiguous \(4,\)"),
    "a strided moment": ({"exp_avg": torch.ones(8)[::2]}, r"exp_avg has shape \(4,\) and strides \(2,\)"),
    "a 2-D weight": ({"weight": torch.ones(2, 2)}, r"weight has shape \(2, 2\)"),
    "an integer moment": ({"exp_avg_sq": torch.ones(4, dtype=torch.int32)}, r"exp_avg_sq is torch\.int32"),
    "a remainder beside an fp32 weight": ({"remainder": torch.ones(4, dtype=I16)}, "wanted an int16 remainder"),
}


@pytest.mark.parametrize("name", WRONG_BUFFERS)
def test_the_buffers_of_adamw_refuse(name: str) -> None:
    changed, message = WRONG_BUFFERS[name]
    tensors = {key: torch.ones(4) for key in ("gradient", "weight", "exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match=message):
        AdamWBuffers(**(tensors | changed))


WRONG_ARGUMENTS: dict[str, tuple[Mapping[str, Any], str]] = {
    "rows in fp32": ({"rows": torch.zeros(1, 8)}, r"rows is torch\.float32 \(1, 8\)"),
    "short rows": ({"rows": torch.zeros(1, 7, dtype=torch.float64)}, r"\(1, 7\); wanted float64 \(rows, 8\)"),
    "too few rows": ({"segments": Segments([Segment(0, 4, 1)], 4)}, "1 rows on cpu for segments that use 2"),
    "segments of another buffer": (
        {"segments": Segments([Segment(0, 4)], 5)},
        r"buffers of \[4\] elements and segments of a buffer of 5",
    ),
    "a clip in fp64": ({"clip": torch.zeros((), dtype=torch.float64)}, r"clip is torch\.float64 \(\)"),
    "a clip of one dimension": ({"clip": torch.zeros(1)}, r"clip is torch\.float32 \(1,\)"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_adamw_refuses_beside_its_buffers(name: str) -> None:
    changed, message = WRONG_ARGUMENTS[name]
    arguments: dict[str, Any] = {"segments": Segments([Segment(0, 4)], 4), "rows": ROWS, "clip": None, **changed}
    buffers = AdamWBuffers(*(torch.ones(4) for _ in range(4)))
    with pytest.raises(ValueError, match=message):
        adamw(buffers, arguments["segments"], arguments["rows"], clip=arguments["clip"])
    assert buffers.weight.tolist() == [1] * 4
