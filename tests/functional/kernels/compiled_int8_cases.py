"""What the compiler must make of ``int8_adamw`` for sm_90, run by test_triton.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dbuffer_kernels.int8_adamw import int8_adamw_kernel
from dbuffer_kernels.segments import STEP_BLOCK
from tests.functional.kernels.compiled_cases import IS_WHOLE, assert_moves, compile_for

# Of gradient and weight; whether the weight is in two halves, or has a bf16 copy.
KINDS = {"split": ("*bf16", "*bf16", True, False), "copy": ("*fp32", "*fp32", False, True)}


def compile_int8_adamw(kind: str, architecture: int, *, is_random: bool) -> Any:
    gradient, weight, is_split, has_model = KINDS[kind]
    pointers = {
        "gradient": gradient,
        "weight": weight,
        "exp_avg": "*u8",
        "exp_avg_sq": "*u8",
        "exp_avg_scale": "*fp32",
        "exp_avg_sq_scale": "*fp32",
        "plain_exp_avg": "*fp32",
        "plain_exp_avg_sq": "*fp32",
        "model": "*bf16",
        "remainder": "*i16",
        "clip": "*fp32",
        "rows": "*fp64",
        "keys": "*i64",
        "maps": "*fp32",
        "table": "*i64",
    }
    constants = {"HAS_CLIP": True, "HAS_MODEL": has_model, "IS_SPLIT": is_split, "IS_RANDOM": is_random}
    return compile_for(int8_adamw_kernel, pointers, constants, architecture, block=STEP_BLOCK)


# On sm_90 alone, and each once: these take seconds to compile.
INT8 = [("copy", True), ("split", False), ("copy", False)]


@pytest.mark.parametrize(("kind", "is_random"), INT8 if IS_WHOLE else INT8[:1])
def test_int8_adamw_moves_whole_blocks_without_spills_codes_in_8_byte_accesses_and_all_else_in_16(
    kind: str, is_random: bool, tmp_path: Path
) -> None:
    compiled = compile_int8_adamw(kind, 90, is_random=is_random)
    # Gradient and weight, with the remainder; gradient and weight in fp32, and the copy that is written.
    loads, stores = (3, 2) if kind == "split" else (4, 3)
    assert_moves(compiled, loads, stores, tmp_path)
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"\bld\.global\.v2\.b32", ptx)) == len(re.findall(r"\bst\.global\.v2\.b32", ptx)) == 2
    # In two branches, for the 8 elements of a thread: the values of both old codes, and what tells the new ones from
    # the next; the rest are moments that are not coded, weights of the masked branch, and scales.
    gathers, others = 2 * 8 * (6 if is_random else 4), 21 if kind == "split" else 53
    assert len(re.findall(r"\bld\.global\.b32", ptx)) <= gathers + others
