"""Properties of each compiled Triton kernel on three architectures, run by test_triton.py in its own process.

Access widths, spills, rounding and index widths are read from the PTX; no GPU is needed, but TRITON_INTERPRET must be
off before Triton is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from dbuffer_kernels import launch
from dbuffer_kernels.elementwise_kernels import elementwise_kernel
from dbuffer_kernels.launch import compute_dtype

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
PAIRS = (
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
)
WIDE_LOAD = re.compile(r"\bld\.global\.(?:v4\.b32|v2\.b64)")
WIDE_STORE = re.compile(r"\bst\.global\.(?:v4\.b32|v2\.b64)")

# test_triton.py runs a third of the dtypes on one architecture in `make test`, and all on all of them in nightly tests.
IS_WHOLE = os.environ.get("GRID", "whole") == "whole"
on_all = pytest.mark.parametrize("architecture", [80, 90, 100] if IS_WHOLE else [90])
by_pair = pytest.mark.parametrize(("source", "out"), PAIRS if IS_WHOLE else PAIRS[::3], ids=lambda dtype: SHORT[dtype])
by_elementwise = pytest.mark.parametrize("adds", [False, True], ids=["cast", "accumulate"])


def compile_elementwise(
    source: torch.dtype, out: torch.dtype, architecture: int, *, adds: bool, aligned: bool = True
) -> Any:
    constants = {"COMPUTE": launch.element_type(compute_dtype(source, out)), "ADDS": adds}
    pointers = {"source": f"*{SHORT[source]}", "out": f"*{SHORT[out]}"}
    return compile_for(elementwise_kernel, pointers, constants, architecture, aligned=aligned)


def compile_for(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    architecture: int,
    *,
    aligned: bool = True,
    block: int = launch.BLOCK,
) -> Any:
    """Compile as a launch would: pointers 16-byte aligned or not, scalars of the types their annotations fix."""
    function = launch.jit(kernel)
    constants = {**constants, "BLOCK": block}
    signature = {p.name: "constexpr" if p.is_constexpr else p.annotation_type for p in function.params} | pointers
    positions = [function.arg_names.index(name) for name in pointers]
    hints = {(position,): [["tt.divisibility", 16]] for position in positions if aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(launch.OPTIONS))


def num_wide(pattern: re.Pattern[str], compiled: Any) -> int:
    return len(pattern.findall(compiled.asm["ptx"]))


def accesses_per_thread(dtype: torch.dtype, block: int = launch.BLOCK) -> int:
    """Return how many 16-byte accesses move one thread's part of a block."""
    return block // (32 * launch.NUM_WARPS) * dtype.itemsize // 16


def assert_no_spills(compiled: Any, folder: Path) -> None:
    ptx = compiled.asm["ptx"]
    (target,) = re.findall(r"^\.target (\w+)", ptx, flags=re.MULTILINE)
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    command = [
        get_ptxas(int(target[3:].rstrip("a"))).path,
        "-v",
        f"--gpu-name={target}",
        str(source),
        "-o",
        str(folder / "kernel.o"),
    ]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert found == [("0", "0", "0")], report
    # 256 threads of at most 128 registers: two blocks share a multiprocessor, so one loads while the other stores.
    (registers,) = re.findall(r"Used (\d+) registers", report)
    assert int(registers) <= 128, report


def assert_moves(compiled: Any, loads: int, stores: int, folder: Path) -> None:
    """Check that whole blocks move in this many 16-byte accesses of each thread, and that nothing spills."""
    assert (num_wide(WIDE_LOAD, compiled), num_wide(WIDE_STORE, compiled)) == (loads, stores)
    assert_no_spills(compiled, folder)


@on_all
@by_pair
@by_elementwise
def test_aligned_pointers_move_whole_blocks_in_16_byte_accesses_without_spills(
    source: torch.dtype, out: torch.dtype, adds: bool, architecture: int, tmp_path: Path
) -> None:
    compiled = compile_elementwise(source, out, architecture, adds=adds)
    loads, stores = accesses_per_thread(source), accesses_per_thread(out)
    assert_moves(compiled, loads + adds * stores, stores, tmp_path)


@on_all
@by_elementwise
def test_pointers_of_unknown_alignment_get_no_16_byte_access(adds: bool, architecture: int) -> None:
    compiled = compile_elementwise(torch.bfloat16, torch.float32, architecture, adds=adds, aligned=False)
    assert num_wide(WIDE_LOAD, compiled) == num_wide(WIDE_STORE, compiled) == 0


@on_all
@pytest.mark.parametrize(("out", "rounding"), [(torch.bfloat16, "cvt.rn.bf16"), (torch.float16, "cvt.rn.f16")])
@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=lambda dtype: SHORT[dtype])
def test_16_bit_results_are_rounded_to_nearest_even_from_fp32(
    source: torch.dtype, out: torch.dtype, rounding: str, architecture: int
) -> None:
    for adds in (False, True):
        compiled = compile_elementwise(source, out, architecture, adds=adds)
        narrowing = set(re.findall(r"cvt\.r\w\.(?:b?f16)\S*", compiled.asm["ptx"]))
        assert narrowing, "no conversion to 16 bits found"
        assert all(op.startswith(rounding) and op.endswith(".f32") for op in narrowing), narrowing


@by_elementwise
def test_element_indices_are_64_bit_because_buffers_exceed_two_billion_elements(adds: bool) -> None:
    compiled = compile_elementwise(torch.float32, torch.float32, 90, adds=adds)
    products = re.findall(r"arith\.muli .* : (\w+)", compiled.asm["ttir"])
    assert products
    assert set(products) == {"i64"}


def test_scalars_have_fixed_types_so_that_no_value_compiles_a_kernel_again() -> None:
    types = {p.name: p.annotation_type for p in launch.jit(elementwise_kernel).params}
    assert (types["scale"], types["numel"]) == ("fp64", "i64")
