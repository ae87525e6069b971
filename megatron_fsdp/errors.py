"""Errors of the runtime. All are the caller's to mend, so all are ``ValueError``s that say how."""

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

# Here because nearly every file of the package imports this one, also where its __init__.py is another project's.
check_initialiser()

# What DeepSpeed, PyTorch's FSDP and the papers call the strategies.
_ALSO_CALLED = {
    "no_shard": "zero0 stage0 ddp",
    "optim": "zero1 stage1",
    "optim_grads": "zero2 stage2 shardgradop",
    "optim_grads_params": "zero3 stage3 fsdp fsdp2 fullshard",
    "hsdp": "hybridshard",
}


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the valid name that a wrong one means: the same by another name, or else the one spelled most alike.

    ``nearest("zero3", ("no_shard", "optim", "optim_grads_params"))`` is ``"optim_grads_params"``.
    """
    known = list(valid)
    plain = name.lower().translate({ord(mark): None for mark in "-_ "})
    same = [meant for meant, others in _ALSO_CALLED.items() if plain in others.split() and meant in known]
    return same[0] if same else difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


class FsdpError(ValueError):
    """Base of everything this package raises on purpose.

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
    """A parameter that two units claim, or that no unit can own.

    Example:
        model.blocks[1].linear.weight = model.blocks[0].linear.weight
        fully_shard(model.blocks[0])
        fully_shard(model.blocks[1])  # OwnershipError: names the parameter and both units
    """


class StateError(FsdpError):
    """A call that does not fit the state that the module is in.

    Example:
        try:
            explain(nn.Linear(4, 4))
        except StateError as error:
            print(error)
    """


DIFFERENT_PASSES = (
    "Another rank ended, took another branch, had another number of batches, or ran a backward that reaches no "
    "parameter of this model. `with Watch(model):` around training says which rank did what. fix: "
    "root.set_forward_order() where a rank skips units, megatron_fsdp.unsharded(model) around loops of different "
    "lengths without a backward, megatron_fsdp.join(model, batches) for different numbers of batches, and "
    "`loss + 0 * output.sum()` on a rank without a loss of its own."
)
"""What to look for when a collective of the engine waits for a rank that runs another number of passes."""


class AgreementError(FsdpError):
    """Ranks that did different things, or one that did nothing while the others waited for it.

    Example:
        with Watch(model):
            model(batch).sum().backward()  # on a rank whose neighbours took another branch: AgreementError
            optimizer.step()
    """

    @classmethod
    def raise_for(cls, unit: str, action: str, error: RuntimeError) -> NoReturn:
        """Raise what waiting for a collective raised, with the name of the unit where another rank is the cause."""
        # Here, as the command line has errors without torch.
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
    """Gradients with NaN or infinity in them.

    Example:
        norm = clip_grad_norm_(model, 1.0)
        try:
            check_gradients(model, norm, "raise")
        except NonfiniteGradientError as error:
            print(error)  # names the first parameter
    """


class GradientScaleError(FsdpError, ArithmeticError):
    """Gradients, or their norm, that are not what the ranks computed, by a factor or otherwise.

    Attributes:
        report: all that was measured, a ``GradientScale``.

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
    """A checkpoint that is missing, damaged or of another model.

    Example:
        try:
            load_checkpoint(model, optimizer, "runs/step_0000100")
        except CheckpointError as error:
            print(f"starting anew: {error}")
    """


class TransferError(FsdpError):
    """Weights that did not arrive as they were sent, or that cannot be sent or received as asked.

    Example:
        try:
            weight_stream(model, changed_since=-1)  # a version that this rank does not remember
        except TransferError as error:
            print(error)  # "... this rank remembers nothing ... fix: version = remember_weights(model) ..."
    """
