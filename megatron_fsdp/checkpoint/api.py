"""Save and load model, optimizer and random state, under the model's own names and global shapes.

A checkpoint is a folder in the format of PyTorch's distributed checkpoint. In addition, ``state.pt`` holds values that
belong to no parameter, and ``manifest.json`` holds file sizes and checksums (docs/design/checkpoint.md). Loading
executes no code from a checkpoint: tensors and values are read with ``weights_only=True``, the index with an unpickler
that only accepts the index's own classes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from megatron_fsdp.checkpoint.async_save import SaveHandle, run_save
from megatron_fsdp.checkpoint.foreign import read_values
from megatron_fsdp.checkpoint.manifest import DamagedCheckpointError
from megatron_fsdp.checkpoint.model_state import (
    ModelMatch,
    ModelView,
    announce_change,
    check_ties,
    match_model,
    match_partly,
    restore_extra_state,
    view_model,
)
from megatron_fsdp.checkpoint.optimizer_state import OptimizerMatch, describe_optimizer, match_optimizer
from megatron_fsdp.checkpoint.random_state import random_state, restore_random_state
from megatron_fsdp.checkpoint.ranks import CheckpointRanks, checkpoint_ranks, find_rank_values, part_rank_values
from megatron_fsdp.checkpoint.reader import OpenCheckpoint, open_checkpoint, read_entries, refuse_replaced
from megatron_fsdp.checkpoint.writer import place_of, plan_save, write_draft
from megatron_fsdp.errors import CheckpointError

__all__ = ["PartialLoad", "load_checkpoint", "load_matching", "save_checkpoint", "start_save", "state_bytes"]


def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Write a checkpoint folder at ``path``. Every rank must call this.

    The folder appears under its name when it is complete, and replaces an older one. If any rank fails, all ranks raise
    and the older checkpoint is unchanged.

    Args:
        model: the (sharded) model. optimizer: an optimizer over its parameters, or None.
        path: a path on a file system that all ranks share.
        extra: other values to get back on load, such as a learning-rate scheduler's state and the position in the data:
            nested dicts, lists, numbers, strings, tensors. Rank 0's value is saved.
        asynchronous: return after copying this rank's part to host memory, which takes as many bytes as it writes, and
            write in the background. The next save, load or export waits for it first.
        process_group: the ranks that call, among them all that have a part of the model; None: all ranks of the job.
    Returns:
        A handle to wait for; already done unless ``asynchronous``.
    Raises:
        CheckpointError: writing failed; or an earlier asynchronous save failed, and its handle was never waited for.

    Example:
        handle = save_checkpoint(model, optimizer, "runs/step_0000100", extra={"step": 100}, asynchronous=True)
        model(batch).square().mean().backward()  # training goes on
        handle.wait()
    """
    return start_save(model, optimizer, Path(path), extra=extra, asynchronous=asynchronous, process_group=process_group)


def start_save(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: Path,
    *,
    extra: Mapping[str, Any] | None,
    asynchronous: bool,
    process_group: dist.ProcessGroup | None,
    afterwards: Callable[[], None] | None = None,
) -> SaveHandle:
    """Save as ``save_checkpoint`` does; the first rank calls ``afterwards`` when the folder has its name."""
    ranks = checkpoint_ranks("calls save_checkpoint", process_group)
    path = place_of(path)
    view = ranks.check(f"planning to save {path}", lambda: view_model(model))
    owners = find_rank_values(view.tensors, ranks)
    draft = plan_save(path, lambda: _collect(view, owners, optimizer, extra, ranks), ranks)
    if asynchronous:
        try:
            ranks.check(f"copying what to save in {path} to host memory", draft.planner.hold)
        except CheckpointError:
            draft.discard()
            raise
    return run_save(path, lambda: write_draft(draft, ranks, afterwards), in_background=asynchronous)


def load_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | None,
    path: str | Path,
    *,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load a checkpoint folder into the model and optimizer. Every rank must call this.

    The checkpoint may come from another layout: another number of ranks, strategy, granularity, mesh, dtypes or ties.
    Random state is restored if the number of ranks is the same, or if all saving ranks had the same state.

    Args:
        model: sharded, sharded by PyTorch's FSDP2, or plain. optimizer: an optimizer over its parameters, or None to
            load no optimizer state.
        path: a checkpoint, or a folder that ``torch.distributed.checkpoint.save`` wrote from
            ``{"model": ..., "optimizer": ...}``.
        verify: check all bytes against their checksums first; False: check file sizes only.
        process_group: as in ``save_checkpoint``.
    Returns:
        The saved ``extra``, with its tensors on the CPU.
    Raises:
        CheckpointError: there is no checkpoint, or it is of another model: all differing names and shapes are listed.
            ``DamagedCheckpointError`` names the damaged file and the parameters in it. The model is then unchanged.

    Example:
        save_checkpoint(model, optimizer, "runs/step_0000100", extra={"step": 100})
        extra = load_checkpoint(model, optimizer, "runs/step_0000100")  # on any number of ranks
        first_step = extra["step"] + 1
    """
    ranks = checkpoint_ranks("calls load_checkpoint", process_group)
    opened = open_checkpoint(Path(path), ranks, verify=verify)
    step = f"loading {path}"

    def plan() -> tuple[ModelMatch, OptimizerMatch | None]:
        found = match_model(opened, view_model(model))
        return found, None if optimizer is None else match_optimizer(opened, optimizer, found.view)

    found, states = ranks.check(step, plan)
    random = ranks.check(step, lambda: _random_state_for(opened, ranks))
    ranks.check(step, lambda: _read(opened, [found.targets, *(states.rounds if states else ())]))
    refuse_replaced(opened, ranks)
    if optimizer is not None and states is not None:
        states.apply(optimizer)
    restore_extra_state(model, found.extra_state)
    announce_change(model, found.view)
    restore_random_state(random)
    return dict(opened.state.get("extra", {}))


@dataclass(frozen=True, slots=True)
class PartialLoad:
    """The result of ``load_matching``.

    Attributes:
        loaded: names of the tensors that were loaded.
        left: one line per difference: names missing in the checkpoint, names missing in the model, differing shapes.
        extra: the saved ``extra``.
    """

    loaded: tuple[str, ...]
    left: tuple[str, ...]
    extra: dict[str, Any]


def load_matching(
    model: nn.Module, path: str | Path, *, verify: bool = True, process_group: dist.ProcessGroup | None = None
) -> PartialLoad:
    """Load weights and buffers whose names and shapes agree; leave the others unchanged. Every rank must call this.

    Optimizer and random state are not loaded, because they would not fit the resulting model.

    Args:
        model: sharded or plain. path: a checkpoint folder. verify, process_group: as in ``load_checkpoint``.
    Raises:
        CheckpointError: there is no checkpoint, no tensor agrees, the checkpoint is damaged, or it has different values
            for names that are one parameter here. The model is then unchanged.
    """
    ranks = checkpoint_ranks("calls load_matching", process_group)
    opened = open_checkpoint(Path(path), ranks, verify=verify)

    def plan() -> ModelMatch:
        found = match_partly(opened, view_model(model))
        if not found.names:
            raise CheckpointError(
                f"{path} has no tensor of this model's names and shapes; nothing was loaded. fix: load a checkpoint of "
                f"this model; `python -m megatron_fsdp checkpoint inspect {path}` lists what this one has"
            )
        check_ties(opened, found)
        return found

    found = ranks.check(f"loading {path}", plan)
    ranks.check(f"loading {path}", lambda: read_entries(opened, found.targets))
    refuse_replaced(opened, ranks)
    announce_change(model, found.view)
    return PartialLoad(found.names, tuple(found.differences), dict(opened.state.get("extra", {})))


def _collect(
    view: ModelView,
    owners: Mapping[str, int],
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    ranks: CheckpointRanks,
) -> tuple[dict[str, Any], bytes]:
    """Return this rank's nested entries to save, and the bytes of the state file."""
    entries: dict[str, Any] = {"model": view.tensors, "random_state": {f"rank_{ranks.rank}": random_state()}}
    state: dict[str, Any] = {
        "extra": dict(extra or {}),
        "extra_state": view.extra_state,
        "num_ranks": ranks.size,
        "ties": [list(names) for names in view.ties],
        "torch": str(torch.__version__),
    }
    if optimizer is not None:
        entries["optimizer"] = describe_optimizer(optimizer, view)
        state["optimizer"] = type(optimizer).__name__
    part_rank_values(entries, owners, ranks.rank)
    return entries, state_bytes(state)


def state_bytes(state: Mapping[str, Any]) -> bytes:
    """Return the content of a state file.

    Raises:
        CheckpointError: ``state`` contains a value that could not be loaded without running code.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    try:
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            "extra (or a module's extra state) holds something that cannot be loaded without running code. fix: use "
            f"only dicts, lists, numbers, strings and tensors: {reason}"
        ) from None
    return buffer.getvalue()


def _read(opened: OpenCheckpoint, rounds: Iterable[dict[str, Any]]) -> None:
    """Read all entries; from here on the model changes."""
    try:
        for targets in rounds:
            read_entries(opened, targets)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{error}. Checksums were not compared (verify=False), so part of the model was loaded before this was "
            "found. fix: load another checkpoint"
        ) from None


def _random_state_for(opened: OpenCheckpoint, ranks: CheckpointRanks) -> dict[str, torch.Tensor]:
    """Return the random state for this rank; empty if no saved state fits."""
    num_savers = opened.state.get("num_ranks", 0)
    # With another number of ranks: if all saving ranks had one seed, they had the same CPU state, and it is used.
    savers, without = ([ranks.rank], "") if num_savers == ranks.size else (range(num_savers), "cuda")
    states = []
    for saver in savers:
        entries = opened.names_below("random_state", f"rank_{saver}").items()
        wanted = {str(path[0]): entry for path, entry in entries if path[0] != without}
        states.append(dict(zip(wanted, read_values(opened, wanted.values()), strict=True)))
    is_common = all(
        {*state} == {*states[0]} and all(torch.equal(state[name], states[0][name]) for name in state)
        for state in states
    )
    found = states[0] if states and is_common else {}
    restore_random_state(found, is_trial=True)
    return found
