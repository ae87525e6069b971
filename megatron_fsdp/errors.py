"""Errors of the runtime. The caller can fix each of them, so each is a ``ValueError`` whose message says how."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn

from megatron_fsdp.installation import check_initialiser

__all__ = [
    "AgreementError",
    "CheckpointError",
    "ConfigError",
    "FsdpError",
    "GradientScaleError",
    "NonfiniteGradientError",
    "OwnershipError",
    "StateError",
    "TransferError",
    "nearest",
]

# Called here because nearly every file imports this one, even if __init__.py belongs to another project.
check_initialiser()

# Names of the strategies in DeepSpeed, PyTorch's FSDP and papers.
_ALSO_CALLED = {
    "no_shard": "zero0 stage0 ddp",
    "optim": "zero1 stage1",
    "optim_grads": "zero2 stage2 shardgradop",
    "optim_grads_params": "zero3 stage3 fsdp fsdp2 fullshard",
    "hsdp": "hybridshard",
}


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the valid name that a wrong one probably means: a known synonym, or else the most similar spelling.

    ``nearest("zero3", ("no_shard", "optim", "optim_grads_params"))`` is ``"optim_grads_params"``.
    """
    known = list(valid)
    plain = name.lower().translate({ord(mark): None for mark in "-_ "})
    same = [meant for meant, others in _ALSO_CALLED.items() if plain in others.split() and meant in known]
    return same[0] if same else difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


class FsdpError(ValueError):
    """Base class of this package's errors.

    Example:
        try:
            fully_shard(nn.Linear(4, 4).weight)
        except FsdpError as error:
            print(error)
    """


class ConfigError(FsdpError):
    """A setting, flag or module that cannot be sharded as asked.

    Example:
        try:
            config = FsdpConfig(data_parallel_sharding_strategy="zero3")
        except ConfigError as error:
            print(error)  # names the setting, the valid values and the nearest one
    """


class OwnershipError(ConfigError):
    """A parameter that belongs to two units, or cannot belong to a unit.

    Example:
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
        fully_shard(model.blocks[0])
        fully_shard(model.blocks[1])  # OwnershipError: names the parameter and both units
    """


class StateError(FsdpError):
    """A call that is not allowed in the current state of a module.

    Example:
        try:
            explain(nn.Linear(4, 4))
        except StateError as error:
            print(error)
    """


DIFFERENT_PASSES = (
    "Another rank ended, took another branch, had another number of batches, or ran a backward that reaches no "
    "parameter of this model. `with Watch(model):` around training says which rank did what. fix: "
    "root.set_forward_order() if a rank skips units, megatron_fsdp.unsharded(model) around loops of different lengths "
    "without a backward, megatron_fsdp.join(model, batches) for different numbers of batches, or "
    "`loss + 0 * output.sum()` on a rank whose loss does not use the model"
)
"""What to look for when a collective of the engine waits for a rank that runs another number of passes."""


class AgreementError(FsdpError):
    """Ranks made different calls, or one rank made no call while others waited for it.

    Example:
        with Watch(model):
            model(batch).sum().backward()  # on a rank whose neighbours took another branch: AgreementError
            optimizer.step()
    """

    @classmethod
    def raise_for(cls, unit: str, action: str, error: RuntimeError) -> NoReturn:
        """Re-raise an error of a collective; if another rank caused it, name the unit and the other ranks' state."""
        # Imported here because the command line uses this file without torch.
        import torch.distributed as dist

        from dbuffer.mesh import job_timeout
        from dbuffer.whereabouts import is_from_backend, others_stand, reason_of

        if not is_from_backend(error):
            raise error
        raise cls(
            f"unit {unit!r}: {action} failed on rank {dist.get_rank()}: {reason_of(error, job_timeout())}. "
            f"Of the others, {others_stand(range(dist.get_world_size())) or 'nothing is known'}. {DIFFERENT_PASSES}"
        ) from error


class NonfiniteGradientError(FsdpError, ArithmeticError):
    """Gradients that contain NaN or infinity.

    Example:
        norm = clip_grad_norm_(model, 1.0)
        try:
            check_gradients(model, norm, "raise")
        except NonfiniteGradientError as error:
            print(error)  # names the first parameter
    """


class GradientScaleError(FsdpError, ArithmeticError):
    """Gradients, or their norm, that differ from the mean of the ranks' own gradients, by a factor or otherwise.

    Attributes:
        report: the ``GradientScale`` with all measured values.

    Example:
        try:
            check_gradient_scale(model, lambda model, batch: model(batch).square().mean(), batch, expected=3.0)
        except GradientScaleError as error:
            print(error.report)
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class CheckpointError(FsdpError):
    """A checkpoint that is missing, is damaged or belongs to another model.

    Example:
        try:
            load_checkpoint(model, optimizer, "runs/step_0000100")
        except CheckpointError as error:
            print(f"starting anew: {error}")
    """


class TransferError(FsdpError):
    """Weights that arrived damaged, or a request to send or receive weights that cannot be met.

    Example:
        try:
            weight_stream(model, changed_since=-1)  # a version that this rank does not remember
        except TransferError as error:
            print(error)  # "... this rank remembers nothing ... fix: version = remember_weights(model) ..."
    """
