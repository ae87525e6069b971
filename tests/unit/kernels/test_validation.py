"""What the ops refuse, and what they say about it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from dbuffer_kernels import accumulate, cast_copy

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
