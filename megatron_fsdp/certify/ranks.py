"""Ranks: processes of this machine that run a function together in a gloo process group."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_fsdp.errors import FsdpError

__all__ = ["on_ranks"]

Result = TypeVar("Result")


def on_ranks(num_ranks: int, function: Callable[..., Result], *args: Any, timeout_s: float = 3600.0) -> list[Result]:
    """Run a module-level function in new processes, one a rank, and return what it returns there, rank by rank.

    Raises:
        FsdpError: a rank raised or ended, with its traceback; or has not answered for that long.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(num_ranks):
            here, there = context.Pipe(duplex=False)
            where = (rank, num_ranks, str(Path(folder, "store")))
            process = context.Process(target=_run, args=(there, where, function, args), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            ends.append(here)
        try:
            return [_receive(rank, end, timeout_s) for rank, end in enumerate(ends)]
        finally:
            for process in processes:
                # One that has sent its result ends by itself, unless another one is missing.
                process.join(5)
                if process.is_alive():
                    process.kill()


def _receive(rank: int, end: Connection, timeout_s: float) -> Any:
    if not end.poll(timeout_s):
        raise FsdpError(f"rank {rank} of the check has not answered for {timeout_s:.0f} s")
    try:
        result, error = end.recv()
    except EOFError:
        result, error = None, "it ended without a word"
    if error:
        raise FsdpError(f"rank {rank} of the check failed:\n{error}")
    return result


def _run(end: Connection, where: tuple[int, int, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    rank, num_ranks, path = where
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=num_ranks)
        end.send((function(*args), ""))
        dist.destroy_process_group()
    except BaseException:
        end.send((None, traceback.format_exc()))
        raise
