"""Run programs of many seeds and count how they end: ``python -m tests.functional.random_survey 0 200``."""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from tests.functional.random_programs import draw, smaller
from tests.functional.random_use import Program
from tests.functional.random_use_refusals import REFUSALS
from tests.functional.random_use_run import Verdict, run
from tests.harness import run_ranks
from tests.harness.failures import FailureKind, RankError

__all__ = ["outcome"]

TIMEOUT_S = 15.0
OUTCOMES = {
    FailureKind.DIED: "died",
    FailureKind.STUCK: "hang",
    FailureKind.RAISED: "harness error",
    FailureKind.UNCLEAN: "left something behind",
}


def outcome(program: Program) -> Verdict:
    """Run a program on its ranks, and say how it ended; a hang or the death of a rank is an outcome too."""
    try:
        verdicts = run_ranks(program.num_ranks, run, program, REFUSALS, timeout=TIMEOUT_S)
    except RankError as error:
        kinds = {failure.kind for failure in error.failures}
        if "DistStoreError" in str(error) or "Diverged" in str(error):
            return Verdict("hang", text=str(error))
        return Verdict(OUTCOMES[next(kind for kind in FailureKind if kind in kinds)], text=str(error))
    return next((verdict for verdict in verdicts if not verdict.is_in_order), verdicts[0])


def main() -> None:
    """Survey a range of seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--shrink", type=float, default=0, help="seconds to make each failure smaller")
    parser.add_argument("--out", type=Path, help="a file of one JSON line per seed")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.count):
        begin = time.monotonic()
        program = draw(seed)
        verdict = outcome(program)
        counts[verdict.outcome] += 1
        if not verdict.is_in_order and options.shrink:
            wanted = verdict.outcome
            program = smaller(program, lambda one, wanted=wanted: outcome(one).outcome == wanted, options.shrink)
            verdict = outcome(program)
        seconds = time.monotonic() - begin
        print(f"{seed} {verdict.outcome} {verdict.action} ({seconds:.1f} s)", flush=True)
        if not verdict.is_in_order:
            print(f"   {program!r}\n   {verdict.text[-600:]}", flush=True)
        if options.out:
            record = {
                "seed": seed, "outcome": verdict.outcome, "action": verdict.action, "text": verdict.text[-3000:],
                "refused": verdict.refused, "program": repr(program), "seconds": seconds,
            }  # fmt: skip
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    print(dict(counts))


if __name__ == "__main__":
    main()
