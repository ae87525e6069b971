"""The quickstart notebook runs from its first cell to its last, and prints its stored outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
NOTEBOOK = json.loads((ROOT / "examples/quickstart.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs_as_one_program(tmp_path: Path) -> None:
    script = tmp_path / "quickstart.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in CELLS), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("largest difference between the plain and the sharded model: 0.0\n")
    assert (tmp_path / "runs/plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_stored_report_is_the_one_that_the_notebook_prints() -> None:
    stored = "".join(text for cell in CELLS for output in cell["outputs"] for text in output.get("text", ()))
    assert "blocks.0 .. blocks.2 (3 alike, each)" in stored
    assert all(cell["execution_count"] == number for number, cell in enumerate(CELLS, start=1))
