"""What a run says at its end: where its files are, and three commands to go on with."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpt.checkpoint import checkpoints_in
from gpt.job import DEFAULT_FOLDER


def next_steps(args: argparse.Namespace, arguments: Sequence[str], num_ranks: int) -> str:
    """Return where the log is and, where a checkpoint was saved, how to generate, resume and export.

    Args:
        arguments: the command line that ``args`` were parsed from.
    """
    folder: Path = args.save or DEFAULT_FOLDER
    files = f"loss curve  {folder / 'loss.png'}\nlog         {folder / 'log.jsonl'}"
    step = None if args.save is None else checkpoints_in(folder).latest()
    if step is None:
        return files
    checkpoint = checkpoints_in(folder).path(step)
    python = _short(Path(sys.executable))
    more = 2 * args.train_iters if step == args.train_iters else args.train_iters
    starter = f"{python} -m torch.distributed.run --standalone --nproc-per-node {num_ranks}"
    words = [*_without(arguments, ("--load", "--train-iters")), "--load", str(folder), "--train-iters", str(more)]
    loading = shlex.quote(str(folder))
    target = shlex.quote(str(folder / "safetensors"))
    return "\n".join(
        (
            files,
            f"checkpoint  {checkpoint}",
            "to go on:",
            f"  generate  {python} examples/generate_gpt.py --load {loading} --prompt 'def main('",
            f"  resume    {starter if num_ranks > 1 else python} {shlex.join([sys.argv[0], *words])}",
            f"  export    {python} -m megatron_fsdp checkpoint export {shlex.quote(str(checkpoint))} {target}",
        )
    )


def _short(path: Path) -> str:
    below = os.path.relpath(path)
    return shlex.quote(str(path) if below.startswith("..") else below)


def _without(arguments: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line but for some flags and the value of each."""
    words = iter(arguments)
    for word in words:
        if word in flags:
            next(words, None)
        elif word.partition("=")[0] not in flags:
            yield word
