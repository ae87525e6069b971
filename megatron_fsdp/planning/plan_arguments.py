"""The options of ``megatron-fsdp plan``, their defaults and help, without torch: ``--help`` answers at once."""

from __future__ import annotations

import argparse

from megatron_fsdp.planning.option_types import (
    byte_count,
    bytes_per_second,
    mesh_sizes,
    operations_per_second,
    positive_integer,
    seconds,
)
from megatron_fsdp.planning.transformer import Recompute

__all__ = ["DEFAULTS", "DTYPES", "GATHER_DTYPES", "HYBRID", "STRATEGIES", "add_plan_arguments"]

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp")
HYBRID = ("hsdp", "hfsdp")
DTYPES = ("fp32", "bf16", "fp16")
# Those of policy/precision.py, which imports torch.
GATHER_DTYPES = ("fp8", "mxfp8", "int8_block")
DEFAULTS = {
    "dtype": "bf16",
    "main_dtype": "fp32",
    "reduce_dtype": "fp32",
    "main_grads_dtype": "fp32",
    "micro_batch": 1,
    "seq_length": 4096,
    "num_microbatches": 1,
    "recompute": "none",
    "attention": "fused",
    "dropout": False,
    "split_main_params": False,
    "reserve": 0,
    "rank": 0,
    "optimizer": "adamw",
}


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to plan for."""
    model = parser.add_argument_group("model (one of the first three)")
    model.add_argument("--model", metavar="NAME", help="a published model, such as llama3-8b; --list-models lists them")
    model.add_argument("--hf-config", metavar="FILE", help="config.json of a Hugging Face model")
    model.add_argument("--factory", metavar="PACKAGE.MODULE:FUNCTION", help="function that builds the model (on meta)")
    model.add_argument(
        "--unit-class",
        metavar="CLASS",
        action="append",
        default=[],
        help="with --factory: class whose modules are units (repeatable); default: repeated blocks",
    )
    model.add_argument(
        "--activation-bytes",
        type=byte_count,
        metavar="SIZE",
        help="activations of one sequence, where you measured them",
    )
    sharding = parser.add_argument_group("sharding")
    sharding.add_argument("--mesh", type=mesh_sizes, metavar="AxB", help="data-parallel ranks: 64, or outer x inner")
    sharding.add_argument("--strategy", choices=STRATEGIES, help="default: optim_grads_params on one axis, hsdp on two")
    sharding.add_argument("--rank", type=int, help="the rank reported on, which decides whose padding (default 0)")
    for name, meaning in (
        ("--dtype", "weights in compute and all-gather"),
        ("--main-dtype", "weights that the optimizer steps"),
        ("--reduce-dtype", "gradients on the wire"),
        ("--main-grads-dtype", "gradients at rest"),
        ("--moments-dtype", "AdamW's moments (default: that of the main weights); int8: 8-bit codes"),
    ):
        choices = (*DTYPES, "int8") if name == "--moments-dtype" else DTYPES
        sharding.add_argument(name, choices=choices, help=meaning)
    sharding.add_argument(
        "--split-main-params",
        action="store_true",
        default=None,
        help="keep fp32 main weights as the bf16 weights and their 16-bit remainders; gradients rest in bf16 then",
    )
    sharding.add_argument(
        "--gather-dtype",
        choices=GATHER_DTYPES,
        help="matrices travel in 8 bits, quantized from the main weights (with optim_grads_params or hsdp)",
    )
    sharding.add_argument("--reduction", choices=("invariant",), help="the same bits on any number of ranks")
    sharding.add_argument(
        "--optimizer", choices=("adamw", "muon"), help="muon: Muon for matrices, AdamW for the rest (default adamw)"
    )
    _add_parallelism_arguments(parser)
    work = parser.add_argument_group("work of one rank")
    work.add_argument("--micro-batch", type=positive_integer, metavar="N", help="sequences in a forward pass")
    work.add_argument("--seq-length", type=positive_integer, metavar="S", help="tokens in a sequence (default 4096)")
    work.add_argument("--num-microbatches", type=positive_integer, metavar="N", help="per optimizer step (default 1)")
    work.add_argument("--recompute", choices=[kind.value for kind in Recompute], help="activation recomputation")
    work.add_argument("--attention", choices=("fused", "unfused"), help="whether scores are stored (default fused)")
    work.add_argument("--dropout", action="store_true", default=None, help="store dropout masks")
    _add_machine_arguments(parser)
    for action in parser._actions:
        # None says that an option was not given, so argparse knows no default to print.
        if action.dest in DEFAULTS and action.nargs != 0 and "default" not in str(action.help):
            action.help = f"{action.help} (default {DEFAULTS[action.dest]})"


def _add_parallelism_arguments(parser: argparse.ArgumentParser) -> None:
    inside = parser.add_argument_group("parallelism inside the model (catalog models and --hf-config)")
    inside.add_argument(
        "--world", type=positive_integer, metavar="N", help="all ranks, in place of --mesh: dp x cp = N / (tp x pp)"
    )
    for name, meaning in (
        ("--tp", "tensor parallel: ranks that share each layer"),
        ("--ep", "expert parallel: ranks that share the routed experts of a layer"),
        ("--etp", "ranks that share each expert (default: as --tp)"),
        ("--pp", "pipeline stages"),
        ("--cp", "context parallel: ranks that share each sequence; they are data-parallel ranks for weights"),
    ):
        inside.add_argument(name, type=positive_integer, metavar="N", help=meaning)
    inside.add_argument(
        "--sequence-parallel", action="store_true", default=None, help="with --tp: divide the residual stream as well"
    )
    inside.add_argument(
        "--stage", type=int, metavar="N", help="the stage reported on (default: the one that needs most)"
    )


def _add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group("machine (defaults: line rates of 8 x H100 with 400 Gb/s each; measure yours)")
    machine.add_argument(
        "--flops",
        type=operations_per_second,
        metavar="RATE",
        help="operations per second that training achieves on one accelerator (default 400T)",
    )
    machine.add_argument(
        "--bandwidth",
        type=bytes_per_second,
        nargs="+",
        metavar="RATE",
        help="of each mesh axis, outermost first, per rank and direction; default: from the nodes",
    )
    machine.add_argument(
        "--memory-bandwidth",
        type=bytes_per_second,
        metavar="RATE",
        help="of an accelerator's memory (default 3350GB/s)",
    )
    machine.add_argument("--gpus-per-node", type=positive_integer, metavar="N", help="consecutive ranks (default 8)")
    machine.add_argument(
        "--node-bandwidth", type=bytes_per_second, metavar="RATE", help="inside a node, per rank (default 450GB/s)"
    )
    machine.add_argument(
        "--network-bandwidth", type=bytes_per_second, metavar="RATE", help="between nodes, per rank (default 50GB/s)"
    )
    machine.add_argument("--network-latency", type=seconds, metavar="TIME", help="per hop between nodes (default 5us)")
    machine.add_argument(
        "--reserve",
        type=byte_count,
        metavar="SIZE",
        help="memory for what no plan sees: context, communication buffers, fragments (default 0)",
    )
