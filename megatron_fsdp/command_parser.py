"""A parser whose errors are one line that names what was meant, and whose help has examples and defaults."""

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
    """Leave the reason why this rank ends where torchrun looks for it, in its format; nothing happens without torchrun.

    torchrun states the reason at the end of its report, in place of a hint to install a recorder.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        reason = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": reason}), encoding="utf-8")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples, and says the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, argparse.SUPPRESS, []) and action.nargs != 0
        if not action.help or not has_default or "default" in action.help:
            return action.help
        values = action.default if isinstance(action.default, list | tuple) else [action.default]
        return f"{action.help} (default {shlex.join(map(str, values)).replace('%', '%%')})"


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that knows no abbreviations, prints usage on ``--help`` alone, and suggests names.

    Args:
        prog: the command as users write it. description: what it does. examples: lines for the end of ``--help``.
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
        """End the process with status 2 and one line on stderr, said by the first rank where there are several."""
        line = f"{self.prog}: {' '.join(message.split())} ({self.prog} --help)"
        record_error(line)
        self.exit(2, f"{line}\n" if os.environ.get("RANK", "0") == "0" else None)

    def parse_known_args(  # type: ignore[override]  # argparse's overloads differ in the namespace alone
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse all flags that this parser does not have, where its own options are known."""
        found, unknown = super().parse_known_args(args, namespace)
        flags = list(dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-")))
        if flags:
            self.error(self.unknown(flags))
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return found, unknown

    def unknown(self, flags: Sequence[str]) -> str:
        """Return what to say of flags that this parser does not have, each with the option that is nearest."""
        options = [option for action in self._actions for option in action.option_strings]
        meant = [nearest(flag, options) for flag in flags]
        if len(flags) == 1:
            return f"unknown option {flags[0]}; did you mean {meant[0]}?"
        listed = (f"{flag} (did you mean {each}?)" for flag, each in zip(flags, meant, strict=True))
        return f"unknown options {', '.join(listed)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(choices)}; did you mean {nearest(str(value), choices)}?"
            )
