"""Options of ``megatron-fsdp plan``, with defaults and help. Does not import torch, so ``--help`` answers at once."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "DEFAULTS",
    "HYBRID",
    "OPTIONS",
    "STRATEGIES",
    "add_plan_arguments",
    "byte_count",
    "bytes_per_second",
    "mesh_sizes",
    "operations_per_second",
    "seconds",
]

# ---------------------------------------------------------------------- quantities as users write them

_SCALES: dict[str, float] = {"": 1, **{prefix: 1000**power for power, prefix in enumerate("KMGTP", start=1)}}
_SCALES |= {f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def positive_integer(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1. fix: give one, such as 8")
    return int(text)


def byte_count(text: str) -> int:
    """Parse bytes: ``80GiB`` is 80 * 2**30, ``80GB`` is 80 * 10**9. The unit is required."""
    return round(_amount(text, {unit: scale for unit, scale in _units("B").items() if unit}, "80GiB or 80GB"))


def bytes_per_second(text: str) -> float:
    """Parse bytes per second: ``50GB/s``, or ``50G`` without the unit. Bits are refused."""
    return _amount(text, _units("B/s"), "50GB/s")


def operations_per_second(text: str) -> float:
    """Parse operations per second: ``400T``, ``400TFLOPS`` or ``4e14``."""
    return _amount(text, _units("FLOPS"), "400T")


def seconds(text: str) -> float:
    """Parse seconds from ``5us``, ``0.1ms`` or ``0``."""
    return _amount(text, _TIMES, "5us")


def mesh_sizes(text: str) -> tuple[int, ...]:
    """Parse a mesh: ``64`` is one axis, ``8x128`` is two (outer, inner)."""
    parts = re.split(r"[x,*]", text.strip().lower())
    if not all(part.isdecimal() and int(part) for part in parts) or len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh. fix: write 64 for one axis, 8x128 for outer x inner")
    return tuple(int(part) for part in parts)


def _units(unit: str) -> dict[str, float]:
    return {prefix + end: scale for prefix, scale in _SCALES.items() for end in ("", unit)}


def _amount(text: str, units: Mapping[str, float], example: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z/]*)\s*", text)
    value = float(found[1]) * units.get(found[2], math.nan) if found else math.nan
    if not (math.isfinite(value) and (value or units is _TIMES)):
        raise argparse.ArgumentTypeError(f"{text!r} is no amount that fits here. fix: write it as {example}")
    return value


# ---------------------------------------------------------------------- the options

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp")
HYBRID = ("hsdp", "hfsdp")
_DTYPES = ("fp32", "bf16", "fp16")


class _Option(NamedTuple):
    """A command-line option. ``takes`` is a parser function, a list of choices, or None for a switch."""

    flag: str
    takes: Callable[[str], Any] | Sequence[str] | None
    help: str
    default: Any = None
    metavar: str = "N"

    @property
    def name(self) -> str:
        return self.flag[2:].replace("-", "_")


OPTIONS = {
    "model (one of the first three)": (
        _Option("--model", str, "a published model; such as llama3-8b, --list-models lists them", metavar="NAME"),
        _Option("--hf-config", str, "config.json of a Hugging Face model", metavar="FILE"),
        _Option("--factory", str, "function that builds the model (on meta)", metavar="PACKAGE.MODULE:FUNCTION"),
        _Option("--unit-class", str, "classes of units; with --factory, default: repeated blocks", None, "CLASS"),
        _Option("--activation-bytes", byte_count, "activations of one sequence; where you measured them", None, "SIZE"),
    ),
    "sharding": (
        _Option("--mesh", mesh_sizes, "data-parallel ranks; 64, or outer x inner", None, "AxB"),
        _Option("--strategy", STRATEGIES, "what is sharded; default: optim_grads_params on one axis, hsdp on two"),
        _Option("--dtype", _DTYPES, "weights in compute and all-gather", "bf16"),
        _Option("--main-dtype", _DTYPES, "weights that the optimizer steps", "fp32"),
        _Option("--reduce-dtype", _DTYPES, "gradients on the wire", "fp32"),
        _Option("--main-grads-dtype", _DTYPES, "gradients at rest", "fp32"),
        _Option("--moments-dtype", (*_DTYPES, "int8"), "AdamW's moments; default: as main weights"),
        _Option("--split-main-params", None, "main weights are bf16 and 16-bit remainders; gradients bf16"),
        _Option("--gather-dtype", ("int8_block",), "how matrices travel, in 8 bits; with optim_grads_params or hsdp"),
        _Option("--reduction", ("invariant",), "the same bits on any number of ranks"),
    ),
    "parallelism inside the model (catalog models and --hf-config)": (
        _Option("--world", positive_integer, "all ranks; in place of --mesh: dp x cp = N / (tp x pp)"),
        _Option("--tp", positive_integer, "tensor parallel: ranks that share each layer"),
        _Option("--ep", positive_integer, "expert parallel: ranks that share the routed experts of a layer"),
        _Option("--etp", positive_integer, "ranks that share each expert; default: as --tp"),
        _Option("--pp", positive_integer, "pipeline stages"),
        _Option("--cp", positive_integer, "context parallel: ranks that share each sequence"),
        _Option("--sequence-parallel", None, "divide the residual stream as well; with --tp"),
        _Option("--stage", int, "the stage reported on; default: the one that needs most"),
    ),
    "work of one rank": (
        _Option("--micro-batch", positive_integer, "sequences in a forward pass", 1),
        _Option("--seq-length", positive_integer, "tokens in a sequence", 4096, "S"),
        _Option("--num-microbatches", positive_integer, "per optimizer step", 1),
        _Option("--recompute", ("none", "full"), "of layers in backward", "none"),
    ),
    "machine (defaults: line rates of 8 x H100 with 400 Gb/s each; measure yours)": (
        _Option("--flops", operations_per_second, "operations per second as achieved (default 400T)", None, "RATE"),
        _Option("--bandwidth", bytes_per_second, "of each mesh axis, per rank; default: from the nodes", None, "RATE"),
        _Option("--memory-bandwidth", bytes_per_second, "of an accelerator's memory (default 3350GB/s)", None, "RATE"),
        _Option("--gpus-per-node", positive_integer, "consecutive ranks (default 8)"),
        _Option("--node-bandwidth", bytes_per_second, "inside a node, per rank (default 450GB/s)", None, "RATE"),
        _Option("--network-bandwidth", bytes_per_second, "between nodes, per rank (default 50GB/s)", None, "RATE"),
        _Option("--network-latency", seconds, "per hop between nodes (default 5us)", None, "TIME"),
        _Option("--reserve", byte_count, "memory that no plan sees; context, NCCL, fragments", 0, "SIZE"),
    ),
    "search": (
        _Option("--fit", byte_count, "memory of an accelerator; options that are given stay", None, "SIZE"),
        _Option("--gpus", positive_integer, "ranks to split into a mesh; with --fit"),
        _Option("--global-batch", positive_integer, "sequences per step of all ranks; default: 8 per rank"),
    ),
    "output (default: a page of text)": (
        _Option("--json", None, "print the plan as JSON (keys: docs/planning.md)"),
        _Option("--png", str, "draw memory by category and the time line of a step; needs matplotlib", None, "FILE"),
        _Option("--list-models", None, "list the models of the catalog"),
    ),
}  # fmt: skip
DEFAULTS = {each.name: each.default for options in OPTIONS.values() for each in options if each.default is not None}
_SEVERAL: dict[str, dict[str, Any]] = {"--unit-class": {"action": "append"}, "--bandwidth": {"nargs": "+"}}


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser. An option that the user does not give is None, not its default."""
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for flag, takes, words, default, metavar in options:
            words += "" if default is None else f" (default {default})"
            if takes is None:
                group.add_argument(flag, action="store_true", default=None, help=words)
            elif not callable(takes):
                group.add_argument(flag, choices=takes, help=words)
            else:
                group.add_argument(flag, type=takes, metavar=metavar, help=words, **_SEVERAL.get(flag, {}))
