"""Run a training script of a Megatron-LM checkout over this engine: ``python -m megatron_fsdp.megatron``."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp.command_parser import CommandParser
from megatron_fsdp.config.flags import FLAGS, Effect, add_megatron_fsdp_args
from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.megatron.adapter import install
from megatron_fsdp.integrations.megatron.data_parallel import OWN_FLAGS
from megatron_fsdp.integrations.megatron.settings import (
    DDP_RULES,
    MODEL_RULES,
    OPTIMIZER_RULES,
    combinations_of,
    refusals_of,
    spell_flag,
)
from megatron_fsdp.optim.muon.megatron_muon import MUON_NAMES

__all__ = ["check_flags", "main", "notices_under_megatron"]

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

_DESCRIPTION = """\
Run a training script of a Megatron-LM checkout, with --use-megatron-fsdp on this engine instead of Megatron's own:

  torchrun --nproc-per-node 8 -m megatron_fsdp.megatron ~/Megatron-LM/pretrain_gpt.py \\
      --use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params ...

A script outside of the checkout needs the checkout on PYTHONPATH. No file of the checkout is changed. The flags after
SCRIPT are the script's. Flags that this engine does not support end the command before training: docs/megatron.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a Megatron training script in this process; return 0.

    Wrong arguments end the process with status 2 before training starts.

    Args:
        arguments: the script's path and its flags. None: ``sys.argv[1:]``.

    Example:
        main(["Megatron-LM/pretrain_gpt.py", "--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"])
    """
    usage = "%(prog)s SCRIPT [flags of the script ...]"
    parser = CommandParser("python -m megatron_fsdp.megatron", _DESCRIPTION, usage=usage)
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="pretrain_gpt.py of a checkout, or one like it")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script, --use-megatron-fsdp among them")
    given = parser.parse_args(arguments)
    script, notices = given.script.resolve(), list[str]()
    try:
        if not script.is_file():
            raise ConfigError(
                f"found no script {script}. fix: give the path of one, such as ~/Megatron-LM/pretrain_gpt.py"
            )
        if not {"-h", "--help"} & set(given.flags):
            if os.environ.get(_CONNECTIONS) == "1":
                raise ConfigError(
                    f"found {_CONNECTIONS}=1, which Megatron refuses with --use-megatron-fsdp: gathers and reductions "
                    f"would wait in one queue with compute. fix: unset {_CONNECTIONS}, or export {_CONNECTIONS}=8"
                )
            notices = notices_under_megatron(check_flags(given.flags))
    except ConfigError as error:
        parser.error(str(error))
    # Python does the same for a script.
    sys.path.insert(0, str(script.parent))
    changed = install()
    if os.environ.get("RANK", "0") == "0":
        lines = [f"{script.name} runs on this engine; changed: {', '.join(changed)}", *notices]
        print("\n".join(f"megatron_fsdp: {line}" for line in lines), flush=True)
    # The engine ignores the version, and a Megatron without version 2 does not know the flag.
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--megatron-fsdp-version")
    # No Megatron knows this one.
    own.add_argument("--fsdp-forward-order", action="store_true")
    asked, flags = own.parse_known_args(given.flags)
    OWN_FLAGS.fsdp_forward_order = asked.fsdp_forward_order
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")
    return 0


# Other flags of Megatron-LM with settings that this engine does not support, and their argparse options.
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

# Flags whose lack of effect is logged. The engine or Megatron acts on the other flags anyway.
_MISSING = (Effect.LATER, Effect.PACKAGE, Effect.HARDWARE)


def check_flags(flags: Sequence[str]) -> FsdpConfig:
    """Return the settings of this engine from the flags of a training script. Megatron checks the other flags.

    Raises:
        ConfigError: ``--use-megatron-fsdp`` is missing, flags contradict each other, or a setting is not supported
            under Megatron. One message has all reasons and fixes.
        SystemExit: a value of the wrong type, which argparse reports.
    """
    parser = argparse.ArgumentParser(prog="the script's flags", add_help=False, allow_abbrev=False)
    for name, options in _OF_THE_MODEL.items():
        parser.add_argument(name, **options)
    args, _ = add_megatron_fsdp_args(parser).parse_known_args(list(flags))
    if not args.use_megatron_fsdp:
        raise ConfigError(
            "found no --use-megatron-fsdp among the script's flags: Megatron would train without this engine. fix: "
            "add --use-megatron-fsdp --ckpt-format fsdp_dtensor, or start the script without this launcher"
        )
    found = []
    if args.ckpt_format != "fsdp_dtensor":
        found.append(
            f"--ckpt-format {args.ckpt_format}: Megatron saves sharded models as fsdp_dtensor only. fix: --ckpt-format "
            "fsdp_dtensor"
        )
    try:
        config = FsdpConfig.from_args(args)
    except ConfigError as error:
        found.append(str(error))
    found += refusals_of((args, MODEL_RULES), (args, DDP_RULES), spell=spell_flag)
    found += [*combinations_of(args, spell_flag), *_refused_together(args)]
    # FsdpConfig has already checked the optimizer.
    others = tuple(rule for rule in OPTIMIZER_RULES if rule[0] != "optimizer")
    found += refusals_of((args, others), spell=spell_flag)
    if args.optimizer in MUON_NAMES:
        found.append(
            f"--optimizer {args.optimizer}: Megatron's scripts refuse it together with --use-megatron-fsdp. fix: call "
            "megatron_fsdp.megatron.get_megatron_optimizer in a training loop of your own"
        )
    if found:
        raise ConfigError("; ".join(dict.fromkeys(found)))
    return config


def _refused_together(args: argparse.Namespace) -> list[str]:
    """Return one line with reason and fix for each unsupported combination of Megatron's flags."""
    found = []
    tensor = args.tensor_model_parallel_size or 1
    for prefix, size in (("", tensor), ("expert_", args.expert_tensor_parallel_size or tensor)):
        shards = getattr(args, f"{prefix}tensor_parallel_num_weight_shards")
        if shards not in (None, size):
            found.append(
                f"{spell_flag(f'{prefix}tensor_parallel_num_weight_shards', shards)}: weights are cut "
                f"over {size} ranks for tensor parallelism and sharded over data-parallel ranks. fix: leave it out"
            )
    flags = [flag for flag, value in (("--save", args.save), ("--load", args.load)) if value]
    if flags and (args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank):
        found.append(
            f"{' and '.join(flags)} with virtual pipeline stages: Megatron prepares fsdp_dtensor checkpoints of one "
            "chunk only. fix: train without --num-layers-per-virtual-pipeline-stage and "
            "--num-virtual-stages-per-pipeline-rank, or save sharded_state_dict() of each chunk in a loop of your own"
        )
    return found


def notices_under_megatron(config: FsdpConfig) -> list[str]:
    """Return one line, with the reason, for each given flag that has no effect in this job."""
    missing = [flag for flag in FLAGS if flag.effect in _MISSING and getattr(config, flag.dest) != flag.default]
    return [flag.notice(flag.spell(getattr(config, flag.dest))) for flag in missing]
