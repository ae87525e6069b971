"""The command line of a Megatron-LM script, checked before Megatron starts; imports no Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_fsdp.arguments import FLAGS, Effect, add_megatron_fsdp_args
from megatron_fsdp.config import FsdpConfig
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.mcore_model import refusals_of, spell_flag
from megatron_fsdp.mcore_optimizer import optimizer_refusals_of
from megatron_fsdp.optim.megatron_muon import MUON_NAMES

__all__ = ["check_flags", "notices_under_megatron", "without_version"]

_VERSION = "--megatron-fsdp-version"
# Flags of Megatron-LM, besides those around FSDP, whose settings this engine may have to refuse; and their types.
_OF_THE_MODEL = {
    "--tensor-model-parallel-size": int,
    "--pipeline-model-parallel-size": int,
    "--expert-model-parallel-size": int,
}
_FORMATS = {"--fp8-format": "fp8", "--fp4-format": "fp4"}
_SWITCHES = ("--delay-wgrad-compute", "--enable-cuda-graph")
# What a flag without effect is said for: others are done in any case, or by Megatron.
_MISSING = (Effect.LATER, Effect.PACKAGE, Effect.HARDWARE)


def check_flags(flags: Sequence[str]) -> FsdpConfig:
    """Return what the flags of a training script ask of this engine.

    Flags that are neither around FSDP nor listed here are Megatron's to check.

    Args:
        flags: as for ``pretrain_gpt.py``, with values in the next word or after "=".
    Raises:
        ConfigError: no ``--use-megatron-fsdp``; flags that contradict each other; a setting that this engine does not
            do under Megatron. All reasons are in one message, with the cure for each.
        SystemExit: a value of the wrong type, which argparse reports.
    """
    args, _ = _parser().parse_known_args(list(flags))
    if not args.use_megatron_fsdp:
        raise ConfigError(
            "found no --use-megatron-fsdp among the script's flags: Megatron would train without this engine. Add it, "
            "with --ckpt-format fsdp_dtensor, or start the script without this launcher"
        )
    found = []
    if args.ckpt_format != "fsdp_dtensor":
        found.append(f"--ckpt-format {args.ckpt_format}: Megatron saves sharded models as fsdp_dtensor only; give that")
    try:
        config = FsdpConfig.from_args(args)
    except ConfigError as error:
        found.append(str(error))
    found += [*refusals_of(args, args, spell_flag), *optimizer_refusals_of(args, spell_flag)]
    if args.optimizer in MUON_NAMES:
        found.append(
            f"--optimizer {args.optimizer}: Megatron's scripts refuse it beside --use-megatron-fsdp; take "
            "mcore_adapter.get_megatron_optimizer in a loop of your own"
        )
    if found:
        raise ConfigError("; ".join(dict.fromkeys(found)))
    return config


def notices_under_megatron(config: FsdpConfig) -> list[str]:
    """Return one line, with the reason, for every flag that was given and whose effect a job does not get."""
    missing = [flag for flag in FLAGS if flag.effect in _MISSING and getattr(config, flag.dest) != flag.default]
    return [
        f"{flag.spell(getattr(config, flag.dest))} does nothing here; {flag.effect.value}: {flag.here}"
        for flag in missing
    ]


def without_version(flags: Sequence[str]) -> list[str]:
    """Return the flags without ``--megatron-fsdp-version``, for a Megatron that does not know it."""
    kept: list[str] = []
    skips_value = False
    for flag in flags:
        if not skips_value and not flag.startswith(f"{_VERSION}=") and flag != _VERSION:
            kept.append(flag)
        skips_value = flag == _VERSION
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="the script's flags", add_help=False, allow_abbrev=False)
    add_megatron_fsdp_args(parser)
    for name, kind in _OF_THE_MODEL.items():
        parser.add_argument(name, type=kind, default=1)
    for name, attribute in _FORMATS.items():
        parser.add_argument(name, dest=attribute)
    for name in _SWITCHES:
        parser.add_argument(name, action="store_true")
    return parser
