"""The ops check their arguments before they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dbuffer_kernels import (
    AdamWBuffers,
    Segment,
    Segments,
    accumulate,
    adamw,
    cast_copy,
    join_weight,
    split_weight,
)

F64, BF16, I16, I32 = torch.float64, torch.bfloat16, torch.int16, torch.int32
Call = Callable[..., object]


def of_pairs(op: Callable[..., object]) -> dict[str, tuple[Call, str]]:
    """Return wrong calls of an op with a source and an out, and the words that the error has to contain."""
    found: dict[str, tuple[Call, str]] = {
        "another number": (lambda: op(torch.ones(2, 3), torch.zeros(7)), r"\(2, 3\).*\(7,\)"),
        "a strided out": (lambda: op(torch.ones(6), torch.zeros(2, 3).t()), r"strides \(1, 3\)"),
        "two devices": (lambda: op(torch.ones(6), torch.zeros(6, device="meta")), "cpu.*meta"),
    }
    for source, out in ((I32, torch.float32), (torch.float32, I32), (torch.int8, torch.int8)):
        found[f"{source} to {out}"] = (
            lambda source=source, out=out: op(torch.ones(6, dtype=source), torch.zeros(6, dtype=out), scale=2.0),
            f"from {source} to {out}",
        )
    return {f"{op.__name__} {name}": call for name, call in found.items()}


HALVES = {
    "another main dtype": (torch.ones(4, dtype=F64), torch.ones(4, dtype=BF16), torch.ones(4, dtype=I16)),
    "another remainder dtype": (torch.ones(4), torch.ones(4, dtype=BF16), torch.ones(4, dtype=I32)),
    "a strided main": (torch.ones(8)[::2], torch.ones(4, dtype=BF16), torch.ones(4, dtype=I16)),
    "a short model": (torch.ones(4), torch.ones(3, dtype=BF16), torch.ones(4, dtype=I16)),
    "a short remainder": (torch.ones(4), torch.ones(4, dtype=BF16), torch.ones(3, dtype=I16)),
    "a strided remainder": (torch.ones(4), torch.ones(4, dtype=BF16), torch.ones(8, dtype=I16)[::2]),
}


def buffers_with(**changed: torch.Tensor) -> AdamWBuffers:
    return AdamWBuffers(**({key: torch.ones(4) for key in ("gradient", "weight", "exp_avg", "exp_avg_sq")} | changed))


def step_with(**changed: Any) -> None:
    buffers, rows = buffers_with(), torch.zeros(1, 8, dtype=F64)
    arguments: dict[str, Any] = {"segments": Segments([Segment(0, 4)], 4), "rows": rows, "clip": None} | changed
    try:
        adamw(buffers, arguments["segments"], arguments["rows"], clip=arguments["clip"])
    finally:
        assert buffers.weight.tolist() == [1] * 4


REFUSED: dict[str, tuple[Call, str]] = {
    **of_pairs(cast_copy),
    **of_pairs(accumulate),
    "accumulate integers": (
        lambda: accumulate(torch.ones(6, dtype=I32), torch.zeros(6, dtype=I32)), "accumulate.*int32",
    ),
    **{f"split {name}": (lambda halves=halves: split_weight(*halves), "split_weight")
       for name, halves in HALVES.items()},
    **{
        f"join {name}": (lambda halves=halves: join_weight(halves[1], halves[2], halves[0]), "join_weight")
        for name, halves in HALVES.items()
    },
    **{
        f"segments {segments}": (lambda segments=segments: Segments(segments, 10), "disjoint ranges inside the buffer")
        for segments in (
            [Segment(0, 5), Segment(4, 6)], [Segment(4, 6), Segment(0, 5)], [Segment(-1, 2)], [Segment(0, 11)],
            [Segment(0, 1, -1)],
        )
    },
    "a short gradient": (lambda: buffers_with(gradient=torch.ones(3)), r"gradient .*\(3,\).*wanted.*\(4,\)"),
    "a strided moment": (lambda: buffers_with(exp_avg=torch.ones(8)[::2]), r"exp_avg .*strides \(2,\)"),
    "a 2-D weight": (lambda: buffers_with(weight=torch.ones(2, 2)), r"weight .*\(2, 2\)"),
    "an integer moment": (lambda: buffers_with(exp_avg_sq=torch.ones(4, dtype=I32)), r"exp_avg_sq is torch\.int32"),
    "a remainder of fp32": (lambda: buffers_with(remainder=torch.ones(4, dtype=I16)), "weight .*wanted.*bfloat16"),
    "a remainder and a copy": (
        lambda: buffers_with(
            weight=torch.ones(4, dtype=BF16), remainder=torch.ones(4, dtype=I16), model_weight=torch.ones(4)
        ),
        "no other one",
    ),
    "rows in fp32": (lambda: step_with(rows=torch.zeros(1, 8)), r"rows.*float32 \(1, 8\)"),
    "short rows": (lambda: step_with(rows=torch.zeros(1, 7, dtype=F64)), r"\(1, 7\).*wanted.*\(1, 8\)"),
    "too few rows": (lambda: step_with(segments=Segments([Segment(0, 4, 1)], 4)), "that use 2"),
    "other segments": (lambda: step_with(segments=Segments([Segment(0, 4)], 5)), r"\(4,\).*wanted.*\(5,\)"),
    "a clip in fp64": (lambda: step_with(clip=torch.zeros((), dtype=F64)), r"clip is torch\.float64 \(\)"),
    "a clip of one dimension": (lambda: step_with(clip=torch.zeros(1)), r"clip is torch\.float32 \(1,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_segments_drop_empty_ranges_and_sort_the_rest() -> None:
    segments = Segments([Segment(7, 9, 2), Segment(3, 3, 5), Segment(1, 7)], 10)
    assert segments.ranges == (Segment(1, 7), Segment(7, 9, 2))
    assert segments.num_rows == 3
