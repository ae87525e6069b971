"""Draw the losses of several training runs into one chart, from their logs, and print the last validation losses.

python examples/compare_runs.py --output losses.png AdamW=runs/gpt Muon=runs/gpt-muon
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gpt.train_log import draw_losses
from megatron_fsdp import ConfigError
from megatron_fsdp.command_parser import CommandParser


def main(arguments: Sequence[str]) -> int:
    """Draw the chart and return the exit status: 0, or 2 after an error that the user can mend."""
    parser = CommandParser("compare_runs.py", __doc__ or "")
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="what to call a run, and its --save folder")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    args = parser.parse_args(arguments)
    runs = {}
    for run in args.runs:
        name, _, folder = run.partition("=")
        log = Path(folder) / "log.jsonl"
        if not folder or not log.exists():
            parser.error(f"{run!r} has no log.jsonl. fix: give NAME=FOLDER, with a run's --save folder")
        runs[name] = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        for last in [row for row in runs[name] if "validation_loss" in row][-1:]:
            print(f"{name}: validation loss {last['validation_loss']:.4f} at iteration {last['iteration']}")
    try:
        draw_losses(runs, args.output)
    except ConfigError as error:
        print(f"compare_runs.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
