"""Save, find and load the checkpoints of a run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.arguments import check_load
from gpt.job import DEFAULT_FOLDER, Job
from gpt.model import GptConfig
from gpt.parallel import unwrapped
from megatron_fsdp import CheckpointSeries, ConfigError
from megatron_fsdp.checkpoint.api import load_matching
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.checkpoint.reader import open_checkpoint


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Optimizer steps done, samples seen by them, and the sum of the losses since the last log line."""

    iteration: int = 0
    consumed_samples: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0

    def after_step(self, global_batch_size: int) -> TrainingState:
        """Return the state one optimizer step later."""
        return TrainingState(self.iteration + 1, self.consumed_samples + global_batch_size)


def checkpoints_in(root: Path) -> CheckpointSeries:
    """Return the checkpoints of a run's folder, named as Megatron names them: ``iter_0000200`` and a tracker file."""
    return CheckpointSeries(root, prefix="iter_", pointer="latest_checkpointed_iteration.txt", is_pointer_bare=True)


def what_to_save(job: Job, state: TrainingState) -> dict[str, Any]:
    """Return the other entries of a checkpoint, besides weights and optimizer: plain numbers and strings only."""
    model = dataclasses.asdict(job.config)
    return {"training": dataclasses.asdict(state), "model": model, "data": data_flags(job)}


def data_flags(job: Job) -> dict[str, Any]:
    """Return what decides which text a sample number stands for, and how to read it, by flag name."""
    args = job.args
    flags = {"seed": args.seed, "seq_length": args.seq_length, "data_path": job.data.source, **job.data.flags}
    if args.tokenizer_model is not None:
        flags["tokenizer_model"] = str(args.tokenizer_model)
    return flags


def resume(job: Job) -> TrainingState:
    """Load the run's newest complete checkpoint and return its progress; without one, return a new run's progress.

    Reads from ``--load``; after a restart by torchrun from ``--save``, if that has later steps.

    Raises:
        ConfigError: only ``--load`` is given and has no checkpoint, or the checkpoint's model was built with other
            flags.
    """
    args = job.args
    if _was_saved_before_restart(args):
        state = _resume_from(job, args.save, weights_only=args.no_load_optim and args.no_save_optim)
        _check_progress(job, state, args.save)
        return state
    if args.load is None:
        return TrainingState()
    state = _resume_from(job, args.load, weights_only=args.finetune or args.no_load_optim)
    if args.finetune:
        job.log.message("--finetune: weights alone were taken; training starts at iteration 0")
        return TrainingState()
    _check_progress(job, state, args.load)
    return state


def _was_saved_before_restart(args: argparse.Namespace) -> bool:
    """Return whether torchrun has restarted the ranks, and ``--save`` has more of the run than ``--load``."""
    if args.save is None or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    if args.load is None:
        return True
    saved, loaded = checkpoints_in(args.save).latest(), checkpoints_in(args.load).latest()
    # A finetuning counts its iterations from 0.
    return saved is not None and (args.finetune or loaded is None or saved > loaded)


def _check_progress(job: Job, state: TrainingState, root: Path) -> None:
    """Raise ConfigError if ``--train-samples`` would count wrongly; log it if there is nothing left to train."""
    args, batch = job.args, job.args.global_batch_size
    if args.train_samples is not None and state.consumed_samples != state.iteration * batch:
        raise ConfigError(
            f"--train-samples {args.train_samples} with --global-batch-size {batch}: the {state.iteration} iterations "
            f"in {root} took {state.consumed_samples} samples, so iterations of this size would end the run and the "
            "decay of the learning rate at wrong numbers of samples. fix: --global-batch-size "
            f"{state.consumed_samples // max(state.iteration, 1)}, or give the length as --train-iters"
        )
    if state.iteration >= args.train_iters:
        job.log.message(
            f"nothing is left to train: {state.iteration} iterations are done, and the run has {args.train_iters}"
        )


def _resume_from(job: Job, root: Path, *, weights_only: bool) -> TrainingState:
    checkpoints = checkpoints_in(root)
    if not job.args.strict_fsdp_dtensor_load and (partial := resume_partly(job, checkpoints)) is not None:
        return partial
    loaded = checkpoints.load(unwrapped(job.model), None if weights_only else job.optimizer)
    if loaded is None:
        if (step := checkpoints.latest()) is not None:  # starting anew would hide the loss
            raise ConfigError(
                f"{root / checkpoints.pointer} names iteration {step}, but there is no whole checkpoint in {root}. "
                f"fix: restore {checkpoints.path(step).name}, or delete the file to start from new weights"
            )
        check_load(job.args, root, "there is no checkpoint in it")
        job.log.message(f"no checkpoint in {root}: starting from new weights")
        return TrainingState()
    if lacking := [name for name in ("training", "model", "data") if name not in loaded.extra]:
        raise ConfigError(
            f"{loaded.path} was not saved by pretrain_gpt.py: its extra has no {', '.join(lacking)}. fix: give --load "
            "the --save folder of a run of this script"
        )
    for message in loaded.damaged:
        job.log.message(f"passed over a checkpoint: {message}")
    if differing := model_differences(loaded.extra, job.config):
        # Weights of equal shape do not show all differences, such as another number of attention heads.
        raise ConfigError(
            f"{loaded.path} holds another model: {'; '.join(differing)}. fix: use its flags or another --load; "
            "--no-strict-fsdp-dtensor-load loads the weights that both have"
        )
    state = TrainingState(**loaded.extra["training"])
    done = f"{state.iteration} iterations, {state.consumed_samples} samples consumed"
    job.log.message(f"resuming from {loaded.path}: {done}")
    is_new_run = job.args.finetune and root == job.args.load
    for difference in () if is_new_run else differences(loaded.extra["data"], data_flags(job)):
        job.log.message(f"the loss curve will not continue exactly: {difference}")
    return state


def resume_partly(job: Job, checkpoints: CheckpointSeries) -> TrainingState | None:
    """Load the weights that the newest checkpoint shares with this model.

    Returns None if the checkpoint is of exactly this model, or if there is no checkpoint.
    """
    ranks = checkpoint_ranks("loads a checkpoint")
    steps = ranks.agree(
        f"looking for checkpoints in {checkpoints.root}", lambda: None, lambda _: checkpoints.resumable_steps()
    )
    if not steps:
        return None
    path = checkpoints.path(steps[-1])
    extra = open_checkpoint(path, ranks, verify=False).state.get("extra", {})
    if "model" not in extra or not model_differences(extra, job.config):
        return None
    found = load_matching(unwrapped(job.model), path)
    listed = "".join(f"\n  {line}" for line in found.left)
    job.log.message(
        f"{path} is of another model: {len(found.loaded)} tensors loaded, {len(found.left)} left as they are; the "
        f"optimizer starts anew (--no-strict-fsdp-dtensor-load){listed}"
    )
    return TrainingState(**found.extra["training"])


def model_differences(extra: dict[str, Any], config: GptConfig) -> list[str]:
    """Return a text with the flags whose values differ between a checkpoint's model and ``config``."""
    shape = dataclasses.asdict(config)
    for name in ("init_method_std", "moe_aux_loss_coeff", "hidden_dropout", "attention_dropout"):
        del shape[name]  # they change training, not the model
    # A flag that did not exist when the checkpoint was saved had its default value.
    defaults = {field.name: field.default for field in dataclasses.fields(GptConfig)}
    return differences(defaults | extra["model"], shape)


def differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return, in words, the flags of ``wanted`` that had another value when the checkpoint was saved."""
    others = [(name, value, saved.get(name)) for name, value in wanted.items() if saved.get(name) != value]
    return [f"--{name.replace('_', '-')} is {value}, the checkpoint has {other}" for name, value, other in others]


def next_steps(args: argparse.Namespace, arguments: Sequence[str], num_ranks: int) -> str:
    """Return where the log is and, where a checkpoint was saved, how to go on from this command line."""
    folder: Path = args.save or DEFAULT_FOLDER
    curve = f"loss curve  {folder / 'loss.png'}\n" if (folder / "loss.png").exists() else ""
    files = f"{curve}log         {folder / 'log.jsonl'}"
    step = None if args.save is None else checkpoints_in(folder).latest()
    if step is None:
        return files
    checkpoint = checkpoints_in(folder).path(step)
    below = os.path.relpath(sys.executable)
    python = shlex.quote(sys.executable if below.startswith("..") else below)
    starter = f"{python} -m torch.distributed.run --standalone --nproc-per-node {num_ranks}"
    length = "--train-iters" if args.train_samples is None else "--train-samples"
    total = args.train_iters if args.train_samples is None else args.train_samples
    done = step if args.train_samples is None else step * args.global_batch_size
    more = 2 * max(total, done) if step >= args.train_iters else total
    # A resumed run is no finetuning any more, and has the optimizer state that this one saved.
    taken = [
        word for word in arguments if word not in ("--finetune", *([] if args.no_save_optim else ["--no-load-optim"]))
    ]
    if args.no_save_optim and "--no-load-optim" not in taken:
        taken.append("--no-load-optim")
    # argparse takes the last of two equal flags, so drop the flags that an earlier restart has added.
    words = taken[:-4] if taken[-4:-1:2] == ["--load", length] else taken
    words = [sys.argv[0], *words, "--load", str(folder), length, str(more)]
    generator = shlex.quote(str(Path(sys.argv[0]).with_name("generate_gpt.py")))
    loading, target = shlex.quote(str(folder)), shlex.quote(str(folder / "safetensors"))
    return f"""{files}
checkpoint  {checkpoint}
to go on:
  generate  {python} {generator} --load {loading} --prompt 'def main('
  resume    {starter if num_ranks > 1 else python} {shlex.join(words)}
  export    {python} -m megatron_fsdp checkpoint export {shlex.quote(str(checkpoint))} {target}"""
