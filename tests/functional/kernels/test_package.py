"""The kernels' package imports quickly and works without Triton, in a separate process."""

import subprocess
import sys

PROGRAM = """
import sys
import torch

before = set(sys.modules)
import dbuffer_kernels as kernels

kernels.accumulate(torch.ones(3), torch.ones(3))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert "dbuffer_kernels" in new
assert "triton" not in new, sorted(new)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)

sys.modules["triton"] = None
sys.meta_path.insert(0, Absent())
kernels.launch._triton_is_installed.cache_clear()
source, out = torch.arange(6.0), torch.zeros(6)
kernels.cast_copy(source, out, scale=2.0)
kernels.accumulate(source, out)
assert out.tolist() == [0, 3, 6, 9, 12, 15], out
assert kernels.backend("cuda") == kernels.backend("cpu") == "reference"
try:
    with kernels.use_backend("triton"):
        raise SystemExit("use_backend('triton') worked without Triton")
except ValueError as error:
    assert "not installed" in str(error), error
"""


def test_an_op_on_the_cpu_does_not_import_triton_and_works_without_it() -> None:
    code = f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
