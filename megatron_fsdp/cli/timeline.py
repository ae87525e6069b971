"""``megatron-fsdp timeline``: a page or a picture from the lanes in a Chrome trace."""

from __future__ import annotations

import argparse
import sys

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.observability.timeline_files import read_record, write_record

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("trace", metavar="TRACE", help="Chrome trace with a Timeline in it, such as --profile writes")
    parser.add_argument("--html", metavar="FILE", help="write a page for a browser, without links to anywhere")
    parser.add_argument("--png", metavar="FILE", help="draw the lanes (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Print the share of exposed communication, and write what is asked for.

    Returns:
        0; 2 when a file cannot be read or written, with the reason on stderr.
    """
    try:
        record = read_record(args.trace)
        for path, suffix in ((args.html, ".html"), (args.png, ".png")):
            if path is None:
                continue
            if not path.lower().endswith(suffix):
                raise ConfigError(f"--{suffix[1:]} {path}: wanted a file that ends in {suffix}")
            write_record(record, path)
    except ConfigError as error:
        print(f"megatron-fsdp timeline: {error}", file=sys.stderr)
        return 2
    print(record)
    return 0
