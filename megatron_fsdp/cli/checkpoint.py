"""The command ``megatron-fsdp checkpoint``: look into checkpoints, verify them, and convert them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp.checkpoint.convert import export_checkpoint, import_checkpoint
from megatron_fsdp.checkpoint.dcp_metadata import METADATA, tensors_of
from megatron_fsdp.checkpoint.manifest import MANIFEST
from megatron_fsdp.checkpoint.name_map import NameMap
from megatron_fsdp.checkpoint.ranks import CheckpointRanks
from megatron_fsdp.checkpoint.reader import OpenCheckpoint, open_checkpoint, verify_folder
from megatron_fsdp.errors import CheckpointError, FsdpError

__all__ = ["add_arguments", "run"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their options to the parser of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="inspect|verify|export|import")
    inspect = actions.add_parser(
        "inspect", help="print what a checkpoint holds: names, shapes, dtypes, hyperparameters"
    )
    verify = actions.add_parser("verify", help="check every byte of a checkpoint, or of all in a folder of them")
    export = actions.add_parser("export", help="write a checkpoint's weights as safetensors files")
    load = actions.add_parser("import", help="make a checkpoint of the weights in safetensors files")
    for action in (inspect, verify, export):
        action.add_argument("path", type=Path, help="the checkpoint")
    load.add_argument("path", type=Path, help="folder of safetensors files, or one file")
    export.add_argument("output", type=Path, help="folder for the files")
    load.add_argument("output", type=Path, help="the checkpoint to make")
    for action in (export, load):
        action.add_argument(
            "--name-map", type=Path, help='JSON file {"name here": "name there"}, * stands for a number'
        )
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the files, default as saved")
    export.add_argument("--max-file-size", type=_num_bytes, default="5GB", help="such as 500MB or 2GiB, default 5GB")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say, and return the exit status: 0, or 1 after an error, which is printed."""
    actions: Mapping[str, Callable[[argparse.Namespace], int]] = {
        "inspect": _inspect,
        "verify": _verify,
        "export": _export,
        "import": _import,
    }
    try:
        return actions[args.action](args)
    except (FsdpError, OSError) as error:
        print(f"error: {error}")
        return 1


def _inspect(args: argparse.Namespace) -> int:
    opened = open_checkpoint(args.path, CheckpointRanks(None), verify=False)
    for line in _description(opened):
        print(line)
    return 0


def _description(opened: OpenCheckpoint) -> Iterator[str]:
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
    text = f"tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _verify(args: argparse.Namespace) -> int:
    folders = [args.path] if _is_checkpoint(args.path) else sorted(filter(_is_checkpoint, _children(args.path)))
    if not folders:
        raise CheckpointError(f"{args.path} is no checkpoint and no folder of checkpoints")
    num_damaged = 0
    for folder in folders:
        try:
            print(f"{folder}: whole, {verify_folder(folder, CheckpointRanks(None)):,} bytes checked")
        except CheckpointError as error:
            num_damaged += 1
            print(f"error: {error}")
    return 1 if num_damaged else 0


def _is_checkpoint(folder: Path) -> bool:
    return (folder / METADATA).exists() or (folder / MANIFEST).exists()


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _export(args: argparse.Namespace) -> int:
    dtype = getattr(torch, args.dtype) if args.dtype else None
    num_tensors = export_checkpoint(
        args.path, args.output, name_map=_name_map(args), dtype=dtype, max_file_bytes=args.max_file_size
    )
    print(f"{args.output}: {num_tensors} tensors")
    return 0


def _import(args: argparse.Namespace) -> int:
    num_tensors = import_checkpoint(args.path, args.output, name_map=_name_map(args))
    print(f"{args.output}: {num_tensors} tensors; load it with load_checkpoint(model, None, path)")
    return 0


def _name_map(args: argparse.Namespace) -> NameMap | None:
    return None if args.name_map is None else NameMap.from_json(args.name_map)


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+) *([KMG]?I?B?)", text.strip().upper())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a size such as 500MB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]
