"""Run a training script of a Megatron-LM checkout over this engine: ``python -m megatron_fsdp.megatron``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp.command_parser import CommandParser
from megatron_fsdp.config.flags import FLAGS, Effect, add_megatron_fsdp_args
from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.megatron.adapter import install
from megatron_fsdp.integrations.megatron.settings import (
    DDP_RULES,
    MODEL_RULES,
    OPTIMIZER_RULES,
    combinations_of,
    refusals_of,
    spell_flag,
)
from megatron_fsdp.optim.megatron_muon import MUON_NAMES

__all__ = ["Launch", "check_flags", "main", "notices_under_megatron", "plan_launch", "run"]

_VARIABLE = "MEGATRON_LM_PATH"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

_DESCRIPTION = """\
Run a training script of a Megatron-LM checkout, with --use-megatron-fsdp on this engine instead of Megatron's own:

  torchrun --nproc-per-node 8 -m megatron_fsdp.megatron --megatron-path ~/Megatron-LM pretrain_gpt.py \\
      --use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params ...

No file of the checkout is changed. What follows SCRIPT is the script's own; flags that this engine cannot follow are
refused before anything starts. docs/megatron.md says more."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A script's file and flags, the folder with ``megatron/core`` in it, and a line for each flag without effect."""

    checkout: Path
    script: Path
    flags: tuple[str, ...]
    notices: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script that the arguments (default: those of the process) name, and return 0.

    What is wrong with the arguments ends the process with status 2 before anything starts.

    Example:
        main(["--megatron-path", "Megatron-LM", "pretrain_gpt.py", "--use-megatron-fsdp"])
    """
    usage = "%(prog)s [--megatron-path PATH] SCRIPT [flags of the script ...]"
    parser = CommandParser("python -m megatron_fsdp.megatron", _DESCRIPTION, usage=usage)
    help_text = f"the Megatron-LM checkout; without it, ${_VARIABLE}, or else the folder of SCRIPT"
    parser.add_argument("--megatron-path", metavar="PATH", help=help_text)
    parser.add_argument("script", metavar="SCRIPT", help="a file here, or else in the checkout: pretrain_gpt.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script, --use-megatron-fsdp among them")
    given = parser.parse_args(arguments)
    try:
        launch = plan_launch(given.script, given.flags, given.megatron_path)
    except ConfigError as error:
        parser.error(str(error))
    run(launch)
    return 0


def plan_launch(script: str, flags: Sequence[str], megatron_path: str | None = None) -> Launch:
    """Find the checkout and the script, and check flags and environment; nothing of Megatron is imported.

    Args:
        script: a file here, or else in the checkout.
        megatron_path: the checkout. None: the environment's MEGATRON_LM_PATH, or else the folder of ``script``.
    """
    checkout = _checkout(script, megatron_path)
    candidates = [Path(script), checkout / script]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise ConfigError(f"found no script {script!r} here ({Path.cwd()}) or in the checkout ({checkout})")
    notices: list[str] = []
    if not {"-h", "--help"} & set(flags):
        if os.environ.get(_CONNECTIONS) == "1":
            raise ConfigError(
                f"found {_CONNECTIONS}=1, which Megatron refuses with --use-megatron-fsdp: gathers and reductions "
                f"would wait in one queue with compute. unset {_CONNECTIONS}, or export {_CONNECTIONS}=8"
            )
        notices = notices_under_megatron(check_flags(flags))
    # One engine serves both versions, and a Megatron before version 2 does not know the flag.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--megatron-fsdp-version")
    return Launch(checkout, file.resolve(), tuple(parser.parse_known_args(list(flags))[1]), tuple(notices))


def run(launch: Launch) -> None:
    """Put this engine in place of Megatron's, and run the script in this process as its main program."""
    # As Python does for a script, its folder comes first; the checkout's packages come before installed ones.
    sys.path[:0] = [str(launch.script.parent), str(launch.checkout)]
    changed = install()
    _check_origin(launch.checkout)
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_fsdp: {launch.script.name} runs on this engine; changed: {', '.join(changed)}", flush=True)
        for line in launch.notices:
            print(f"megatron_fsdp: {line}", flush=True)
    sys.argv = [str(launch.script), *launch.flags]
    runpy.run_path(str(launch.script), run_name="__main__")


def _checkout(script: str, megatron_path: str | None) -> Path:
    named = megatron_path or os.environ.get(_VARIABLE)
    found = Path(named).expanduser() if named else Path(script).resolve().parent
    if (found / "megatron" / "core").is_dir():
        return found.resolve()
    source = "--megatron-path" if megatron_path else f"${_VARIABLE}" if named else "the folder of the script"
    raise ConfigError(
        f"found no Megatron-LM checkout in {source} ({found}): wanted a folder with megatron/core in it; give "
        f"--megatron-path PATH or set {_VARIABLE}"
    )


def _check_origin(checkout: Path) -> None:
    core = sys.modules["megatron.core"]
    origin = Path(str(core.__file__)).resolve()
    wanted = (checkout / "megatron" / "core").resolve()
    if wanted not in origin.parents:
        raise ConfigError(
            f"megatron.core was imported from {origin.parent}, wanted {wanted}; start this launcher before anything "
            "that imports megatron"
        )


# Flags of Megatron-LM, besides those around FSDP, whose settings this engine may have to refuse; and their types.
_OF_THE_MODEL: dict[str, dict[str, Any]] = {
    **{
        f"--{name}": {"type": int}
        for name in """tensor-model-parallel-size expert-tensor-parallel-size tensor-parallel-num-weight-shards
        expert-tensor-parallel-num-weight-shards pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage
        num-virtual-stages-per-pipeline-rank mtp-num-layers""".split()
    },
    **{f"--{name}": {} for name in ("save", "load")},
    **{f"--{name}-format": {"dest": name} for name in ("fp8", "fp4")},
    **{
        f"--{name}": {"action": "store_true"}
        for name in ("delay-wgrad-compute", "enable-cuda-graph", "overlap-moe-expert-parallel-comm")
    },
}

# What a flag without effect is said for: others are done in any case, or by Megatron.
_MISSING = (Effect.LATER, Effect.PACKAGE, Effect.HARDWARE)


def check_flags(flags: Sequence[str]) -> FsdpConfig:
    """Return what the flags of a training script ask of this engine; the others are Megatron's to check.

    Raises:
        ConfigError: no ``--use-megatron-fsdp``; flags that contradict each other; a setting that this engine does not
            do under Megatron. All reasons are in one message, with the cure for each.
        SystemExit: a value of the wrong type, which argparse reports.
    """
    parser = argparse.ArgumentParser(prog="the script's flags", add_help=False, allow_abbrev=False)
    for name, options in _OF_THE_MODEL.items():
        parser.add_argument(name, **options)
    args, _ = add_megatron_fsdp_args(parser).parse_known_args(list(flags))
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
    found += refusals_of((args, MODEL_RULES), (args, DDP_RULES), spell=spell_flag)
    found += [*combinations_of(args, spell_flag), *_refused_together(args)]
    found += refusals_of((args, OPTIMIZER_RULES), spell=spell_flag)
    if args.optimizer in MUON_NAMES:
        found.append(
            f"--optimizer {args.optimizer}: Megatron's scripts refuse it beside --use-megatron-fsdp; take "
            "mcore_adapter.get_megatron_optimizer in a loop of your own"
        )
    if found:
        raise ConfigError("; ".join(dict.fromkeys(found)))
    return config


def _refused_together(args: argparse.Namespace) -> list[str]:
    """Return a line with the cure for flags of Megatron's that cannot be followed beside each other."""
    found = []
    tensor = args.tensor_model_parallel_size or 1
    for prefix, size in (("", tensor), ("expert_", args.expert_tensor_parallel_size or tensor)):
        shards = getattr(args, f"{prefix}tensor_parallel_num_weight_shards")
        if shards not in (None, size):
            found.append(
                f"{spell_flag(f'{prefix}tensor_parallel_num_weight_shards', shards)}: weights are cut "
                f"over {size} ranks for tensor parallelism, and sharded over data-parallel ones: leave it out"
            )
    flags = [flag for flag, value in (("--save", args.save), ("--load", args.load)) if value]
    if flags and (args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank):
        found.append(
            f"{' and '.join(flags)} with virtual pipeline stages: Megatron prepares fsdp_dtensor checkpoints of one "
            "chunk alone; train without --num-layers-per-virtual-pipeline-stage and "
            "--num-virtual-stages-per-pipeline-rank, or save sharded_state_dict() of each chunk in a loop of your own"
        )
    return found


def notices_under_megatron(config: FsdpConfig) -> list[str]:
    """Return one line, with the reason, for every flag that was given and whose effect a job does not get."""
    missing = [flag for flag in FLAGS if flag.effect in _MISSING and getattr(config, flag.dest) != flag.default]
    return [flag.notice(flag.spell(getattr(config, flag.dest))) for flag in missing]
