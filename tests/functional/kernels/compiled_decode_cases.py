"""What the compiler must make of ``decode_rows`` for sm_80, sm_90 and sm_100, run by test_triton.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbuffer_kernels.decode import decode_kernel
from tests.functional.kernels.compiled_cases import assert_moves, compile_for, on_all


def compile_decode(kind: int, columns: int, architecture: int) -> Any:
    pointers = {"rows": "*u8", "scales": "*u8" if kind > 1 else "*fp32", "out": "*bf16", "tensors": "*i64"}
    constants = {"KIND": kind, "COLUMNS": columns, "TENSORS": 8, "IS_WIDE": True}
    return compile_for(decode_kernel, pointers, constants, architecture)


@on_all
@pytest.mark.parametrize(("kind", "columns"), [(0, 128), (1, 256), (2, 32), (3, 128)])
def test_decode_rows_reads_16_codes_at_once_and_writes_their_values_in_two_accesses(
    kind: int, columns: int, architecture: int, tmp_path: Path
) -> None:
    assert_moves(compile_decode(kind, columns, architecture), 1, 2, tmp_path)
