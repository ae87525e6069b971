"""Run a bench, and show or write its rows."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, markdown, write_rows, write_samples
from megatron_fsdp.command_parser import CommandParser

FOLDER = Path(__file__).parent
EXAMPLES = """\
  python -m benchmarks host                                   processor time per step, beside FSDP2
  python -m benchmarks memory --results benchmarks/results    write the rows behind docs/performance.md"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    found = benches()
    parser = CommandParser("python -m benchmarks", __doc__ or "", EXAMPLES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="BENCH")
    chosen = next(
        (argument for argument in (sys.argv[1:] if arguments is None else arguments) if argument in found), ""
    )
    for name, summary in found.items():
        bench = commands.add_parser(name, help=summary, description=summary)
        bench.add_argument("--out", type=Path, help="write a summary of the rows to this file, as JSON")
        bench.add_argument("--results", type=Path, help="the same, in a file of this folder named after the bench")
        bench.add_argument("--samples", type=Path, help="write every sample to this file, as JSON")
        # Import only the chosen bench: another one may need packages that are not installed.
        module = importlib.import_module(f"benchmarks.bench_{name}") if name == chosen else None
        if module is not None and hasattr(module, "add_arguments"):
            module.add_arguments(bench)
    args = parser.parse_args(arguments)
    module = importlib.import_module(f"benchmarks.bench_{args.command}")
    rows: list[Row] = module.run(args)
    if not rows:
        # Under torchrun only rank 0 returns rows.
        return 0
    # A bench may define its own table, and a name of its results that depends on the device.
    print(getattr(module, "rows_text", rows_text)(rows))
    name = module.result_name(args) if hasattr(module, "result_name") else args.command
    given = {name: value for name, value in vars(args).items() if name not in ("out", "results", "samples")}
    for path in (args.out, args.results and args.results / f"{name}.json"):
        if path:
            write_rows(path, rows, given)
            print(f"{len(rows)} rows in {path}")
    if args.samples:
        write_samples(args.samples, rows)
    return 0


def benches() -> dict[str, str]:
    """Return the benches of this folder: the first line of each docstring by the bench's name."""
    found = {}
    for path in sorted(FOLDER.glob("bench_*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem.removeprefix("bench_")] = docstring.partition("\n")[0]
    return found


def rows_text(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table: medians, and the spread of rows with several samples."""
    cells = [["quantity", "median", "unit", "spread"]]
    for row in rows:
        spread = f"{row.samples.spread:.1%}" if row.samples.rounds > 1 else ""
        cells.append([row.key, f"{row.samples.median:.4g}", row.unit, spread])
    return markdown(cells)


if __name__ == "__main__":
    sys.exit(main())
