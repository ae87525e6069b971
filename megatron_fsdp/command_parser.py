"""A command-line parser with one-line errors that suggest the right name, and help with examples and defaults."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_fsdp.errors import nearest

__all__ = ["CommandParser", "record_error"]


def record_error(message: str) -> None:
    """Write the reason why this rank ends to torchrun's error file; does nothing without torchrun.

    torchrun prints the reason at the end of its report, instead of a hint to install a recorder.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        reason = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": reason}), encoding="utf-8")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions and examples, and shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, argparse.SUPPRESS, []) and action.nargs != 0
        if not action.help or not has_default or "default" in action.help:
            return action.help
        values = action.default if isinstance(action.default, list | tuple) else [action.default]
        return f"{action.help} (default {shlex.join(map(str, values)).replace('%', '%%')})"


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` without abbreviations that prints usage only on ``--help``, and suggests similar names.

    Args:
        prog: the command as users type it.
        description: the purpose of the command.
        examples: lines for the end of ``--help``.
    """

    def __init__(self, prog: str, description: str = "", examples: str = "", **others: Any) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"examples:\n{examples}" if examples else None,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            **others,
        )

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line on stderr; in a job of several ranks only rank 0 prints it."""
        text = " ".join(message.split())
        line = f"{self.prog}: {text} ({self.prog} --help)" if "fix:" in text else f"{self.prog}: {self.with_fix(text)}"
        record_error(line)
        self.exit(2, f"{line}\n" if os.environ.get("RANK", "0") == "0" else None)

    def parse_known_args(  # type: ignore[override]  # argparse's overloads differ in the namespace alone
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments; exit with an error that lists all unknown flags."""
        found, unknown = super().parse_known_args(args, namespace)
        flags = list(dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-")))
        if flags:
            self.error(self.unknown(flags))
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}. fix: leave it out, or put its option in front of it")
        return found, unknown

    def with_fix(self, message: str) -> str:
        """Return a message of argparse with a fix, if it has none."""
        return message if "fix:" in message else f"{message}. fix: follow {self.prog} --help"

    def unknown(self, flags: Sequence[str]) -> str:
        """Return the message for unknown flags, each with the nearest option."""
        options = [option for action in self._actions for option in action.option_strings]
        meant = [nearest(flag, options) for flag in flags]
        if len(flags) == 1:
            return f"unknown option {flags[0]}. fix: use {meant[0]}, the most similar one"
        return f"unknown options {', '.join(flags)}. fix: use {', '.join(meant)}, the most similar ones"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(choices)}. fix: use {nearest(str(value), choices)}"
            )
