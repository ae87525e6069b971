"""The ranks that make a checkpoint together: a gloo group of their own, and steps that fail on all when one fails."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.manifest import RANK_VALUES
from megatron_fsdp.errors import CheckpointError

__all__ = ["CheckpointRanks", "checkpoint_ranks", "find_rank_values", "part_rank_values"]

T = TypeVar("T")
R = TypeVar("R")

# Background saves communicate while training does; a communicator of their own keeps the two apart, and gloo moves
# plain objects whatever backend the training uses.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class _LocalFailure(CheckpointError):
    """What went wrong on one rank, in words: the exceptions themselves may not survive the way to the others."""


class CheckpointRanks:
    """All ranks of the job, or this process alone where there is no process group.

    Attributes:
        rank: this process among them. size: their number.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._steps = _DistWrapper(group, group is not None, 0)

    def agree(self, step: str, mine: Callable[[], T], together: Callable[[list[T]], R]) -> R:
        """Run ``mine`` on every rank and ``together`` on rank 0 with all results; every rank returns what that returns.

        Args:
            step: what is being done, for messages: "saving /runs/step_0000100".
        Raises:
            CheckpointError: it failed on some rank, or a rank was lost; raised on every rank that is left.
        """
        return self._run(step, lambda: self._steps.all_reduce(step, lambda: _said(mine), lambda a: _said(together, a)))

    def divide(self, step: str, mine: Callable[[], T], together: Callable[[list[T]], list[R]]) -> R:
        """Like ``agree``, but each rank returns its own entry of what ``together`` returns."""
        divide = self._steps.reduce_scatter
        return self._run(step, lambda: divide(step, lambda: _said(mine), lambda a: _said(together, a)))

    def check(self, step: str, mine: Callable[[], T]) -> T:
        """Run ``mine`` on every rank and return what it returns on this one; when it raises on one, all raise."""
        found: list[T] = []
        self.agree(step, lambda: found.append(mine()), lambda _: None)
        return found[0]

    def _run(self, step: str, work: Callable[[], R]) -> R:
        try:
            return work()
        except CheckpointException as failure:
            raise _common_error(step, failure, self.size) from None
        except (RuntimeError, ValueError) as error:
            # What fails in the step itself arrives as a CheckpointException; this is the communication around it.
            raise CheckpointError(f"{step}: lost contact with another rank: {error}") from error


def checkpoint_ranks() -> CheckpointRanks:
    """Return the ranks of the job; the first call makes their group, so all of them call it together."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return CheckpointRanks(None)
    if world not in _GROUPS:
        _GROUPS[world] = dist.new_group(backend="gloo", group_desc="checkpoint")
    return CheckpointRanks(_GROUPS[world])


def _said(work: Callable[..., T], *given: object) -> T:
    """Call ``work``; what it raises is put into words."""
    try:
        return work(*given)
    except CheckpointError:
        raise
    except Exception as error:
        raise _LocalFailure(f"{type(error).__name__}: {error}") from error


def _common_error(step: str, failure: CheckpointException, num_ranks: int) -> CheckpointError:
    """Return the one error that every rank raises: the first rank's own where it is meant for the caller."""
    by_rank = {rank: error for rank, (error, _) in sorted(failure.failures.items())}
    for error in by_rank.values():
        if isinstance(error, CheckpointError) and not isinstance(error, _LocalFailure):
            return error
    which = "" if num_ranks == 1 else " on rank {}"
    said = "; ".join(
        f"failed{which.format(rank)}: {str(error) or type(error).__name__}" for rank, error in by_rank.items()
    )
    return CheckpointError(f"{step} {said}")


# ---------------------------------------------------------------- values that ranks do not hold alike


def find_rank_values(tensors: Mapping[str, torch.Tensor], ranks: CheckpointRanks) -> dict[str, int]:
    """Return the names of tensors that ranks hold whole and not alike, each with the first rank that has it.

    Such are buffers of norms, and parameters that are not sharded. Every rank calls it. Sharded tensors are not looked
    at: their replicas are the engine's to keep alike. A checkpoint has the first rank's value under the name, which is
    the one that counts by FSDP2's convention, and each rank's beside it, for loading on as many ranks.
    """
    if ranks.size == 1:
        return {}
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    step = "comparing what ranks hold under one name"
    return ranks.agree(step, lambda: {name: _fingerprint(tensor) for name, tensor in plain.items()}, _differing)


def part_rank_values(entries: dict[str, Any], owners: Mapping[str, int], rank: int) -> None:
    """Keep under a name what its first rank has, and put this rank's own values of all such names beside it."""
    if not owners:
        return
    tensors, optimizer = entries["model"], entries.get("optimizer", {"state": {}})
    state = optimizer["state"]
    own: dict[str, Any] = {"model": {name: tensors[name] for name in owners if name in tensors}}
    if found := {name: state[name] for name in owners if name in state}:
        own["optimizer"] = {"state": found}
    not_mine = {name for name, owner in owners.items() if owner != rank}
    entries["model"] = {name: value for name, value in tensors.items() if name not in not_mine}
    if "optimizer" in entries:
        kept = {name: values for name, values in state.items() if name not in not_mine}
        entries["optimizer"] = {**optimizer, "state": kept}
    entries[RANK_VALUES] = {f"rank_{rank}": own}


def _differing(by_rank: Sequence[Mapping[str, str]]) -> dict[str, int]:
    first: dict[str, int] = {}
    found: set[str] = set()
    for rank, fingerprints in enumerate(by_rank):
        for name, value in fingerprints.items():
            owner = first.setdefault(name, rank)
            if by_rank[owner][name] != value:
                found.add(name)
    return {name: first[name] for name in sorted(found)}


def _fingerprint(tensor: torch.Tensor) -> str:
    digest = hashlib.blake2b(repr((tensor.dtype, tuple(tensor.shape))).encode(), digest_size=16)
    if not tensor.is_meta:
        values = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
