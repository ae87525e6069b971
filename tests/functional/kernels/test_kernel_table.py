"""docs/kernel_table.py compiles the kernels, and its table equals that of docs/design/kernels.md."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = """
import runpy
found = runpy.run_path("docs/kernel_table.py", run_name="kernel_table")
print(*sorted(found["KERNELS"]), sep=";")
print(found["row"]("cast, fp32 to bf16", 90))
"""


def test_a_line_of_the_table_is_what_the_command_finds() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names, line = done.stdout.splitlines()
    page = (ROOT / "docs" / "design" / "kernels.md").read_text(encoding="utf-8")
    # Another release of Triton uses other numbers of registers.
    *accesses, _registers, spills = line.strip("| ").split(" | ")
    assert re.search(re.escape(" | ".join(accesses)) + rf" \| \d+ \| {spills} \|", page)
    assert all(f"| {name} | sm_90 |" in page for name in names.split(";"))
