"""Mutate the library at single points, one at a time in a copy of the tree, and see which test finds it.

``python -m tests.mutation --trace`` notes which test runs which function, and takes somewhat longer than the tests;
``python -m tests.mutation --seed 1 --count 150`` then tries that many mutants, and goes on where it was interrupted.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from megatron_fsdp.command_parser import CommandParser
from tests.mutation.mutants import draw
from tests.mutation.trial import ROOT, Trials, read_rows

ROOMS = ("engine", "variants", "checks", "lifecycle", "optim")
FOLDERS = (*(f"megatron_fsdp/{room}" for room in ROOMS), "dbuffer")


def main() -> None:
    """Trace or try, as the command line says."""
    parser = CommandParser("python -m tests.mutation", __doc__ or "")
    parser.add_argument("--trace", action="store_true", help="note which test runs which function, and stop")
    parser.add_argument("--marks", default="not gpu and not slow", help="which tests: the -m of pytest")
    parser.add_argument("--folder", type=Path, default=Path(".mutation"), help="for the notes and the results")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--count", type=int, default=150, help="how many mutants to draw")
    parser.add_argument("--seconds", type=float, default=240.0, help="how long tests may run for one mutant")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--survivors-of", type=Path, help="a file of results: try only what survived there")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    trace = args.folder / f"trace {args.marks}.jsonl"
    if args.trace:
        sys.exit(_trace(args.marks, trace))
    mutants = draw(ROOT, FOLDERS, count=args.count, seed=args.seed)
    if args.survivors_of is not None:
        survived = {row["name"] for row in read_rows(args.survivors_of) if row["status"] == "survived"}
        mutants = [mutant for mutant in mutants if mutant.name in survived]
    results = args.folder / f"results seed {args.seed}, {args.marks}.jsonl"
    Trials(trace, results, args.seconds, args.jobs).run(mutants)
    rows = {row["name"]: row for row in read_rows(results)}
    found = Counter(rows[mutant.name]["status"] for mutant in mutants)
    killed = found["killed"] + found["timeout"]
    print(f"{killed} of {found.total()} mutants found: {dict(found)}; {results}")


def _trace(marks: str, path: Path) -> int:
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutation.trace", "tests/unit", "tests/functional"]
    environment = {**os.environ, "TRACE": str(path.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "-q", "-m", marks, "-n", "2", "--dist", "loadfile"], cwd=ROOT, env=environment)
    with path.open("a", encoding="utf-8") as whole:
        for part in path.parent.glob(f"{path.name}gw*"):
            whole.write(part.read_text(encoding="utf-8"))
            part.unlink()
    return done.returncode


if __name__ == "__main__":
    main()
