"""``megatron-fsdp bisect``: the first step at which the checksums of two runs differ, and the units."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron_fsdp.errors import ConfigError

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  megatron-fsdp bisect runs/on-8 runs/on-7          the logs of two runs, written with --log-checksum
  megatron-fsdp bisect a/log.jsonl b/log.jsonl"""

Rows = dict[int, dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for name in ("first", "second"):
        parser.add_argument(name, metavar=name.upper(), type=Path, help="log.jsonl of a run, or the folder it lies in")


def run(args: argparse.Namespace) -> int:
    """Print where two runs part.

    Returns:
        0 where all steps that both have agree, 1 where one differs, 2 where a log cannot be read or they have no step
        in common, with the reason on stderr.
    """
    try:
        logs = [_read(path) for path in (args.first, args.second)]
        steps = sorted(logs[0].keys() & logs[1].keys())
        if not steps:
            raise ConfigError(
                f"{args.first} and {args.second} have checksums of no step in common; log both with the same "
                "--log-checksum N"
            )
    except ConfigError as error:
        print(f"megatron-fsdp bisect: {error}", file=sys.stderr)
        return 2
    differing = [step for step in steps if logs[0][step]["checksum"] != logs[1][step]["checksum"]]
    if not differing:
        print(f"equal at all {len(steps)} steps that both logged, {steps[0]} to {steps[-1]}")
        return 0
    first = differing[0]
    equal = [step for step in steps if step < first]
    before = f"step {equal[-1]} is the last that agrees" if equal else "no step before it was logged"
    print(f"step {first} differs; {before}")
    print("\n".join(_units(logs[0][first], logs[1][first])))
    return 1


def _read(path: Path) -> Rows:
    """Return the rows with checksums by their step; of a step logged twice the later one."""
    path = path / "log.jsonl" if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a log.jsonl or its folder") from error
    rows: Rows = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break  # cut off by a crash
            raise ConfigError(f"{path}, line {number}: no JSON; wanted a log that the training script wrote") from error
        if "checksum" in row:
            rows[row["iteration"]] = row
    if not rows:
        raise ConfigError(f"{path} has no checksums; train with --log-checksum N")
    return rows


def _units(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return a line for each unit that differs."""
    if "unit_checksums" not in first or "unit_checksums" not in second:
        return ["which unit is not in both logs; train with --log-checksum-per-unit"]
    ours, theirs = first["unit_checksums"], second["unit_checksums"]
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [f"  {name or 'the root'}: {ours.get(name, 'none')} and {theirs.get(name, 'none')}" for name in names]
