"""Test files of integrations can be collected without their packages, as `make test-gpu` does."""

import ast
import fnmatch
import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "integration"
OURS = {"benchmarks", "dbuffer", "dbuffer_kernels", "gpt", "megatron_fsdp", "pretrain_gpt", "tests"}
# The packages that '.[dev]' installs.
INSTALLED = {"hypothesis", "numpy", "pytest", "safetensors", "torch", *sys.stdlib_module_names}


def needs() -> dict[str, str]:
    """Return the table of tests/integration/conftest.py."""
    spec = importlib.util.spec_from_file_location("integration_conftest", FOLDER / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module._NEEDS)


def imports_of(path: Path) -> set[str]:
    """Return the packages that importing a file imports, including imports through other files of its folder."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in [
        inner for outer in tree.body for inner in ([outer] if not isinstance(outer, ast.With) else outer.body)
    ]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    for name in [name for name in found if name.startswith("tests.integration.")]:
        found |= imports_of(FOLDER / f"{name.rpartition('.')[2]}.py")
    return {name.partition(".")[0] for name in found}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.name)
def test_a_file_that_imports_a_foreign_package_is_left_out_without_one(path: Path) -> None:
    foreign = imports_of(path) - OURS - INSTALLED
    named = any(fnmatch.fnmatch(path.name, pattern) for pattern in needs())
    assert not foreign or named, f"{path.name} imports {sorted(foreign)}: name it in {FOLDER / 'conftest.py'}"
