"""Megatron-LM's flags around FSDP, as one table: the parser, the documentation and the notices are made from it.

``python -m megatron_fsdp.config.parser > docs/flags.md`` writes the documentation.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, TypeVar

from megatron_fsdp.config.flag_rules import RULES, Rule
from megatron_fsdp.config.flags import FLAGS, SECTIONS, Effect, Flag, attribute, flag_of

__all__ = ["FLAGS", "RULES", "Effect", "Flag", "Rule", "add_megatron_fsdp_args", "flag_of", "flags_markdown"]

P = TypeVar("P", bound=argparse.ArgumentParser)


def add_megatron_fsdp_args(parser: P) -> P:
    """Add Megatron-LM's FSDP flags to a parser, with its names, defaults and choices, and return the parser.

    Flags that the parser has already are left as they are. ``FsdpConfig.from_args`` reads and checks the result.

    Example:
        parser = add_megatron_fsdp_args(argparse.ArgumentParser())
        args = parser.parse_args(["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads"])
        config = FsdpConfig.from_args(args)
    """
    for title, flags in SECTIONS.items():
        group = parser.add_argument_group(f"Megatron FSDP: {title[0].lower()}{title[1:]}")
        for flag in flags:
            if flag.name not in parser._option_string_actions:
                group.add_argument(flag.name, **_options(flag))
    return parser


def _options(flag: Flag) -> dict[str, Any]:
    here = "" if flag.effect is Effect.ACTS else f" (here: {flag.effect.value}; {flag.here})"
    options: dict[str, Any] = {"dest": flag.dest, "help": f"{flag.meaning}{here}".replace("%", "%%")}
    if flag.kind is bool:
        if flag.default is True and not flag.is_off_switch:
            return {**options, "action": argparse.BooleanOptionalAction, "default": True}
        return {**options, "action": "store_false" if flag.is_off_switch else "store_true"}
    if flag.kind is tuple:
        return {**options, "nargs": "*", "default": [], "metavar": "NAME"}
    options |= {"type": flag.kind, "default": flag.default}
    return {**options, "choices": flag.choices} if flag.choices else options


def flags_markdown() -> str:
    """Return docs/flags.md: a table of all flags, and which of them are refused together."""
    lines = [
        "# Flags",
        "",
        "Megatron-LM's flags around FSDP, with its names, defaults and choices. `add_megatron_fsdp_args(parser)` adds",
        "them to a parser, `FsdpConfig.from_args(args)` checks them. `config.explain()` says which flag caused what,",
        "`config.notices()` which of the given flags do nothing here, and why. `config.fully_shard_kwargs(mesh)` are",
        "for every `fully_shard` of a model; `config.apply(model)` sets the rest afterwards. What concerns",
        "losses, checks, checkpoints and the start of a run is done by [the training script](training_script.md).",
        "",
        "This file is written by `python -m megatron_fsdp.config.parser > docs/flags.md`.",
    ]
    for title, flags in SECTIONS.items():
        lines += _heading(title, "Flag | Default, and other values | Meaning | Effect here")
        lines += [_row(flag) for flag in flags]
    lines += ["", *_UNDER_THE_LAUNCHER.splitlines()]
    lines += _heading("Refused", "Flag | | | Reason")
    lines += [f"| `{rule.first}` | {rule.relation} | `{rule.second}` | {rule.reason} |" for rule in RULES]
    return "\n".join(lines) + "\n"


_UNDER_THE_LAUNCHER = """\
## Under the launcher

`python -m megatron_fsdp.megatron` ([megatron.md](megatron.md)) hands the flags on to Megatron, whose configs this
engine reads. The tables hold there too, but for these:

- `--ckpt-format fsdp_dtensor` has to be given.
- `--optimizer-cpu-offload`, `--use-precision-aware-optimizer`, `--check-for-large-grads`, `--fp8-param-gather`, a
  `--cuda-graph-impl` other than `none` and optimizers besides adam and sgd are refused.
- `--fp16` trains with Megatron's grad scaler.
- `--no-gradient-accumulation-fusion` changes nothing: the fusion of Megatron's layers is off in any case.
- `--data-parallel-random-init`, Megatron's own: ranks that drew different weights get the first rank's.
- Checkpoints and their strictness, the limit of `--clip-grad`, `--async-save`, `--dump-param-to-param-group-map`
  and `--fake-process-group` are Megatron's own code.
- Flags that are "not supported yet", or need hardware or a package that is not used, are said at the start.
"""


def _heading(title: str, columns: str) -> list[str]:
    return ["", f"## {title}", "", f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]


def _row(flag: Flag) -> str:
    default = "none" if flag.default in (None, ()) else f"`{flag.default}`"
    dest = "" if flag.dest == attribute(flag.name) else f"`{flag.dest}`: "
    return flag.row(f"`{flag.name}`", dest + default)


if __name__ == "__main__":
    sys.stdout.write(flags_markdown())
