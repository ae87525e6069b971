"""Check the order of streams, memory and collectives on this machine's CPUs: ``python -m tests.certify``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_fsdp.command_parser import CommandParser
from tests.certify.cases import CASES, SHORT
from tests.certify.matrix import Run, run_matrix

EXAMPLES = """\
  python -m tests.certify                             one configuration of each mechanism
  python -m tests.certify --matrix                    all of them"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if nothing was found, 1 if a fault was found, 2 if the check could not run."""
    parser = CommandParser("python -m tests.certify", __doc__ or "", EXAMPLES)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--matrix", action="store_true", help="all configurations; without it one of each mechanism")
    what.add_argument("--case", action="append", help="the configuration of this name; may be given again")
    what.add_argument("--list", action="store_true", help="print the names of the configurations")
    parser.add_argument("--verbose", action="store_true", help="print each configuration")
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(case.name for case in CASES))
        return 0
    unknown = {*(args.case or ())} - {case.name for case in CASES}
    if unknown:
        print(f"error: no configuration is called {', '.join(sorted(unknown))}; --list prints their names")
        return 2
    chosen = [case for case in CASES if case.name in args.case] if args.case else CASES if args.matrix else SHORT
    return _report(args, run_matrix(chosen))


def _report(args: argparse.Namespace, runs: Sequence[Run]) -> int:
    bad = [one for one in runs if not one.is_clean]
    for one in runs if args.verbose else bad:
        print("\n".join(one.certificate.lines()))
        if one.case.host_may_wait:
            print(f"  the host may wait: {one.case.host_may_wait}")
    certificates = [one.certificate for one in runs]
    print(
        f"{len(runs)} configurations, {sum(one.num_operators for one in certificates):,} operators, "
        f"{sum(one.num_conflicts for one in certificates):,} conflicts and "
        f"{sum(one.num_reuses for one in certificates):,} reuses checked: "
        f"{sum(len(one.races) for one in certificates)} races, "
        f"{sum(len(one.early_reuses) for one in certificates)} early reuses, "
        f"{sum(len(one.disorders) for one in certificates)} disorders, "
        f"{sum(len(one.certificate.engine_host_waits) for one in bad)} host waits that are not meant to be; "
        f"{len(bad)} configurations with findings"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
