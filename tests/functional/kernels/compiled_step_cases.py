"""Properties of the compiled kernels of a step and of 8-bit weights, run by test_triton.py."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dbuffer_kernels import launch
from dbuffer_kernels.bit_sums import checksum_kernel
from dbuffer_kernels.muon import muon_apply_kernel, muon_momentum_kernel
from dbuffer_kernels.quantize import decode_kernel
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

# In the package these names are the ops, not the files.
ADAMW_FILE: Any = sys.modules["dbuffer_kernels.adamw"]
INT8_FILE: Any = sys.modules["dbuffer_kernels.int8_adamw"]
FP32, BF16, FP16, INT16, UINT8 = torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8
POINTERS = {FP32: "*fp32", BF16: "*bf16", FP16: "*fp16", torch.float64: "*fp64", INT16: "*i16"}
OF_STEPS = {"clip": "*fp32", "rows": "*fp64", "table": "*i64"}
COMPUTE = {"COMPUTE": FP32}
# The kernel's number for the tensor next to the weight: none, a BF16 copy, or an INT16 remainder.
FORMS = {None: 0, BF16: 1, INT16: 2}


@dataclass(frozen=True)
class Kernel:
    """A kernel, its pointers and constants, and the dtypes of all full-width tensors that it reads and writes once."""

    function: Any
    pointers: dict[str, str]
    reads: tuple[torch.dtype, ...]
    writes: tuple[torch.dtype, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    block: int = STEP_BLOCK

    def compiled(self, architecture: int, *, aligned: bool = True) -> Any:
        constants = {
            name: launch.element_type(value) if isinstance(value, torch.dtype) else value
            for name, value in self.constants.items()
        }
        return compile_for(self.function, self.pointers, constants, architecture, aligned=aligned, block=self.block)


def adamw_of(gradient: torch.dtype, weight: torch.dtype, moments: torch.dtype, last: torch.dtype | None) -> Kernel:
    """Compile an AdamW step; ``last`` is a bf16 copy of the weight, its remainder, or None."""
    pointers = {"gradient": POINTERS[gradient], "weight": POINTERS[weight], "exp_avg": POINTERS[moments],
                "exp_avg_sq": POINTERS[moments], "model": "*bf16", "remainder": "*i16", **OF_STEPS}  # fmt: skip
    constants = {**COMPUTE, "HAS_CLIP": True, "FORM": FORMS[last]}
    written = (weight, moments, moments, *([last] if last else []))
    read = (gradient, weight, moments, moments, *([last] if last is INT16 else []))
    return Kernel(ADAMW_FILE.adamw_kernel, pointers, read, written, constants)


def int8_adamw_of(gradient: torch.dtype, weight: torch.dtype, last: torch.dtype) -> Kernel:
    scales = dict.fromkeys(("exp_avg_scale", "exp_avg_sq_scale", "plain_exp_avg", "plain_exp_avg_sq", "maps"), "*fp32")
    pointers = {"gradient": POINTERS[gradient], "weight": POINTERS[weight], "exp_avg": "*u8", "exp_avg_sq": "*u8",
                **scales, "model": "*bf16", "remainder": "*i16", **OF_STEPS}  # fmt: skip
    constants = {"HAS_CLIP": True, "FORM": FORMS[last]}
    read = (gradient, weight, *([last] if last is INT16 else []))
    return Kernel(INT8_FILE.int8_adamw_kernel, pointers, read, (weight, last), constants)


def muon_momentum_of(gradient: torch.dtype) -> Kernel:
    pointers = {"gradient": POINTERS[gradient], "momentum": "*fp32", "out": "*bf16", **OF_STEPS}
    return Kernel(muon_momentum_kernel, pointers, (gradient, FP32), (FP32, BF16), {**COMPUTE, "HAS_CLIP": True})


def muon_apply_of(weight: torch.dtype, last: torch.dtype) -> Kernel:
    pointers = {"update": "*bf16", "weight": POINTERS[weight], "model": "*bf16", "remainder": "*i16",
                "rows": "*fp64", "table": "*i64"}  # fmt: skip
    constants = {**COMPUTE, "FORM": FORMS[last]}
    read = (BF16, weight, *([last] if last is INT16 else []))
    return Kernel(muon_apply_kernel, pointers, read, (weight, last), constants)


HALVES = {"main": "*fp32", "model": "*bf16", "remainder": "*i16"}
ADAMW = {
    "adamw": adamw_of(FP32, FP32, FP32, BF16),
    "adamw, no copy": adamw_of(FP32, FP32, FP32, None),
    "adamw, bf16 gradient": adamw_of(BF16, FP32, FP32, BF16),
    "adamw, bf16 moments": adamw_of(FP16, FP32, BF16, BF16),
    "adamw, all bf16": adamw_of(BF16, BF16, BF16, None),
    "adamw, halves": adamw_of(FP32, BF16, FP32, INT16),
    "adamw, bf16 halves": adamw_of(BF16, BF16, BF16, INT16),
}
KERNELS = {
    **ADAMW,
    "split_weight": Kernel(split_kernel, HALVES, (FP32,), (BF16, INT16), block=launch.BLOCK),
    "join_weight": Kernel(join_kernel, HALVES, (BF16, INT16), (FP32,), block=launch.BLOCK),
    "muon_momentum, fp32": muon_momentum_of(FP32),
    "muon_momentum, bf16": muon_momentum_of(BF16),
    "muon_apply, halves": muon_apply_of(BF16, INT16),
    "muon_apply, copy": muon_apply_of(FP32, BF16),
    "decode_rows": Kernel(
        decode_kernel,
        {"rows": "*u8", "scales": "*fp32", "out": "*bf16"},
        (UINT8,),
        (BF16,),
        {"IS_WIDE": True},
        launch.BLOCK,
    ),
}
# Only on sm_90, and each case once: these take seconds to compile.
INT8 = {
    "int8_adamw": int8_adamw_of(FP32, FP32, BF16),
    "int8_adamw, halves": int8_adamw_of(BF16, BF16, INT16),
}


def assert_whole_blocks_are_wide(kernel: Kernel, compiled: Any, folder: Path) -> None:
    loads, stores = (
        sum(accesses_per_thread(dtype, kernel.block) for dtype in moved) for moved in (kernel.reads, kernel.writes)
    )
    assert_moves(compiled, loads, stores, folder)


@on_all
@pytest.mark.parametrize("name", KERNELS if IS_WHOLE else [*KERNELS][::3])
def test_whole_blocks_move_in_16_byte_accesses_without_spills(name: str, architecture: int, tmp_path: Path) -> None:
    compiled = KERNELS[name].compiled(architecture)
    assert_whole_blocks_are_wide(KERNELS[name], compiled, tmp_path)
    if name in ("split_weight", "join_weight"):
        assert not re.findall(r"\b(?:mul|fma|cvt)\S*\.(?:b?f16|f32|f64)", compiled.asm["ptx"])


@pytest.mark.parametrize("name", INT8 if IS_WHOLE else [*INT8][:1])
def test_int8_adamw_moves_codes_in_8_byte_accesses_and_all_else_in_16(name: str, tmp_path: Path) -> None:
    compiled = INT8[name].compiled(90)
    assert_whole_blocks_are_wide(INT8[name], compiled, tmp_path)
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"\bld\.global\.v2\.b32", ptx)) == len(re.findall(r"\bst\.global\.v2\.b32", ptx)) == 2
    # In two branches, for the 8 elements of a thread: the values of both old codes, and what tells the new ones from
    # the next; the rest are moments that are not coded, weights of the masked branch, and scales.
    gathers, others = 2 * 8 * 4, 21 if "halves" in name else 53
    assert len(re.findall(r"\bld\.global\.b32", ptx)) <= gathers + others


@on_all
def test_adamw_on_pointers_of_unknown_alignment_has_no_16_byte_access(architecture: int) -> None:
    compiled = KERNELS["adamw"].compiled(architecture, aligned=False)
    assert num_wide(WIDE_LOAD, compiled) == num_wide(WIDE_STORE, compiled) == 0


@on_all
@pytest.mark.parametrize("name", ADAMW if IS_WHOLE else [*ADAMW][::3])
def test_adamw_divides_takes_roots_and_rounds_to_16_bits_correctly(name: str, architecture: int) -> None:
    ptx = ADAMW[name].compiled(architecture).asm["ptx"]
    assert set(re.findall(r"\b(?:div|sqrt|rsqrt|rcp)\.\S+", ptx)) == {"div.rn.f32", "sqrt.rn.f32"}
    narrowing = set(re.findall(r"cvt\.\w+\.(?:b?f16)\S*\.f32\b", ptx))
    # Weight halves are handled as bits.
    rounded = ADAMW[name].writes[INT16 in ADAMW[name].writes :]
    assert bool(narrowing) == (BF16 in rounded)
    assert all(op.startswith("cvt.rn.") for op in narrowing), narrowing


@pytest.mark.parametrize("name", ["adamw", "split_weight", "join_weight"])
def test_block_starts_are_64_bit_because_buffers_exceed_two_billion_elements(name: str) -> None:
    ttir = KERNELS[name].compiled(90).asm["ttir"]
    products = re.findall(r"arith\.muli .* : (\w+)\b(?! *<)", ttir)
    assert {product for product in products if product != "tensor"} == {"i64"}
    (program,) = re.findall(r"(%\S+) = tt\.get_program_id", ttir)
    assert not re.findall(rf"arith\.muli .*{program}\b.* : i32", ttir)


@on_all
def test_the_checksum_multiplies_integers_and_spills_nothing(architecture: int, tmp_path: Path) -> None:
    compiled = compile_for(checksum_kernel, {"source": "*i32", "partial": "*i64"}, {}, architecture)
    assert not re.search(r"\.f(?:32|64)\b", compiled.asm["ptx"])
    assert_no_spills(compiled, tmp_path)
