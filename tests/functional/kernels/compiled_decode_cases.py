"""What the compiler must make of ``decode_rows`` for sm_80, sm_90 and sm_100, run by test_triton.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbuffer_kernels.decode import decode_kernel
from dbuffer_kernels.launch import BLOCK
from tests.functional.kernels.compiled_cases import (
    WIDE_LOAD,
    WIDE_STORE,
    assert_no_spills,
    compile_for,
    num_wide,
    on_all,
)


@on_all
@pytest.mark.parametrize(("kind", "columns"), [(0, 128), (1, 256), (2, 32), (3, 128)])
def test_decode_rows_reads_16_codes_at_once_and_writes_their_values_in_two_accesses(
    kind: int, columns: int, architecture: int, tmp_path: Path
) -> None:
    pointers = {"rows": "*u8", "scales": "*u8" if kind > 1 else "*fp32", "out": "*bf16", "tensors": "*i64"}
    constants = {"KIND": kind, "COLUMNS": columns, "TENSORS": 8, "IS_WIDE": True}
    compiled = compile_for(decode_kernel, pointers, constants, architecture, block=BLOCK)
    assert num_wide(WIDE_LOAD, compiled) == 1
    assert num_wide(WIDE_STORE, compiled) == 2
    assert_no_spills(compiled, tmp_path)
