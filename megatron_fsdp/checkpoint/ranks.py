"""The ranks that make a checkpoint together: a gloo group of their own, and steps that fail on all when one fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_fsdp.errors import CheckpointError

__all__ = ["CheckpointRanks", "checkpoint_ranks"]

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
