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
        "Megatron-LM's flags around FSDP, with its names, defaults and choices. `add_megatron_fsdp_args(parser)` adds",
        "them to a parser, `FsdpConfig.from_args(args)` checks them. `config.explain()` says the dtypes and what each",
        "flag does, `config.notices()` which of the given flags do nothing here, and why.",
        "`config.fully_shard_kwargs(mesh)` are for every `fully_shard` of a model; `config.apply(model)` sets the rest",
        "afterwards. What concerns losses, checks, checkpoints and the start of a run is done by",
        "[the training script](training_script.md).",
        "",
        "This file is written by `python docs/settings.py`.",
    ]
    for title, flags in SECTIONS.items():
        lines += heading(title, "Flag | Default, and other values | Meaning | Effect here")
        lines += [flag_row(flag) for flag in flags]
    lines += ["", *UNDER_THE_LAUNCHER.splitlines()]
    lines += heading("Refused", "Flag | | | Reason")
    lines += [f"| `{rule.first}` | {rule.relation} | `{rule.second}` | {rule.reason} |" for rule in RULES]
    return "\n".join(lines) + "\n"


UNDER_THE_LAUNCHER = """\
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


def heading(title: str, columns: str) -> list[str]:
    return ["", f"## {title}", "", f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]


def flag_row(flag: Flag) -> str:
    default = "none" if flag.default in (None, ()) else f"`{flag.default}`"
    dest = "" if flag.name == f"--{flag.dest.replace('_', '-')}" else f"`{flag.dest}`: "
    values = [dest + default, *(f"`{choice}`" for choice in flag.choices if choice != flag.default)]
    return f"| `{flag.name}` | {', '.join(values)} | {flag.meaning} | {flag.effect.value}: {flag.here} |"


if __name__ == "__main__":
    FLAGS_PAGE.write_text(flags_markdown(), encoding="utf-8")
