"""Run the code blocks of the pages in a copy of the repository: ``make test-docs``.

The blocks of a page run one after the other, because later blocks use the names of earlier ones. Blocks that need a
missing package, a missing program or several machines are listed and do not run. Each line has the seconds that a block
took and its CPU time, which does not depend on what else the machine runs.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_fsdp.cli.progress import show_progress
from megatron_fsdp.command_parser import CommandParser
from tests.docs.blocks import ROOT, SILENT, Block, blocks_of, pages
from tests.docs.scenes import SCENES, Scene, reason_against, shortened

LIMIT_SECONDS = 1800
EXAMPLES = """\
  python -m tests.docs                          all pages
  python -m tests.docs README.md docs/muon.md   some of them"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pages that ``arguments`` name (default: all pages); return 1 if a block failed."""
    parser = CommandParser("python -m tests.docs", __doc__ or "", EXAMPLES)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="paths below the repository's root (default all)")
    chosen = parser.parse_args(arguments).pages or pages()
    begun, computed = time.monotonic(), cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        copy = copied(Path(folder) / "repository")
        failed: list[Block] = []
        for number, page in enumerate(chosen, 1):
            print(f"page {number} of {len(chosen)}, after {time.monotonic() - begun:.0f} s: {page}", flush=True)
            failed += run_page(page, copy)
    seconds = f"{time.monotonic() - begun:.0f} s, {cpu_seconds() - computed:.0f} s of CPU time"
    print(f"{len(failed)} blocks failed in {seconds}" + "".join(f"\n  {each.page}:{each.line}" for each in failed))
    return 1 if failed else 0


def copied(target: Path) -> Path:
    """Copy the files of the repository, with this environment as its own, and return the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(sys.prefix)
    installed = target / ".venv/.installed"
    if installed.exists():
        # If these files were newer than .installed, `make` would install the copy into this environment.
        when = installed.stat().st_mtime - 1
        for path in (target / "setup.py", target / "pyproject.toml", *(target / "constraints").iterdir()):
            os.utime(path, (when, when))
    return target


def run_page(page: str, copy: Path) -> Iterator[Block]:
    """Run the blocks of a page, print the result and the time of each, and yield the blocks that failed."""
    scene = SCENES.get(page, Scene())
    for name, text in scene.files.items():
        (copy / name).write_text(text, encoding="utf-8")
    # A Python block runs behind the earlier blocks of its page, in one script.
    before = scene.given
    for block in blocks_of(page):
        if block.language in SILENT:
            continue
        reason = reason_against(block) or missing_package(block)
        if reason:
            print(f"{page}:{block.line}: not here, {reason}", flush=True)
            continue
        begin, computed = time.monotonic(), cpu_seconds()
        show_progress(f"{page}:{block.line}: running")
        code = shortened(block)
        command = shell(code) if block.language == "bash" else python(code, before, copy)
        ended = subprocess.run(
            command,
            cwd=copy,
            env=environment(copy),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        seconds = f"{time.monotonic() - begin:.0f} s, {cpu_seconds() - computed:.0f} s of CPU time"
        show_progress("")
        print(f"{page}:{block.line}: {'failed' if ended.returncode else 'ran'}, {seconds}", flush=True)
        if ended.returncode:
            print(ended.stdout[-6000:], flush=True)
            yield block
        elif block.language == "python" and "__main__" not in code:
            before += "\n" + code


def cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def shell(code: str) -> list[str]:
    """Return the command that runs shell commands and stops at the first failure."""
    return ["bash", "-e", "-o", "pipefail", "-c", code]


def python(code: str, before: str, copy: Path) -> list[str]:
    """Return the command that runs a Python block: pytest for a test, otherwise a script that stays as train.py."""
    if "def test_" in code:
        (copy / "tests" / "test_of_a_page.py").write_text(code, encoding="utf-8")
        return [sys.executable, "-m", "pytest", "-q", "tests/test_of_a_page.py"]
    (copy / "train.py").write_text(before + "\n" + code, encoding="utf-8")
    return [sys.executable, "train.py"]


def missing_package(block: Block) -> str:
    """Return a reason that names the first missing package of a Python block; "" if none is missing."""
    if block.language != "python":
        return ""
    for node in ast.walk(ast.parse(block.code)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                return f"it needs {name.partition('.')[0]} (make test-integrations installs it)"
    return ""


def environment(copy: Path) -> dict[str, str]:
    """Return the environment variables of a block: tools of this environment, and the packages of the copy."""
    # Python puts the folder of a script on the path, and scripts in examples/ need the root too.
    path = os.pathsep.join([str(copy), str(copy / "kernels")])
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": tools, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
