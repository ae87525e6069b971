"""Warnings and errors at import: NVIDIA's megatron-fsdp in the same folder, and an untested torch.

NVIDIA's package has the same import name.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for package in ("megatron_fsdp", "dbuffer"):
        (tmp_path / package).mkdir()
        for file in (ROOT / package).iterdir():
            if file.name != "__pycache__":
                (tmp_path / package / file.name).symlink_to(file)
    (tmp_path / "dbuffer_kernels").symlink_to(ROOT / "kernels" / "dbuffer_kernels")
    (tmp_path / "megatron_fsdp_dbuffer-0.1.0.dist-info").mkdir()
    return tmp_path


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=site, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_nvidias_package_installed_before_ours_is_reported(site: Path) -> None:
    (site / "megatron_fsdp-0.6.1.dist-info").mkdir()
    done = run(site, "import megatron_fsdp; print(megatron_fsdp.explain.__name__)")
    assert done.stdout.strip() == "explain"
    assert f"{site} contains both NVIDIA's megatron_fsdp-0.6.1 and this package" in done.stderr
    assert "pip uninstall megatron-fsdp megatron-fsdp-dbuffer" in done.stderr


IMPORT_EACH = """
import importlib
for name in ("api", "huggingface", "megatron", "checkpoint.api"):
    try:
        importlib.import_module(f"megatron_fsdp.{name}")
    except ImportError as error:
        print(error)
"""


def test_nvidias_package_installed_after_ours_is_refused_at_use(site: Path) -> None:
    initialiser = site / "megatron_fsdp" / "__init__.py"
    initialiser.unlink()
    initialiser.write_text("__version__ = '0.6.1'\n", encoding="utf-8")
    lines = run(site, IMPORT_EACH).stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith(f"{initialiser} is not this package's: NVIDIA's megatron-fsdp")
        assert "fix: pip uninstall megatron-fsdp megatron-fsdp-dbuffer" in line
        assert line.endswith("(docs/compatibility.md, Installation)")


@pytest.mark.slow
def test_files_left_after_uninstalling_nvidias_package_are_refused(site: Path) -> None:
    (site / "megatron_fsdp" / "__init__.py").unlink()
    done = run(site, "import megatron_fsdp.api")
    assert done.returncode == 1
    assert f"ImportError: {site / 'megatron_fsdp'} has no __init__.py: NVIDIA's megatron-fsdp" in done.stderr
