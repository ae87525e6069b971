"""Write docs/flags.md from the flags of ``megatron_fsdp/config``.

``python docs/settings.py``
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from megatron_fsdp.config.flag_rules import RULES  # noqa: E402
from megatron_fsdp.config.flags import SECTIONS, Flag  # noqa: E402

FLAGS_PAGE = ROOT / "docs" / "flags.md"


def flags_markdown() -> str:
    """Return docs/flags.md: a table of all flags, and which of them are refused together."""
    lines = [
        "# Flags",
        "",
        "This page lists Megatron-LM's FSDP flags, with Megatron's names, defaults and choices, and their effect here.",
        "",
        "- `add_megatron_fsdp_args(parser)` adds them to a parser.",
        "- `config = FsdpConfig.from_args(args)` checks them.",
        "- Pass `config.fully_shard_kwargs(mesh)` to every `fully_shard` call of a model. Then call",
        "  `config.apply(model)`, which calls the methods of the sharded model that set the rest.",
        "- `config.explain()` returns the dtypes and the effect of each flag. `config.notices()` returns the given",
        "  flags that have no effect here, with the reason.",
        "",
        "Flags for losses, checks, checkpoints and startup act in [the training script](training_script.md) only.",
        "",
        "The last column begins with one of these. Flags other than *acted on* are accepted and change nothing:",
        "",
        "- *acted on*: the flag has the effect that follows.",
        "- *always so*: this engine does what the flag asks for, with or without it.",
        "- *nothing to change*: the flag steers a part of Megatron that this engine does not have.",
        "- *not supported yet*, *needs hardware ...*, *needs a package ...*: the engine does what follows instead, or",
        "  lacks what follows.",
        "",
        "`python docs/settings.py` writes this page.",
    ]
    for title, flags in SECTIONS.items():
        lines += heading(title, "Flag | Default, and other values | Meaning | Effect here")
        lines += [flag_row(flag) for flag in flags]
    lines += ["", *UNDER_THE_LAUNCHER.splitlines()]
    lines += heading("Combinations that raise an error", "Flag | Relation | Other flag | Reason")
    lines += [f"| `{rule.first}` | {rule.relation} | `{rule.second}` | {rule.reason} |" for rule in RULES]
    return "\n".join(lines) + "\n"


UNDER_THE_LAUNCHER = """\
## Under the launcher

`python -m megatron_fsdp.megatron` ([megatron.md](megatron.md)) passes the flags to Megatron, and this engine reads
Megatron's configs. The tables apply there too, with these differences:

- `--ckpt-format fsdp_dtensor` is required.
- `--optimizer-cpu-offload`, `--use-precision-aware-optimizer`, `--check-for-large-grads`, `--fp8-param-gather`, a
  `--cuda-graph-impl` other than `none`, and optimizers other than adam and sgd raise an error.
- `--fp16` trains with Megatron's grad scaler.
- `--no-gradient-accumulation-fusion` has no effect: the fusion of Megatron's layers is always off.
- `--data-parallel-random-init` (Megatron's own): ranks with different weights get the weights of the first rank.
- Megatron's own code handles checkpoints and their strictness, the limit of `--clip-grad`, `--async-save`,
  `--dump-param-to-param-group-map` and `--fake-process-group`.
- Ignored flags ("not supported yet", or in need of hardware or a package that is not used) are logged at startup.
"""


def heading(title: str, columns: str) -> list[str]:
    return ["", f"## {title}", "", f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]


def flag_row(flag: Flag) -> str:
    default = "none" if flag.default in (None, ()) else f"`{flag.default}`"
    dest = "" if flag.name == f"--{flag.dest.replace('_', '-')}" else f"`{flag.dest}`: "
    values = [dest + default, *(f"`{choice}`" for choice in flag.choices if choice != flag.default)]
    return f"| `{flag.name}` | {', '.join(values)} | {flag.meaning} | {flag.effect.value}: {flag.here} |"


if __name__ == "__main__":
    FLAGS_PAGE.write_text(flags_markdown(), encoding="utf-8")
