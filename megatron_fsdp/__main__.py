"""The ``megatron-fsdp`` command; also ``python -m megatron_fsdp``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

__all__ = ["COMMANDS", "main"]

# Name, module with ``add_arguments(parser)`` and ``run(args) -> int``, and what it is for. Modules are imported when
# their command is called.
COMMANDS = (
    ("plan", "megatron_fsdp.cli.plan", "plan memory, traffic and time of a training step from shapes alone"),
    ("checkpoint", "megatron_fsdp.cli.checkpoint", "inspect, verify, export or import a checkpoint"),
    ("timeline", "megatron_fsdp.cli.timeline", "draw the lanes of a step, and what it waited for, from a trace"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (default: those of the process) name, and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else ""
    overview = "\n".join(f"  {command:<12}{purpose}" for command, _, purpose in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="megatron-fsdp",
        usage="megatron-fsdp COMMAND [options]; megatron-fsdp COMMAND --help",
        description=f"commands:\n{overview}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    modules = {command: module for command, module, _ in COMMANDS}
    if name not in modules:
        parser.parse_args(arguments if name.startswith("-") else [])
        known = ", ".join(modules)
        parser.error(f"{name!r} is no command; there are {known}" if name else f"no command given; there are {known}")
    command = importlib.import_module(modules[name])
    parser = argparse.ArgumentParser(prog=f"megatron-fsdp {name}", allow_abbrev=False)
    command.add_arguments(parser)
    args = parser.parse_args(arguments[1:])
    try:
        code: int = command.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (head, less) has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
