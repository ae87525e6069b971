"""Whether a checkpoint of Megatron's has this job's random states: its strict load asks for no others."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

__all__ = ["without_states_of_other_ranks"]

# As Megatron's get_rng_state names them, and torch.distributed.checkpoint joins the names of what lies in each other.
_PLACE = re.compile(r"rng_state\.\((\d+), (\d+)\)\.(\d+)\.")


@contextmanager
def without_states_of_other_ranks(args: Any, path_of: Callable[[Any], str]) -> Iterator[None]:
    """Let Megatron load inside the block, without random states where the checkpoint's are those of another mesh.

    A ``fsdp_dtensor`` checkpoint has one for each pipeline stage and tensor-parallel rank (and for each data-parallel
    rank under ``--data-parallel-random-init``). Megatron's other formats leave them out on other sizes; of this one it
    asks for states that are not there. ``args.no_load_rng`` is set for the length of the block.
    """
    if args.no_load_rng or args.finetune or args.load is None or _has_the_jobs(args, path_of(args)):
        yield
        return
    args.no_load_rng = True
    try:
        yield
    finally:
        args.no_load_rng = False


def _has_the_jobs(args: Any, path: str) -> bool:
    try:
        keys = FileSystemReader(path).read_metadata().state_dict_metadata
    except FileNotFoundError:
        # Megatron says so itself, or starts without a checkpoint.
        return True
    matches = (_PLACE.match(key) for key in keys)
    found = {tuple(map(int, match.groups())) for match in matches if match}
    replicas = args.data_parallel_size if args.data_parallel_random_init else 1
    sizes = (args.pipeline_model_parallel_size, args.tensor_model_parallel_size, replicas)
    wanted = set(product(*map(range, sizes)))
    if found != wanted and dist.get_rank() == 0:
        logging.getLogger(__name__).warning(
            "%s has random states of %s, and this job has %s: generators start from --seed, as with --no-load-rng, so "
            "what is dropped out from here on is not what it would have been without the break",
            path,
            _spell(found),
            _spell(wanted),
        )
    return found == wanted


def _spell(places: set[tuple[int, ...]]) -> str:
    if not places:
        return "no ranks"
    stages, tensor, replicas = (len({place[axis] for place in places}) for axis in range(3))
    return f"{stages} pipeline stage(s) x {tensor} tensor-parallel rank(s)" + (
        f" x {replicas} data-parallel ranks" if replicas > 1 else ""
    )
