"""The ``megatron-fsdp`` command in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.grids import nightly_but

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


# tests/unit/megatron_fsdp/cli tests factories within one process.
@pytest.mark.parametrize("start", nightly_but(["script"], ["script", "module"]))
def test_a_model_in_the_current_folder_is_found(start: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(4, 4)\n")
    # The script that pip installs. Python puts the script's folder in front of sys.path, not the current folder.
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "megatron-fsdp"
    script.write_text("import sys\nfrom megatron_fsdp.__main__ import main\nsys.exit(main())\n")
    command = [sys.executable, *([str(script)] if start == "script" else ["-m", "megatron_fsdp"])]
    command += ["plan", "--factory", "mine:make", "--mesh", "2"]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mine:make: 20 parameters, on 2 ranks" in done.stdout
    assert "the whole model is one unit" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m megatron_fsdp plan --model llama3-8b --mesh 8 --json | head -1"
    done = subprocess.run(
        command, shell=True, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""


WITHOUT_TORCH = """
import sys
from megatron_fsdp.__main__ import main
for words in ("--help", "--version", "plan --help", "plan --list-models", "checkpoint --help", "checkpoint export -h",
              "plan --model llama3-8b --mesh 8 --strategy zero3", "nothing"):
    try:
        main(words.split())
    except SystemExit:
        pass
    assert "torch" not in sys.modules, words
"""


def test_help_lists_and_errors_of_the_command_line_need_no_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
