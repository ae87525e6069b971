"""Write docs/flags.md and the table of docs/huggingface.md from the flags and keys of ``megatron_fsdp/config``.

``python docs/settings.py``
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from megatron_fsdp.config.flag_rules import RULES  # noqa: E402
from megatron_fsdp.config.flags import SECTIONS, Flag, Setting  # noqa: E402
from megatron_fsdp.config.hf_keys import KEYS, Key  # noqa: E402

FLAGS_PAGE, KEYS_PAGE = ROOT / "docs" / "flags.md", ROOT / "docs" / "huggingface.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->"


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


def row(setting: Setting, names: str, default: str) -> str:
    values = [default, *(f"`{choice}`" for choice in setting.choices if choice != setting.default)]
    return f"| {names} | {', '.join(values)} | {setting.meaning} | {setting.effect.value}: {setting.here} |"


def flag_row(flag: Flag) -> str:
    default = "none" if flag.default in (None, ()) else f"`{flag.default}`"
    dest = "" if flag.name == f"--{flag.dest.replace('_', '-')}" else f"`{flag.dest}`: "
    return row(flag, f"`{flag.name}`", dest + default)


def keys_markdown() -> str:
    lines = ["| Key | Default, and other values | Meaning | Effect here |", "|---|---|---|---|"]
    return "\n".join(lines + [key_row(key) for key in KEYS]) + "\n"


def key_row(key: Key) -> str:
    default = str(key.default).lower() if isinstance(key.default, bool) else key.default
    names = ", ".join(f"`{spelling}`" for spelling in (key.name, *key.others))
    names += "".join(f", once `{spelling}`" for spelling in key.older)
    return row(key, names, "none" if default is None else f"`{default}`")


def keys_page() -> str:
    """Return docs/huggingface.md with the table between its marks."""
    before, _, rest = KEYS_PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{keys_markdown()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    FLAGS_PAGE.write_text(flags_markdown(), encoding="utf-8")
    KEYS_PAGE.write_text(keys_page(), encoding="utf-8")
