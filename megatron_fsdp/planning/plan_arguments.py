"""The options of ``megatron-fsdp plan``, their defaults and help, without torch: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = [
    "DEFAULTS",
    "GATHER_DTYPES",
    "HYBRID",
    "OF_SEARCH",
    "STRATEGIES",
    "add_plan_arguments",
    "byte_count",
    "bytes_per_second",
    "mesh_sizes",
    "operations_per_second",
    "seconds",
]

# ---------------------------------------------------------------------- quantities as people write them

_SCALES: dict[str, int] = {"": 1, **{prefix: 1000**power for power, prefix in enumerate("KMGTP", start=1)}}
_SCALES |= {f"{prefix}I": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z/]*)\s*")


def positive_integer(text: str) -> int:
    """Return an integer of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def byte_count(text: str) -> int:
    """Return bytes: ``80GiB`` is 80 * 2**30, ``80GB`` 80 * 10**9; a number without a unit is refused."""
    if not _parts(text, "80GiB or 80GB")[1]:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; write it as 80GiB or 80GB")
    return round(_amount(text, "B", "80GiB or 80GB"))


def bytes_per_second(text: str) -> float:
    """Return bytes per second: ``50GB/s`` or, without the unit, ``50G``; bits are refused."""
    return _amount(text, "B/S", "50GB/s")


def operations_per_second(text: str) -> float:
    """Return operations per second: ``400T``, ``400TFLOPS`` or ``4e14``."""
    return _amount(text, "FLOPS", "400T")


def seconds(text: str) -> float:
    """Return seconds from ``5us``, ``0.1ms`` or ``0``."""
    number, unit = _parts(text, "5us")
    scale = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}.get(unit)
    if scale is None:
        raise argparse.ArgumentTypeError(f"{text!r}: {unit!r} is no unit of time; write it as 5us")
    return number * scale


def mesh_sizes(text: str) -> tuple[int, ...]:
    """Return the axes of a mesh: ``64`` is one axis, ``8x128`` two (outer, inner)."""
    parts = re.split(r"[x,*]", text.strip().lower())
    if not all(part.isdecimal() and int(part) for part in parts) or len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh: write 64 for one axis, 8x128 for outer x inner")
    return tuple(int(part) for part in parts)


def _amount(text: str, unit: str, example: str) -> float:
    number, found = _parts(text, example)
    # The unit may be left out, the prefix stands before it.
    prefix = found.upper().removesuffix(unit)
    if prefix not in _SCALES or re.search(r"b(/|$)", found):
        raise argparse.ArgumentTypeError(f"{text!r}: {found!r} is no unit that fits here; write it as {example}")
    value = number * _SCALES[prefix]
    if value <= 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0; write it as {example}")
    return value


def _parts(text: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount; write it as {example}")
    return float(found[1]), found[2]


# ---------------------------------------------------------------------- the options

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp")
HYBRID = ("hsdp", "hfsdp")
_DTYPES = ("fp32", "bf16", "fp16")
# Those of policy/precision.py, which imports torch.
GATHER_DTYPES = ("fp8", "mxfp8", "int8_block")


class _Option(NamedTuple):
    """An option: what it takes (a function that reads it, its choices, or None for a switch), and its default.

    What has no default is None where it was not given.
    """

    flag: str
    takes: Callable[[str], Any] | Sequence[str] | None
    help: str
    default: Any = None
    metavar: str = "N"


_OPTIONS = {
    "model (one of the first three)": (
        _Option("--model", str, "a published model, such as llama3-8b; --list-models lists them", metavar="NAME"),
        _Option("--hf-config", str, "config.json of a Hugging Face model", metavar="FILE"),
        _Option(
            "--factory", str, "function that builds the model (on meta)", metavar="PACKAGE.MODULE:FUNCTION"
        ),
        _Option(
            "--unit-class", str, "with --factory: class whose modules are units (repeatable); default: repeated blocks",
            metavar="CLASS",
        ),
        _Option("--activation-bytes", byte_count, "activations of one sequence, where you measured them", None, "SIZE"),
    ),
    "sharding": (
        _Option("--mesh", mesh_sizes, "data-parallel ranks: 64, or outer x inner", None, "AxB"),
        _Option("--strategy", STRATEGIES, "default: optim_grads_params on one axis, hsdp on two"),
        _Option("--rank", int, "the rank reported on, which decides whose padding", 0),
        _Option("--dtype", _DTYPES, "weights in compute and all-gather", "bf16"),
        _Option("--main-dtype", _DTYPES, "weights that the optimizer steps", "fp32"),
        _Option("--reduce-dtype", _DTYPES, "gradients on the wire", "fp32"),
        _Option("--main-grads-dtype", _DTYPES, "gradients at rest", "fp32"),
        _Option(
            "--moments-dtype", (*_DTYPES, "int8"),
            "AdamW's moments (default: that of the main weights); int8: 8-bit codes",
        ),
        _Option(
            "--split-main-params", None,
            "keep fp32 main weights as the bf16 weights and their 16-bit remainders; gradients rest in bf16 then",
        ),
        _Option(
            "--gather-dtype", GATHER_DTYPES,
            "matrices travel in 8 bits, quantized from the main weights (with optim_grads_params or hsdp)",
        ),
        _Option("--reduction", ("invariant",), "the same bits on any number of ranks"),
        _Option("--optimizer", ("adamw", "muon"), "muon: Muon for matrices, AdamW for the rest", "adamw"),
    ),
    "parallelism inside the model (catalog models and --hf-config)": (
        _Option("--world", positive_integer, "all ranks, in place of --mesh: dp x cp = N / (tp x pp)"),
        _Option("--tp", positive_integer, "tensor parallel: ranks that share each layer"),
        _Option("--ep", positive_integer, "expert parallel: ranks that share the routed experts of a layer"),
        _Option("--etp", positive_integer, "ranks that share each expert (default: as --tp)"),
        _Option("--pp", positive_integer, "pipeline stages"),
        _Option(
            "--cp", positive_integer,
            "context parallel: ranks that share each sequence; they are data-parallel ranks for weights",
        ),
        _Option("--sequence-parallel", None, "with --tp: divide the residual stream as well"),
        _Option("--stage", int, "the stage reported on (default: the one that needs most)"),
    ),
    "work of one rank": (
        _Option("--micro-batch", positive_integer, "sequences in a forward pass", 1),
        _Option("--seq-length", positive_integer, "tokens in a sequence", 4096, "S"),
        _Option("--num-microbatches", positive_integer, "per optimizer step", 1),
        _Option("--recompute", ("none", "full", "selective"), "activation recomputation", "none"),
        _Option("--attention", ("fused", "unfused"), "whether scores are stored", "fused"),
        _Option("--dropout", None, "store dropout masks"),
    ),
    "machine (defaults: line rates of 8 x H100 with 400 Gb/s each; measure yours)": (
        _Option(
            "--flops", operations_per_second,
            "operations per second that training achieves on one accelerator (default 400T)", None, "RATE",
        ),
        _Option(
            "--bandwidth", bytes_per_second,
            "of each mesh axis, outermost first, per rank and direction; default: from the nodes", None, "RATE",
        ),
        _Option(
            "--memory-bandwidth", bytes_per_second, "of an accelerator's memory (default 3350GB/s)", None, "RATE"
        ),
        _Option("--gpus-per-node", positive_integer, "consecutive ranks (default 8)"),
        _Option("--node-bandwidth", bytes_per_second, "inside a node, per rank (default 450GB/s)", None, "RATE"),
        _Option("--network-bandwidth", bytes_per_second, "between nodes, per rank (default 50GB/s)", None, "RATE"),
        _Option("--network-latency", seconds, "per hop between nodes (default 5us)", None, "TIME"),
        _Option(
            "--reserve", byte_count,
            "memory for what no plan sees: context, communication buffers, fragments", 0, "SIZE",
        ),
    ),
    "search": (
        _Option(
            "--fit", byte_count,
            "memory of one accelerator: search what fits; options that are given stay as they are", None, "SIZE",
        ),
        _Option("--gpus", positive_integer, "with --fit: ranks to split into a mesh"),
        _Option(
            "--global-batch", positive_integer,
            "with --fit: sequences per optimizer step, over all ranks (default: 8 per rank)",
        ),
    ),
    "output (default: a page of text)": (
        _Option("--json", None, "print the plan as JSON (keys: docs/planning.md)"),
        _Option("--html", str, "write a page for a browser, without links to anywhere", metavar="FILE"),
        _Option("--png", str, "draw the memory chart (needs matplotlib)", metavar="FILE"),
        _Option("--list-models", None, "list the models of the catalog"),
    ),
}  # fmt: skip
_EVERY = [option for options in _OPTIONS.values() for option in options]
DEFAULTS = {option.flag[2:].replace("-", "_"): option.default for option in _EVERY if option.default is not None}
OF_SEARCH = ("gpus", "global_batch")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. One that was not given is None, so that who chose what can be told."""
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for option in options:
            words = option.help if option.default is None else f"{option.help} (default {option.default})"
            if option.takes is None:
                group.add_argument(option.flag, action="store_true", default=None, help=words)
            elif not callable(option.takes):
                group.add_argument(option.flag, choices=option.takes, help=words)
            else:
                several: dict[str, Any] = {
                    "--unit-class": {"action": "append"}, "--bandwidth": {"nargs": "+"},
                }.get(option.flag, {})  # fmt: skip
                group.add_argument(option.flag, type=option.takes, metavar=option.metavar, help=words, **several)
