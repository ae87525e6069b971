"""Write the table of docs/design/kernels.md: the compiler's output for each Triton kernel. Needs no GPU.

``python docs/kernel_table.py`` compiles them ahead of time for sm_80, sm_90 and sm_100 with the signatures of a
training step and reads PTX and the assembler's report.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402

from tests.functional.kernels import compiled_cases as cases  # noqa: E402
from tests.functional.kernels import compiled_step_cases as step_cases  # noqa: E402

PAGE = ROOT / "docs" / "design" / "kernels.md"
BEGIN, END = "<!-- table of python docs/kernel_table.py -->", "<!-- end of table -->"
FP32, BF16 = torch.float32, torch.bfloat16

KERNELS: dict[str, Callable[[int], Any]] = {
    "cast, fp32 to bf16": lambda sm: cases.compile_elementwise(FP32, BF16, sm, adds=False),
    "accumulate, bf16 into fp32": lambda sm: cases.compile_elementwise(BF16, FP32, sm, adds=True),
    **{
        name: step_cases.KERNELS[name].compiled
        for name in (
            "split_weight",
            "join_weight",
            "decode_rows",
            "adamw",
        )
    },
}
WIDE = r"\b{}\.global[.\w:]*\.(?:v4\.b32|v2\.b64|v8\.b32|v4\.b64)"


def row(name: str, architecture: int) -> str:
    """Compile one kernel and return its line of the table."""
    compiled = KERNELS[name](architecture)
    ptx = compiled.asm["ptx"]
    loads, stores = (len(re.findall(WIDE.format(operation), ptx)) for operation in ("ld", "st"))
    registers, spills = assembled(ptx, architecture)
    return f"| {name} | sm_{architecture} | {loads} | {stores} | {registers} | {spills} |"


def assembled(ptx: str, architecture: int) -> tuple[int, int]:
    """Return registers a thread and bytes spilled, as the assembler reports them."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [
            get_ptxas(architecture).path,
            "-v",
            f"--gpu-name={target}",
            str(source),
            "-o",
            str(Path(folder, "kernel.o")),
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return int(registers), sum(map(int, spills))


def table() -> str:
    """Return the whole table."""
    head = (
        "| kernel | architecture | loads of 16 bytes or more | stores | registers a thread | bytes spilled |\n"
        "|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(row(name, architecture) for name in KERNELS for architecture in (80, 90, 100))


def main() -> None:
    """Put it into the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
