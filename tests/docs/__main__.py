"""Run the code of the pages in a copy of the repository: ``make test-docs``.

The Python blocks of a page run one after the other, as they build on each other, and so do its shell commands, with the
tools of this environment. Blocks that need a package, a program or machines that are not here are named.
"""

from __future__ import annotations

import ast
import importlib.util
import os
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
    """Run the pages that the arguments name, all by default; return 1 where a block failed."""
    parser = CommandParser("python -m tests.docs", __doc__ or "", EXAMPLES)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="paths below the repository's root (default all)")
    chosen = parser.parse_args(arguments).pages or pages()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        copy = copied(Path(folder) / "repository")
        failed: list[Block] = []
        for number, page in enumerate(chosen, 1):
            print(f"page {number} of {len(chosen)}, after {time.monotonic() - begun:.0f} s: {page}", flush=True)
            failed += run_page(page, copy)
    print(f"{len(failed)} blocks failed" + "".join(f"\n  {block.page}:{block.line}" for block in failed))
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
        # `make` would install the copy into this environment, and leave it there, where these are newer than that.
        when = installed.stat().st_mtime - 1
        for path in (target / "setup.py", target / "pyproject.toml", *(target / "constraints").iterdir()):
            os.utime(path, (when, when))
    return target


def run_page(page: str, copy: Path) -> Iterator[Block]:
    """Run the blocks of a page, print how each ended, and yield those that failed."""
    scene = SCENES.get(page, Scene())
    for name, text in scene.files.items():
        (copy / name).write_text(text, encoding="utf-8")
    # Python blocks see what those before them made; each runs behind the others again.
    before = scene.given
    for block in blocks_of(page):
        if block.language in SILENT:
            continue
        reason = reason_against(block) or missing_package(block)
        if reason:
            print(f"{page}:{block.line}: not here, {reason}", flush=True)
            continue
        begin = time.monotonic()
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
        seconds = time.monotonic() - begin
        show_progress("")
        print(f"{page}:{block.line}: {'failed' if ended.returncode else 'ran'}, {seconds:.0f} s", flush=True)
        if ended.returncode:
            print(ended.stdout[-6000:], flush=True)
            yield block
        elif block.language == "python" and "__main__" not in code:
            before += "\n" + code


def shell(code: str) -> list[str]:
    """Return the command that runs shell commands up to the first that fails."""
    return ["bash", "-e", "-o", "pipefail", "-c", code]


def python(code: str, before: str, copy: Path) -> list[str]:
    """Return the command that runs a Python block: a test by pytest, another one as a script, kept as train.py."""
    if "def test_" in code:
        (copy / "tests" / "test_of_a_page.py").write_text(code, encoding="utf-8")
        return [sys.executable, "-m", "pytest", "-q", "tests/test_of_a_page.py"]
    (copy / "train.py").write_text(before + "\n" + code, encoding="utf-8")
    return [sys.executable, "train.py"]


def missing_package(block: Block) -> str:
    """Return which package a Python block imports that is not installed, in words."""
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
    """Return the variables of a block: the tools of this environment, and the packages of the copy."""
    # Its own folder is not on the path of a program that lies in another one.
    path = os.pathsep.join([str(copy), str(copy / "kernels")])
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": tools, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
