"""``megatron-fsdp timeline``: what a trace of torch.profiler says of exposed communication."""

from __future__ import annotations

import argparse
import sys

from megatron_fsdp.errors import ConfigError

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  megatron-fsdp timeline trace.json                 the share of exposed communication, unit by unit
  megatron-fsdp timeline trace.json --png lanes.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("trace", metavar="TRACE", help="Chrome trace of torch.profiler, such as --profile writes")
    parser.add_argument("--png", metavar="FILE", help="draw gathers, waits and reductions (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Print the share of exposed communication and each unit's part, and draw what is asked for.

    Returns:
        0; 2 when a file cannot be read or written, with the reason on stderr.
    """
    from megatron_fsdp.observability.timeline import Timeline

    try:
        timeline = Timeline.read(args.trace)
        if args.png is not None:
            timeline.draw(args.png)
    except ConfigError as error:
        print(f"megatron-fsdp timeline: {error}", file=sys.stderr)
        return 2
    print(timeline)
    return 0
