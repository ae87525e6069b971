"""What the compiler must make of the kernels of an optimizer step for three architectures, run by test_triton.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dbuffer_kernels import launch
from dbuffer_kernels.bit_sums import checksum_kernel
from dbuffer_kernels.norm import MAX_PROGRAMS, squares_kernel, total_kernel
from dbuffer_kernels.segments import STEP_BLOCK
from dbuffer_kernels.split import join_kernel, split_kernel
from tests.functional.kernels.compiled_cases import (
    IS_WHOLE,
    WIDE_LOAD,
    WIDE_STORE,
    accesses_per_thread,
    assert_moves,
    assert_no_spills,
    compile_for,
    num_wide,
    on_all,
)

# The package shows the op of this name, not the file.
ADAMW_FILE: Any = __import__("sys").modules["dbuffer_kernels.adamw"]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
POINTERS = {FP32: "*fp32", BF16: "*bf16", FP16: "*fp16", torch.float64: "*fp64", torch.int16: "*i16"}


@dataclass(frozen=True)
class Dtypes:
    """Of the buffers of one AdamW step."""

    gradient: torch.dtype
    weight: torch.dtype
    moments: torch.dtype
    has_model: bool = False
    is_split: bool = False

    def num_loads(self) -> int:
        """Count the 16-byte loads of one thread in a whole block."""
        read = [self.gradient, self.weight, self.moments, self.moments] + [torch.int16] * self.is_split
        return sum(accesses_per_thread(dtype, STEP_BLOCK) for dtype in read)

    def num_stores(self) -> int:
        """Count the 16-byte stores of one thread in a whole block."""
        written = [self.weight, self.moments, self.moments] + [torch.int16] * self.is_split + [BF16] * self.has_model
        return sum(accesses_per_thread(dtype, STEP_BLOCK) for dtype in written)


DTYPES = (
    Dtypes(FP32, FP32, FP32, has_model=True),
    Dtypes(FP32, FP32, FP32),
    Dtypes(BF16, FP32, FP32, has_model=True),
    Dtypes(FP16, FP32, BF16, has_model=True),
    Dtypes(BF16, BF16, BF16),
    Dtypes(FP32, BF16, FP32, is_split=True),
    Dtypes(BF16, BF16, BF16, is_split=True),
)


def compile_adamw(dtypes: Dtypes, architecture: int, *, aligned: bool = True) -> Any:
    pointers = {
        "gradient": POINTERS[dtypes.gradient],
        "weight": POINTERS[dtypes.weight],
        "exp_avg": POINTERS[dtypes.moments],
        "exp_avg_sq": POINTERS[dtypes.moments],
        "model": "*bf16",
        "remainder": "*i16",
        "clip": "*fp32",
        "rows": "*fp64",
        "table": "*i64",
    }
    constants = {
        "COMPUTE": launch.element_type(FP32),
        "HAS_CLIP": True,
        "HAS_MODEL": dtypes.has_model,
        "IS_SPLIT": dtypes.is_split,
    }
    kernel = ADAMW_FILE.adamw_kernel
    return compile_for(kernel, pointers, constants, architecture, aligned=aligned, block=STEP_BLOCK)


def compile_squares(dtype: torch.dtype, architecture: int) -> Any:
    pointers = {"source": POINTERS[dtype], "partial": "*fp64"}
    return compile_for(squares_kernel, pointers, {"COMPUTE": launch.element_type(FP32)}, architecture)


def compile_halves(kernel: Any, architecture: int) -> Any:
    pointers = {"main": "*fp32", "model": "*bf16", "remainder": "*i16"}
    return compile_for(kernel, pointers, {}, architecture)


@on_all
@pytest.mark.parametrize("dtypes", DTYPES if IS_WHOLE else DTYPES[::3], ids=str)
def test_adamw_moves_whole_blocks_in_16_byte_accesses_without_spills(
    dtypes: Dtypes, architecture: int, tmp_path: Path
) -> None:
    compiled = compile_adamw(dtypes, architecture)
    assert_moves(compiled, dtypes.num_loads(), dtypes.num_stores(), tmp_path)


@on_all
def test_adamw_on_pointers_of_unknown_alignment_has_no_16_byte_access(architecture: int) -> None:
    compiled = compile_adamw(DTYPES[0], architecture, aligned=False)
    assert num_wide(WIDE_LOAD, compiled) == num_wide(WIDE_STORE, compiled) == 0


@on_all
def test_adamw_divides_and_takes_roots_with_correct_rounding(architecture: int) -> None:
    ptx = compile_adamw(DTYPES[0], architecture).asm["ptx"]
    assert set(re.findall(r"\b(?:div|sqrt|rsqrt|rcp)\.\S+", ptx)) == {"div.rn.f32", "sqrt.rn.f32"}


@on_all
def test_adamw_rounds_to_16_bits_to_nearest_even(architecture: int) -> None:
    for dtypes in DTYPES:
        ptx = compile_adamw(dtypes, architecture).asm["ptx"]
        narrowing = set(re.findall(r"cvt\.\w+\.(?:b?f16)\S*\.f32\b", ptx))
        is_needed = dtypes.has_model or BF16 in (dtypes.moments, *[dtypes.weight] * (not dtypes.is_split))
        assert bool(narrowing) == is_needed
        assert all(op.startswith("cvt.rn.") for op in narrowing), narrowing


@on_all
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_the_sum_of_squares_reads_whole_blocks_in_16_byte_accesses_without_spills(
    dtype: torch.dtype, architecture: int, tmp_path: Path
) -> None:
    compiled = compile_squares(dtype, architecture)
    assert_moves(compiled, accesses_per_thread(dtype), 0, tmp_path)


@on_all
def test_the_second_stage_of_the_sum_adds_in_fp64_without_spills(architecture: int, tmp_path: Path) -> None:
    compiled = compile_for(total_kernel, {"partial": "*fp64", "out": "*fp64"}, {}, architecture, block=MAX_PROGRAMS)
    assert re.search(r"\badd\.(?:rn\.)?f64", compiled.asm["ptx"])
    assert not re.search(r"\badd\.(?:rn\.)?f32", compiled.asm["ptx"])
    assert_no_spills(compiled, tmp_path)


@on_all
@pytest.mark.parametrize("kernel", [split_kernel, join_kernel])
def test_split_and_join_move_bits_in_16_byte_accesses_without_converting_them(
    kernel: Any, architecture: int, tmp_path: Path
) -> None:
    compiled = compile_halves(kernel, architecture)
    halves, whole = 2 * accesses_per_thread(BF16), accesses_per_thread(FP32)
    assert_moves(compiled, *((whole, halves) if kernel is split_kernel else (halves, whole)), tmp_path)
    assert not re.findall(r"\b(?:mul|fma|cvt)\S*\.(?:b?f16|f32|f64)", compiled.asm["ptx"])


@pytest.mark.parametrize("name", ["adamw", "squares", "split", "join"])
def test_block_starts_are_64_bit_because_buffers_exceed_two_billion_elements(name: str) -> None:
    compiled = {
        "adamw": lambda: compile_adamw(DTYPES[0], 90),
        "squares": lambda: compile_squares(FP32, 90),
        "split": lambda: compile_halves(split_kernel, 90),
        "join": lambda: compile_halves(join_kernel, 90),
    }[name]()
    products = re.findall(r"arith\.muli .* : (\w+)\b(?! *<)", compiled.asm["ttir"])
    scalars = [product for product in products if product != "tensor"]
    assert set(scalars) == {"i64"}
    (program,) = re.findall(r"(%\S+) = tt\.get_program_id", compiled.asm["ttir"])
    assert not re.findall(rf"arith\.muli .*{program}\b.* : i32", compiled.asm["ttir"])


@on_all
def test_the_checksum_multiplies_integers_and_spills_nothing(architecture: int, tmp_path: Path) -> None:
    compiled = compile_for(checksum_kernel, {"source": "*i32", "partial": "*i64"}, {}, architecture)
    assert not re.search(r"\.f(?:32|64)\b", compiled.asm["ptx"])
    assert_no_spills(compiled, tmp_path)
