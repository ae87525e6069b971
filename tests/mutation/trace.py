"""A plugin of pytest that notes, for every test, which functions of the library ran, on its ranks too.

``TRACE=PATH python -m pytest -p tests.mutation.trace ...`` adds a line of JSON per test to PATH.
"""

import json
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.harness import ranks
from tests.harness.messages import Call

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = tuple(str(ROOT / folder) + os.sep for folder in ("megatron_fsdp", "dbuffer"))


@contextmanager
def _noting(seen: set[CodeType]) -> Iterator[None]:
    """Note the code of every Python function that any thread begins to run."""

    def note(frame: FrameType, event: str, arg: object) -> None:
        seen.add(frame.f_code)

    threading.settrace(note)
    sys.settrace(note)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)


def _places(seen: set[CodeType]) -> set[str]:
    """Return "path:first line" of the functions of the library."""
    # A copy, for another thread may still be noting.
    files = {code: code.co_filename for code in seen.copy() if code.co_filename.startswith(LIBRARY)}
    return {f"{Path(file).relative_to(ROOT).as_posix()}:{code.co_firstlineno}" for code, file in files.items()}


def call_noted(function: Callable[..., object], args: tuple[object, ...], folder: str) -> object:
    """Run a function on a rank, and write the functions that it called to a file of this process."""
    seen: set[CodeType] = set()
    try:
        with _noting(seen):
            return function(*args)
    finally:
        with open(f"{folder}/{os.getpid()}", "a", encoding="utf-8") as file:
            file.writelines(f"{place}\n" for place in sorted(_places(seen)))


class _Plugin:
    def __init__(self, path: str) -> None:
        self.path = path
        self.folder = tempfile.mkdtemp()
        run = ranks.WorkerPool.run

        def run_noted(pool: ranks.WorkerPool, world_size: int, call: bytes, **options: Any) -> ranks.CallReport:
            given: Call = pickle.loads(call)
            noted = Call(call_noted, (given.function, given.args, self.folder), given.filters)
            return run(pool, world_size, pickle.dumps(noted), **options)

        ranks.WorkerPool.run = run_noted  # type: ignore[method-assign, assignment]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test with its fixtures, and write down the functions that it called."""
        start = time.monotonic()
        seen: set[CodeType] = set()
        with _noting(seen):
            result = yield
        places = _places(seen)
        for left in Path(self.folder).iterdir():
            places.update(left.read_text(encoding="utf-8").split())
            left.unlink()
        row = {"test": item.nodeid, "seconds": round(time.monotonic() - start, 3), "ran": sorted(places)}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return result


def pytest_configure(config: pytest.Config) -> None:
    """Write to the folder TRACE; each worker of pytest-xdist writes a separate file."""
    is_controller = config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if not is_controller:
        config.pluginmanager.register(_Plugin(os.environ["TRACE"] + os.environ.get("PYTEST_XDIST_WORKER", "")))
