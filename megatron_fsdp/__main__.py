"""The ``megatron-fsdp`` command; also ``python -m megatron_fsdp``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from megatron_fsdp import __distribution__, __version__
from megatron_fsdp.command_parser import CommandParser
from megatron_fsdp.errors import nearest

__all__ = ["COMMANDS", "main"]

# Name, module and purpose of each command. A module has ``EXAMPLES``, ``add_arguments(parser)`` and
# ``run(args) -> int``; it is imported when its command is called.
COMMANDS = (
    ("plan", "megatron_fsdp.cli.plan", "plan memory, traffic and time of a training step from shapes alone"),
    ("checkpoint", "megatron_fsdp.cli.checkpoint", "inspect, verify or export a checkpoint"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (default: ``sys.argv[1:]``) names; return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else ""
    modules = {command: module for command, module, _ in COMMANDS}
    if name not in modules:
        parser = _overview()
        parser.parse_args(arguments if name.startswith("-") else [])
        known = ", ".join(modules)
        meant = f"use {nearest(name, modules)}, the most similar of {known}"
        parser.error(f"{name!r} is no command. fix: {meant}" if name else f"no command given. fix: give one of {known}")
    command = importlib.import_module(modules[name])
    parser = CommandParser(f"megatron-fsdp {name}", _purpose(name), command.EXAMPLES)
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


def _overview() -> CommandParser:
    overview = "\n".join(f"  {command:<12}{purpose}" for command, _, purpose in COMMANDS)
    parser = CommandParser(
        "megatron-fsdp",
        f"commands:\n{overview}",
        "  megatron-fsdp plan --model llama3-8b --mesh 8\n  megatron-fsdp checkpoint verify runs/gpt",
        usage="megatron-fsdp COMMAND [options]; megatron-fsdp COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"{__distribution__} {__version__}")
    return parser


def _purpose(name: str) -> str:
    return next(purpose for command, _, purpose in COMMANDS if command == name)


if __name__ == "__main__":
    sys.exit(main())
