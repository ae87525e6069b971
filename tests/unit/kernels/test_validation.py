"""What the ops refuse, and what they say about it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from dbuffer_kernels import accumulate, cast_copy, pack

both = pytest.mark.parametrize("op", [cast_copy, accumulate], ids=["cast_copy", "accumulate"])
Op = Callable[..., torch.Tensor]


@both
def test_another_number_of_elements_is_refused_with_both_numbers(op: Op) -> None:
    out = torch.zeros(7)
    with pytest.raises(ValueError, match=re.escape("source has 6 elements (2, 3), out has 7 (7,)")):
        op(torch.ones(2, 3), out)
    assert not out.any()


@both
def test_a_strided_out_is_refused_with_its_strides(op: Op) -> None:
    with pytest.raises(ValueError, match=re.escape("strides (1, 3)")):
        op(torch.ones(6), torch.zeros(2, 3).t())


@both
def test_tensors_on_two_devices_are_refused_with_both_devices(op: Op) -> None:
    with pytest.raises(ValueError, match="source is on cpu, out on meta"):
        op(torch.ones(6), torch.zeros(6, device="meta"))


@both
@pytest.mark.parametrize(
    ("source_dtype", "out_dtype"),
    [(torch.int32, torch.float32), (torch.float32, torch.int32), (torch.int8, torch.int8)],
)
def test_arithmetic_on_other_dtypes_is_refused_with_both_dtypes(
    op: Op, source_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=f"from {source_dtype} to {out_dtype}"):
        op(torch.ones(6, dtype=source_dtype), torch.zeros(6, dtype=out_dtype), scale=2.0)


def test_integers_cannot_be_accumulated_even_with_scale_one() -> None:
    with pytest.raises(ValueError, match=r"accumulate: cannot compute from torch\.int32"):
        accumulate(torch.ones(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"source 0: cannot compute from torch\.int32"):
        pack([torch.ones(6, dtype=torch.int32)], torch.zeros(6, dtype=torch.int32), [0], accumulate=True)


@pytest.mark.parametrize(
    "out", [torch.zeros(3, 3), torch.zeros(()), torch.zeros(6)[::2]], ids=["2-D", "0-D", "strided"]
)
def test_pack_wants_a_flat_buffer(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="wanted a contiguous 1-D buffer"):
        pack([torch.ones(2)], out, [0])


@pytest.mark.parametrize("offsets", [[], [0, 3]])
def test_pack_wants_one_offset_for_each_source(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match=f"found 1 sources and {len(offsets)} offsets"):
        pack([torch.ones(2)], torch.zeros(6), offsets)


@pytest.mark.parametrize(("offset", "numel"), [(-1, 2), (5, 2), (7, 0), (0, 7)])
def test_pack_refuses_a_range_out_of_bounds_and_names_the_source(offset: int, numel: int) -> None:
    out = torch.zeros(6)
    text = f"source 1 of shape ({numel},) would take elements {offset} to {offset + numel} of an out that has 6"
    with pytest.raises(ValueError, match=re.escape(text)):
        pack([torch.ones(0), torch.ones(numel)], out, [3, offset])
    assert not out.any()


@pytest.mark.parametrize("offsets", [[0, 2, 9], [2, 0, 9], [9, 0, 2], [0, 9, 0], [9, 2, 4]])
def test_pack_refuses_ranges_that_overlap_in_any_order(offsets: list[int]) -> None:
    out = torch.zeros(12)
    with pytest.raises(ValueError, match="wanted disjoint ranges"):
        pack([torch.ones(3)] * 3, out, offsets)
    assert not out.any()


def test_pack_names_both_sources_of_an_overlap() -> None:
    text = "source 2 takes elements 1 to 4 of out, source 0 3 to 6"
    with pytest.raises(ValueError, match=re.escape(text)):
        pack([torch.ones(3), torch.ones(0), torch.ones(3)], torch.zeros(6), [3, 3, 1])


def test_pack_accepts_ranges_that_touch_and_empty_sources_inside_others() -> None:
    out = torch.zeros(6)
    pack([torch.ones(3), torch.ones(0), torch.full((2,), 2.0), torch.ones(0)], out, [3, 4, 1, 6])
    assert out.tolist() == [0, 2, 2, 1, 1, 1]


def test_pack_refuses_a_source_on_another_device_or_of_another_kind_by_its_number() -> None:
    with pytest.raises(ValueError, match="source 1 is on meta, out on cpu"):
        pack([torch.ones(1), torch.ones(1, device="meta")], torch.zeros(6), [0, 1])
    with pytest.raises(ValueError, match=r"source 1: cannot compute from torch\.int64 to torch\.float32"):
        pack([torch.ones(1), torch.ones(1, dtype=torch.int64)], torch.zeros(6), [0, 1])
