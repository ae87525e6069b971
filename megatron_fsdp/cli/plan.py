"""``megatron-fsdp plan``: memory, traffic and time of a training step, before there is a machine to run it on."""

from __future__ import annotations

import argparse

from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.plan_arguments import add_plan_arguments as add_arguments

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  megatron-fsdp plan --model llama3-8b --mesh 8                    one node, FP32 main weights, bf16 compute
  megatron-fsdp plan --model llama3-70b --mesh 8x16 --html plan.html
  megatron-fsdp plan --model llama3-70b --fit 80GiB --gpus 64      search what fits
  megatron-fsdp plan --model llama3-70b --world 64 --tp 8 --pp 2   with tensor and pipeline parallelism
  megatron-fsdp plan --hf-config config.json --mesh 8 --json"""


def run(args: argparse.Namespace) -> int:
    """Run the command; see ``megatron-fsdp plan --help``.

    Returns:
        0; 1 when ``--fit`` finds nothing that fits; 2 when the request makes no sense, with the reason on stderr.
    """
    if args.list_models:
        print("\n".join(catalog.names()))
        return 0
    # It imports torch, which takes seconds.
    from megatron_fsdp.cli.plan_run import run_plan

    return run_plan(args)
