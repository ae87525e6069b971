"""Ranks of a checkpoint: their own gloo group, and steps that fail on all ranks if they fail on one."""

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

from dbuffer import MeshError
from dbuffer.mesh import new_group
from megatron_fsdp.checkpoint.async_save import finish_pending_save
from megatron_fsdp.checkpoint.manifest import RANK_VALUES
from megatron_fsdp.checks.rendezvous import job_store, meet
from megatron_fsdp.errors import AgreementError, CheckpointError, ConfigError
from megatron_fsdp.formatting import rank_list

__all__ = ["CheckpointRanks", "checkpoint_ranks", "find_rank_values", "part_rank_values"]

T = TypeVar("T")
R = TypeVar("R")

# Background saves communicate during training, so they need a communicator of their own. gloo sends Python objects
# whatever backend training uses. The text is a key prefix in the job's store that no other group has.
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, str]] = weakref.WeakKeyDictionary()


class _LocalFailure(CheckpointError):
    """A failure on one rank, as text, because the exception itself may not be picklable for the other ranks."""


class CheckpointRanks:
    """The ranks that save or load together, or only this process if there is no process group.

    Args:
        group: None if this process is alone.
        calls: counts the calls of each rank; None if no other process could call.

    Attributes:
        rank: this process's rank in the group. size: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, calls: _Calls | None = None) -> None:
        self._calls = calls
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._members = [0] if group is None else dist.get_process_group_ranks(group)
        self._steps = _DistWrapper(group, group is not None, 0)

    def agree(self, step: str, mine: Callable[[], T], together: Callable[[list[T]], R]) -> R:
        """Run ``mine`` on every rank, then ``together`` on rank 0 with all results; return its result on every rank.

        Args:
            step: a description of the step for messages: "saving /runs/step_0000100".
        Raises:
            CheckpointError: the step failed on some rank, or a rank was lost; raised on every remaining rank.
        """
        return self._run(step, lambda: self._steps.all_reduce(step, lambda: _said(mine), lambda a: _said(together, a)))

    def divide(self, step: str, mine: Callable[[], T], together: Callable[[list[T]], list[R]]) -> R:
        """Like ``agree``, but ``together`` returns a list, and each rank gets its own entry."""
        divide = self._steps.reduce_scatter
        return self._run(step, lambda: divide(step, lambda: _said(mine), lambda a: _said(together, a)))

    def check(self, step: str, mine: Callable[[], T]) -> T:
        """Run ``mine`` on every rank, and return this rank's result. If it raises on one rank, all ranks raise."""
        found: list[T] = []
        self.agree(step, lambda: found.append(mine()), lambda _: None)
        return found[0]

    def _run(self, step: str, work: Callable[[], R]) -> R:
        try:
            return work()
        except CheckpointException as failure:
            raise _common_error(step, failure, self._members) from None
        except (RuntimeError, ValueError) as error:
            # Errors of the step itself arrive as CheckpointException; this one is a communication error.
            absent = "" if self._calls is None else self._calls.absent(self._members)
            lost = (
                f"lost contact with another rank: {error}. fix: read the log of the rank that ended first; if all of "
                "them still ran, such as at a slow disk, init_process_group(timeout=...) with a longer one"
            )
            raise CheckpointError(f"{step}: {absent or lost}") from error


class _Calls:
    """Counts, in the job's store, how often each rank has called a function that all ranks must call together.

    Args:
        action: what this rank does, a verb phrase that follows "rank 3": "calls save_checkpoint".
        prefix: prefix of the keys, the same on all ranks; empty if there is no store.
    """

    def __init__(self, action: str, prefix: str, rank: int) -> None:
        self._action, self._prefix, self._rank = action, prefix, rank
        self._count = self._add(rank, 1)

    def absent(self, ranks: Sequence[int]) -> str:
        """Return which ranks have not made this rank's call, in words; empty if all have or it is unknown."""
        try:
            missing = [rank for rank in ranks if self._add(rank, 0) < self._count]
        except RuntimeError:
            return ""
        if not missing:
            return ""
        return f"rank {self._rank} {self._action}, {rank_list(missing)} did not call it. {_advice(self._action)}"

    def _add(self, rank: int, count: int) -> int:
        store = job_store() if self._prefix else None
        return 0 if store is None else int(store.add(f"{self._prefix} calls of {rank}", count))


def _advice(action: str) -> str:
    name = action.removeprefix("calls ")
    return f"fix: call {name}(...) on every rank; a line such as 'if rank == 0:' must not be around it"


def checkpoint_ranks(action: str, process_group: dist.ProcessGroup | None = None) -> CheckpointRanks:
    """Return the ranks of a group. All of them must call this for the same ``action``, e.g. "calls save_checkpoint".

    The first call makes a process group of their own, with the job's timeout. A save in the background is waited for,
    because it communicates over the same group.

    Args:
        process_group: whose ranks call; None: all ranks of the job.
    Raises:
        CheckpointError: some ranks did not call within the job's timeout, or called something else; they are named. Or
            the save in the background failed.
        ConfigError: this rank is not in the group.
    """
    finish_pending_save()
    world = process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if world is None:
        return CheckpointRanks(None)
    rank = dist.get_rank()
    if dist.get_rank(world) < 0:
        raise ConfigError(
            f"rank {rank} {action} with a process_group that it is not in. fix: call it on the ranks of the group alone"
        )
    if world not in _GROUPS:
        everyone = dist.get_process_group_ranks(world)
        try:
            token = meet(everyone, action)
        except (AgreementError, MeshError) as error:
            raise CheckpointError(f"{error}. {_advice(action)}") from None
        _GROUPS[world] = new_group(everyone, "checkpoint", backend="gloo"), token
    group, token = _GROUPS[world]
    return CheckpointRanks(group, _Calls(action, token, rank))


def _said(work: Callable[..., T], *given: object) -> T:
    """Call ``work``, and convert an exception to text."""
    try:
        return work(*given)
    except CheckpointError:
        raise
    except Exception as error:
        raise _LocalFailure(f"{type(error).__name__}: {error}") from error


def _common_error(step: str, failure: CheckpointException, ranks: Sequence[int]) -> CheckpointError:
    """Return the error that every rank raises: the first rank's own CheckpointError, or all failures as text."""
    by_rank = {rank: error for rank, (error, _) in sorted(failure.failures.items())}
    for error in by_rank.values():
        if isinstance(error, CheckpointError) and not isinstance(error, _LocalFailure):
            return error
    which = "" if len(ranks) == 1 else " on rank {}"
    said = "; ".join(
        f"failed{which.format(ranks[rank])}: {str(error) or type(error).__name__}" for rank, error in by_rank.items()
    )
    return CheckpointError(f"{step} {said}")


# ---------------------------------------------------------------- values that differ between ranks


def find_rank_values(tensors: Mapping[str, torch.Tensor], ranks: CheckpointRanks) -> dict[str, int]:
    """Return the names of unsharded tensors that differ between ranks, each with the first rank that has it.

    Such tensors are buffers of norms, and parameters that are not sharded. Every rank must call this. Sharded tensors
    are not compared, because the engine keeps their replicas equal. A checkpoint stores the first rank's value under
    the name, as in FSDP2, and every rank's value separately, for loading on the same number of ranks.
    """
    if ranks.size == 1:
        return {}
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    step = "comparing what ranks hold under one name"
    return ranks.agree(step, lambda: {name: _fingerprint(tensor) for name, tensor in plain.items()}, _differing)


def part_rank_values(entries: dict[str, Any], owners: Mapping[str, int], rank: int) -> None:
    """Keep a differing value under its name only on its first rank; also store this rank's own values separately."""
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
