"""Trying mutants: the tests that run the changed function, in a copy of the tree, until one fails.

Each trial is a fork of a process that has imported PyTorch and what else is not ours; its ranks are forks of that fork.
"""

import ast
import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.harness.ranks import TIMEOUT_S
from tests.mutation.mutants import Mutant, mutated

ROOT = Path(__file__).resolve().parents[2]
# Ranks that wait for ever are ended by the harness first.
OVERHEAD_S = TIMEOUT_S + 30.0
PRELOADED = (
    "matplotlib.figure",
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.testing",
)
OURS = ("dbuffer", "dbuffer_kernels", "gpt", "megatron_fsdp", "pretrain_gpt", "tests")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object on each line; return none for a missing file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@dataclass(frozen=True, slots=True)
class _Trial:
    mutant: Mutant
    tests: Sequence[str]
    copy: Path
    start: float
    deadline: float


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
        self.followers = followers(rows)

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Try all that have no result yet."""
        for name in PRELOADED:
            importlib.import_module(name)
        known = {row["name"] for row in read_rows(self.results)}
        waiting = [mutant for mutant in reversed(mutants) if mutant.name not in known]
        running: dict[int, _Trial] = {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                self._start(waiting.pop(), running)
            for process, trial in list(running.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                if not ended and time.monotonic() < trial.deadline:
                    continue
                _end(process, is_reaped=bool(ended))
                del running[process]
                self._write(trial, *_outcome(trial.copy, status) if ended else ("timeout", ""))
                shutil.rmtree(trial.copy)
            time.sleep(0.05)

    def _start(self, mutant: Mutant, running: dict[int, _Trial]) -> None:
        tests, now = self.tests_of(mutant), time.monotonic()
        deadline = now + OVERHEAD_S + 3 * sum(self.durations[test] for test in tests)
        trial = _Trial(mutant, tests, _copy_with(mutant), now, deadline)
        process = os.fork()
        if process == 0:
            _run_tests(trial)
        running[process] = trial

    def _write(self, trial: _Trial, status: str, killer: str) -> None:
        status = status if trial.tests else "not run by any test"
        took_s = round(time.monotonic() - trial.start, 1)
        row = {"name": trial.mutant.name, "status": status, "killer": killer, "tests": len(trial.tests)}
        row |= {"took_s": took_s, **dataclasses.asdict(trial.mutant)}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{status:9} {took_s:6.1f} s  {trial.mutant.name}  {killer}", flush=True)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the changed function, likely finders first, as many as fit into the time.

        For a function that runs when its file is imported, return the tests that run any other function of the file.
        """
        places = [f"{mutant.path}:{mutant.first_line}"]
        if places[0] not in self.tests:
            places = [place for place in self.tests if place.startswith(f"{mutant.path}:")]
        chosen: dict[str, None] = {}
        left = self.seconds
        for _, leader in sorted({found for place in places for found in self.tests[place]}):
            for test in (leader, *self.followers.get(leader, ())):
                if self.durations[test] <= left and test not in chosen:
                    left -= self.durations[test]
                    chosen[test] = None
        return list(chosen)


def followers(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the tests that ran nothing themselves, by the last one before them in their file that did.

    These tests check a fixture's result, which the first test of the file computed.
    """
    found: dict[str, list[str]] = {}
    leader = ""
    for row in rows:
        if row["ran"]:
            leader = row["test"]
        elif row["test"].partition("::")[0] == leader.partition("::")[0]:
            found.setdefault(leader, []).append(row["test"])
    return found


def _copy_with(mutant: Mutant) -> Path:
    """Copy the tree as git knows it, with the change."""
    copy = Path(tempfile.mkdtemp(prefix="mutant-"))
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    (copy / mutant.path).write_text(ast.unparse(mutated((ROOT / mutant.path).read_text(), mutant.number)))
    return copy


def _run_tests(trial: _Trial) -> NoReturn:
    """Run the tests in this process, a fork, and end it with pytest's exit status."""
    status = 3
    try:
        os.setsid()
        os.chdir(trial.copy)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["RANKS_START_METHOD"] = "fork"
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[:0] = [str(trial.copy / folder) for folder in ("", "kernels", "examples")]
        sys.dont_write_bytecode = True
        if trial.tests:
            # Ranks are started while this process has run nothing.
            importlib.import_module("tests.mutation.warm").start_ranks()
            Path("tests.txt").write_text("\n".join(trial.tests), encoding="utf-8")
            options = [
                "-x",
                "-q",
                "-m",
                "",
                "-p",
                "no:cacheprovider",
                f"--rootdir={trial.copy}",
                "--junitxml=report.xml",
            ]
            status = int(importlib.import_module("pytest").main(["@tests.txt", *options]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _outcome(copy: Path, status: int) -> tuple[str, str]:
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "survived", ""
    if code == 1:
        cases = ET.parse(copy / "report.xml").iter("testcase")
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        return "killed", f"{failed[0].get('classname')}::{failed[0].get('name')}"
    # The mutant does not even import, or takes the process down.
    lines = (copy / "output.txt").read_text(errors="replace").strip().splitlines()
    return "killed", f"exit status {code}: {lines[-1][:200] if lines else ''}"


def _end(process: int, *, is_reaped: bool) -> None:
    """End a trial and the ranks that it started, which are of its session."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        return
    if not is_reaped:
        os.waitpid(process, 0)
