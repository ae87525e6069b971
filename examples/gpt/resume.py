"""Going on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt.checkpoint import (
    TrainingState,
    check_load,
    check_tracker,
    checkpoints_in,
    differences,
    newest_of_another_model,
    resume_folder,
)
from gpt.indexed import DEFAULT_SPLIT, IndexedSamples
from gpt.job import Job
from gpt.parallel import unwrapped
from gpt.tokenizer import tokenizer_flags
from megatron_fsdp.checkpoint.api import load_matching


def resume(job: Job) -> TrainingState:
    """Load the newest whole checkpoint of the run and return where it stands, or a new run's state if there is none.

    Raises:
        ConfigError: there is none where ``--load`` alone says to go on.
    """
    root = resume_folder(job.args)
    if root is None:
        return TrainingState()
    if not job.args.strict_fsdp_dtensor_load and (partial := resume_partly(job, root)) is not None:
        return partial
    loaded = checkpoints_in(root).load(unwrapped(job.model), job.optimizer)
    if loaded is None:
        check_tracker(checkpoints_in(root))
        check_load(job.args, root, "there is no checkpoint in it")
        job.log.message(f"no checkpoint in {root}: starting from new weights")
        return TrainingState()
    for message in loaded.damaged:
        job.log.message(f"passed over a checkpoint: {message}")
    state = TrainingState.from_extra(loaded.extra, job.config, loaded.path)
    job.log.message(
        f"resuming from {loaded.path}: {state.iteration} iterations, {state.consumed_samples} samples consumed"
    )
    for difference in differences(loaded.extra["data"], data_flags(job)):
        job.log.message(f"the loss curve will not continue exactly: {difference}")
    return state


def resume_partly(job: Job, root: Path) -> TrainingState | None:
    """Load what the newest checkpoint has of this model, None where it is of this very model or there is none."""
    path = newest_of_another_model(checkpoints_in(root), job.config)
    if path is None:
        return None
    found = load_matching(unwrapped(job.model), path)
    listed = "".join(f"\n  {line}" for line in found.left)
    job.log.message(
        f"{path} is of another model: {len(found.loaded)} tensors loaded, {len(found.left)} left as they are; the "
        f"optimizer starts anew (--no-strict-fsdp-dtensor-load){listed}"
    )
    return TrainingState.of_another_model(found.extra)


def data_flags(job: Job) -> dict[str, Any]:
    """Return what decides which text a sample number stands for, and how to read it; defaults are left out."""
    args = job.args
    flags = {"seed": args.seed, "seq_length": args.seq_length, "data_path": job.data.source}
    if args.split not in (None, DEFAULT_SPLIT):
        flags["split"] = args.split
    if isinstance(job.data.train, IndexedSamples):
        # Megatron shuffles what a run of this length takes, so another length is another order.
        flags["train_samples"] = args.train_iters * args.global_batch_size
    return flags | tokenizer_flags(args)
