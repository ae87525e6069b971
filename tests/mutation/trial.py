"""Trying one mutant: the tests that run the changed function, in a copy of the tree, until one fails."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
# A rank that waits for ever is ended by the harness after 60 s, an interpreter takes a while to start.
OVERHEAD_S = 90.0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object on each line; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


class Trials:
    """Tries mutants, several at a time, and keeps what became of each in a file."""

    def __init__(self, trace: Path, results: Path, seconds: float, jobs: int) -> None:
        """Read which tests run what.

        Args:
            trace: written by ``--trace``. results: gets one line of JSON per mutant.
            seconds: how long tests may run for one mutant, as measured by the trace. jobs: mutants at a time.
        """
        self.results, self.seconds, self.jobs = results, seconds, jobs
        self.tests: dict[str, list[tuple[float, str]]] = {}
        rows = read_rows(trace)
        if not rows:
            raise SystemExit(f"{trace} is empty: run python -m tests.mutation --trace with the same --marks first.")
        for row in rows:
            # A test that runs little else is about this function.
            for place in row["ran"]:
                self.tests.setdefault(place, []).append((row["seconds"] * len(row["ran"]), row["test"]))
        self.durations = {row["test"]: float(row["seconds"]) for row in rows}

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Try all that have no result yet."""
        known = {row["name"] for row in read_rows(self.results)}
        with ThreadPoolExecutor(self.jobs) as threads:
            for row in threads.map(self._try, [mutant for mutant in mutants if mutant.name not in known]):
                with self.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['status']:9} {row['took_s']:6.1f} s  {row['name']}  {row['killer']}", flush=True)

    def _try(self, mutant: Mutant) -> dict[str, Any]:
        start, tests = time.monotonic(), self.tests_of(mutant)
        row: dict[str, Any] = {"name": mutant.name, "status": "not run by any test", "killer": "", "tests": len(tests)}
        if tests:
            with _copy_with(mutant) as copy:
                row["status"], row["killer"] = self._outcome(copy, tests)
        return {**row, "took_s": round(time.monotonic() - start, 1), **dataclasses.asdict(mutant)}

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the changed function, likely finders first, as many as fit into the time.

        Of a function that runs when its file is imported, those that run any other function of the file.
        """
        places = [f"{mutant.path}:{mutant.first_line}"]
        if places[0] not in self.tests:
            places = [place for place in self.tests if place.startswith(f"{mutant.path}:")]
        chosen, left = [], self.seconds
        for _, test in sorted({(rank, test) for place in places for rank, test in self.tests[place]}):
            if self.durations[test] <= left and test not in chosen:
                left -= self.durations[test]
                chosen.append(test)
        return chosen

    def _outcome(self, copy: Path, tests: Sequence[str]) -> tuple[str, str]:
        (copy / "tests.txt").write_text("\n".join(tests), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "@tests.txt", "-x", "-q", "-m", "", "-p", "no:cacheprovider"]
        command += [f"--rootdir={copy}", "--junitxml=report.xml"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "kernels")])}
        environment["PYTHONDONTWRITEBYTECODE"] = environment["OMP_NUM_THREADS"] = "1"
        with (
            (copy / "output.txt").open("wb") as output,
            _ended(
                subprocess.Popen(
                    command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
                )
            ) as process,
        ):
            try:
                status = process.wait(OVERHEAD_S + 2 * sum(self.durations[test] for test in tests))
            except subprocess.TimeoutExpired:
                return "timeout", ""
        if status == 0:
            return "survived", ""
        if status != 1:
            # The mutant does not even import, or takes the process down.
            return "killed", (copy / "output.txt").read_text(errors="replace").strip().splitlines()[-1][:200]
        cases = ET.parse(copy / "report.xml").iter("testcase")
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        return "killed", f"{failed[0].get('classname')}::{failed[0].get('name')}"


@contextmanager
def _copy_with(mutant: Mutant) -> Iterator[Path]:
    """Copy the tree as git knows it, with the change; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.rstrip("\0").split("\0"):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy / name)
        (copy / mutant.path).write_bytes(mutant.applied_to((ROOT / mutant.path).read_bytes()))
        yield copy


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """End a process and those that it started."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
