"""What the compiler must make of the kernels of a Muon step for sm_80, sm_90 and sm_100, run by test_triton.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dbuffer_kernels import launch
from dbuffer_kernels.muon import muon_apply_kernel, muon_momentum_kernel
from dbuffer_kernels.segments import STEP_BLOCK
from tests.functional.kernels.compiled_cases import accesses_per_thread, assert_moves, compile_for, on_all

FP32, BF16, INT16 = torch.float32, torch.bfloat16, torch.int16
POINTERS = {FP32: "*fp32", BF16: "*bf16"}


def wide(*dtypes: torch.dtype) -> int:
    return sum(accesses_per_thread(dtype, STEP_BLOCK) for dtype in dtypes)


@on_all
@pytest.mark.parametrize("gradient", [FP32, BF16], ids=str)
def test_muon_momentum_moves_whole_blocks_in_16_byte_accesses_without_spills(
    gradient: torch.dtype, architecture: int, tmp_path: Path
) -> None:
    pointers = {"gradient": POINTERS[gradient], "momentum": "*fp32", "out": "*bf16", "clip": "*fp32",
                "rows": "*fp64", "table": "*i64"}  # fmt: skip
    constants = {"COMPUTE": launch.element_type(FP32), "HAS_CLIP": True}
    compiled = compile_for(muon_momentum_kernel, pointers, constants, architecture, block=STEP_BLOCK)
    assert_moves(compiled, wide(gradient, FP32), wide(FP32, BF16), tmp_path)


@on_all
@pytest.mark.parametrize("is_split", [True, False])
def test_muon_apply_moves_whole_blocks_in_16_byte_accesses_without_spills(
    is_split: bool, architecture: int, tmp_path: Path
) -> None:
    weight = BF16 if is_split else FP32
    pointers = {"update": "*bf16", "weight": POINTERS[weight], "model": "*bf16", "remainder": "*i16",
                "rows": "*fp64", "table": "*i64"}  # fmt: skip
    constants = {"COMPUTE": launch.element_type(FP32), "HAS_MODEL": not is_split, "IS_SPLIT": is_split}
    compiled = compile_for(muon_apply_kernel, pointers, constants, architecture, block=STEP_BLOCK)
    read = [BF16, weight, *[INT16] * is_split]
    written = [weight, *[INT16] * is_split, *[BF16] * (not is_split)]
    assert_moves(compiled, wide(*read), wide(*written), tmp_path)
