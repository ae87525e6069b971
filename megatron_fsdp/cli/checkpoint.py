"""``megatron-fsdp checkpoint``: inspect and verify checkpoints, and export their weights."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fsdp.cli.progress import show_progress
from megatron_fsdp.command_parser import CommandParser
from megatron_fsdp.errors import CheckpointError, FsdpError
from megatron_fsdp.planning.plan_arguments import byte_count

# Functions import what they use, because torch takes seconds to import and --help does not need it.
if TYPE_CHECKING:
    from megatron_fsdp.checkpoint.reader import OpenCheckpoint
    from megatron_fsdp.checkpoint.safetensors_model import NameMap

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  megatron-fsdp checkpoint inspect runs/gpt                   content of each checkpoint of a run
  megatron-fsdp checkpoint verify runs/gpt/step_0000600       check every byte of one checkpoint
  megatron-fsdp checkpoint export runs/gpt/step_0000600 out --dtype bfloat16"""


def add_arguments(parser: CommandParser) -> None:
    """Add the subcommands and their options to the command's parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="inspect|verify|export")

    def add(name: str, purpose: str, do: Callable[[argparse.Namespace], int]) -> CommandParser:
        examples = "\n".join(line for line in EXAMPLES.splitlines() if f"checkpoint {name} " in line)
        prog = f"{parser.prog} {name}"
        made = actions.add_parser(name, help=purpose, description=purpose, prog=prog, examples=examples)
        made.set_defaults(do=do)
        return made

    inspect = add("inspect", "print what a checkpoint holds: names, shapes, dtypes, hyperparameters", _inspect)
    verify = add("verify", "check every byte of a checkpoint", _verify)
    export = add("export", "write a checkpoint's weights as safetensors files", _export)
    for action in (inspect, verify):
        action.add_argument("path", type=Path, help="the checkpoint, or a folder of several")
    export.add_argument("path", type=Path, help="the checkpoint")
    export.add_argument("output", type=Path, help="folder for the files")
    export.add_argument(
        "--name-map",
        type=Path,
        metavar="FILE",
        help='JSON file {"model name": "file name"}; * matches any characters but dots (default: same names)',
    )
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="dtype in files (default: as saved)"
    )
    export.add_argument(
        "--max-file-size", type=byte_count, default="5GB", metavar="SIZE", help="such as 500MB or 2GiB (default 5GB)"
    )
    export.add_argument("--force", action="store_true", help="replace model*.safetensors that OUTPUT holds already")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand and return the exit status: 0, or 1 after an error, which is printed to stderr."""
    try:
        done: int = args.do(args)
        return done
    except (FsdpError, OSError) as error:
        print(f"megatron-fsdp checkpoint {args.action}: {error}", file=sys.stderr)
        return 1


def _inspect(args: argparse.Namespace) -> int:
    from megatron_fsdp.checkpoint.ranks import CheckpointRanks
    from megatron_fsdp.checkpoint.reader import open_checkpoint

    def inspect(folder: Path) -> None:
        for line in _description(open_checkpoint(folder, CheckpointRanks(None), verify=False)):
            print(line)

    return _for_each(args.path, inspect)


def _description(opened: OpenCheckpoint) -> Iterator[str]:
    from megatron_fsdp.checkpoint.manifest import tensors_of

    state = opened.state
    made_by = (
        f"{state.get('num_ranks', '?')} rank(s), torch {state.get('torch', '?')}" if state else "PyTorch's own tools"
    )
    yield f"{opened.folder}: saved by {made_by}"
    saved = tensors_of(opened.metadata)
    model = {str(path[0]): saved[name] for path, name in opened.names_below("model").items() if name in saved}
    width = max([len(name) for name in model], default=0)
    total = 0
    for name, entry in model.items():
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        total += math.prod(entry.size) * entry.properties.dtype.itemsize
        yield f"  {name:<{width}}  {dtype:<8}  {tuple(entry.size)}"
    yield f"{len(model)} tensors of the model, {total:,} bytes"
    for names in state.get("ties", ()):
        yield f"tied: {' = '.join(names)}"
    moments = sorted({str(path[1]) for path in opened.names_below("optimizer", "state")})
    if opened.names_below("optimizer"):
        yield f"optimizer {state.get('optimizer', '?')}, state per parameter: {', '.join(moments) or 'none yet'}"
    else:
        yield "no optimizer"
    for key, value in state.get("extra", {}).items():
        yield f"extra {key}: {_short(value)}"


def _short(value: Any) -> str:
    shape = getattr(value, "shape", None)
    text = repr(value) if shape is None else f"tensor {tuple(shape)}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _verify(args: argparse.Namespace) -> int:
    from megatron_fsdp.checkpoint.ranks import CheckpointRanks
    from megatron_fsdp.checkpoint.reader import verify_folder

    def verify(folder: Path) -> None:
        print(f"{folder}: whole, {verify_folder(folder, CheckpointRanks(None)):,} bytes checked")

    return _for_each(args.path, verify)


def _for_each(path: Path, action: Callable[[Path], None]) -> int:
    """Run ``action`` on a checkpoint, or on each checkpoint in a folder; return 1 if one was damaged."""
    inside = path.iterdir() if path.is_dir() else ()
    folders = [path] if _is_checkpoint(path) else sorted(filter(_is_checkpoint, inside))
    if not folders:
        raise CheckpointError(
            f"{path} is no checkpoint and no folder of checkpoints. fix: give the folder that save_checkpoint wrote"
        )
    num_damaged = 0
    for folder in folders:
        try:
            action(folder)
        except CheckpointError as error:
            num_damaged += 1
            print(f"error: {error}", file=sys.stderr)
    return 1 if num_damaged else 0


def _is_checkpoint(folder: Path) -> bool:
    from megatron_fsdp.checkpoint.manifest import MANIFEST, METADATA

    return (folder / METADATA).exists() or (folder / MANIFEST).exists()


def _export(args: argparse.Namespace) -> int:
    import torch

    from megatron_fsdp.checkpoint.safetensors_model import export_checkpoint

    found = sorted(path.name for path in args.output.glob("model*.safetensors*"))
    if found and not args.force:
        raise CheckpointError(f"{args.output} holds {found[0]} already. fix: add --force, or name another folder")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    num_tensors = export_checkpoint(
        args.path,
        args.output,
        name_map=_name_map(args),
        dtype=dtype,
        max_file_bytes=args.max_file_size,
        progress=show_progress,
    )
    show_progress("")
    print(f"{args.output}: {num_tensors} tensors")
    return 0


def _name_map(args: argparse.Namespace) -> NameMap | None:
    from megatron_fsdp.checkpoint.safetensors_model import NameMap

    return None if args.name_map is None else NameMap.from_json(args.name_map)
