"""The Triton kernels: interpreted and compiled ahead of time on the CPU, and run on a GPU if the machine has one.

Each test starts a process, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.harness.grids import nightly_but

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
# The first three files also run as references, in their own folder.
CASES = (
    *(ROOT / "tests" / "unit" / "kernels" / f"test_{kind}.py" for kind in ("elementwise", "step", "muon")),
    *(FOLDER / f"{kind}_cases.py" for kind in ("int8", "decode")),
)
COMPILED = tuple(FOLDER / f"compiled{kind}_cases.py" for kind in ("", "_step"))

Failures = dict[str, list[str]]


def names(files: tuple[Path, ...]) -> list[str]:
    nodes = (node for cases in files for node in ast.parse(cases.read_text()).body)
    found = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert len(found) == len(set(found)), "two cases of one name: the report could not tell them apart"
    return found


def run_cases(files: tuple[Path, ...], folder: Path, *, interprets: bool, grid: str = "whole") -> Failures:
    """Run files of cases in a fresh process and return, for each test function that ran, the texts of its failures.

    Args:
        grid: "whole", or "quick" for a part of it.
    """
    report = folder / "report.xml"
    configuration = folder / "pytest.ini"
    configuration.write_text(
        "[pytest]\nfilterwarnings = error\nmarkers = reference_allowed: the reference may run for some sources\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_INTERPRET": "1" if interprets else "0",
        "KERNELS": "interpreted" if interprets else "compiled",
        "GRID": grid,
    }
    options = ["--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-c", str(configuration)]
    command = [sys.executable, "-m", "pytest", *map(str, files), *options, f"--rootdir={ROOT}", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert report.exists(), (
        f"{files[0].name} did not run (exit status {done.returncode}):\n{done.stdout}\n{done.stderr}"
    )
    failures: Failures = {}
    for case in ET.parse(report).iter("testcase"):
        texts = failures.setdefault(case.attrib["name"].partition("[")[0], [])
        texts += [
            f"{case.attrib['name']}: {child.text}" for child in case if child.tag in ("failure", "error", "skipped")
        ]
    return failures


def assert_passed(failures: Failures, name: str) -> None:
    assert name in failures, f"{name} did not run; ran: {sorted(failures)}"
    assert not failures[name], "\n".join(failures[name])


GRIDS = nightly_but(["quick"], ["quick", "whole"])


@pytest.fixture(scope="module", params=GRIDS)
def interpreted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Failures:
    return run_cases(CASES, tmp_path_factory.mktemp("interpreted"), interprets=True, grid=request.param)


@pytest.fixture(scope="module", params=GRIDS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Failures:
    return run_cases(COMPILED, tmp_path_factory.mktemp("compiled"), interprets=False, grid=request.param)


@pytest.fixture(scope="module")
def on_the_gpu(tmp_path_factory: pytest.TempPathFactory) -> Failures:
    return run_cases(CASES, tmp_path_factory.mktemp("on_the_gpu"), interprets=False)


@pytest.mark.parametrize("name", names(CASES))
def test_interpreted_on_the_cpu(interpreted: Failures, name: str) -> None:
    assert_passed(interpreted, name)


@pytest.mark.parametrize("name", names(COMPILED))
def test_compiled_ahead_of_time(compiled: Failures, name: str) -> None:
    assert_passed(compiled, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", names(CASES))
def test_compiled_on_the_gpu(on_the_gpu: Failures, name: str) -> None:
    assert_passed(on_the_gpu, name)
