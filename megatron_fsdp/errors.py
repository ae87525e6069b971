"""Errors of the runtime. All are the caller's to mend, so all are ``ValueError``s that say how."""

from __future__ import annotations

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
]

# Here because nearly every file of the package imports this one, also where its __init__.py is another project's.
check_initialiser()


class FsdpError(ValueError):
    """Base of everything this package raises on purpose."""


class ConfigError(FsdpError):
    """A setting, flag or module that cannot be sharded as asked."""


class OwnershipError(ConfigError):
    """A parameter that two units claim, or that no unit can own."""


class StateError(FsdpError):
    """A call that does not fit the state that the module is in."""


class AgreementError(FsdpError):
    """Ranks that did different things, or one that did nothing while the others waited for it."""

    @classmethod
    def raise_for(cls, unit: str, action: str, error: RuntimeError) -> NoReturn:
        """Raise what waiting for a collective raised, with the name of the unit where another rank is the cause."""
        if "gloo" not in str(error) and not type(error).__name__.startswith("Dist"):
            raise error
        raise cls(
            f"unit {unit!r}: {action} failed: {str(error).strip().rstrip('.')}. Another rank ended, took another "
            "branch, or ran a backward that reaches no parameter of this model. `with Watch(model):` around training "
            "says which rank did what; `loss + 0 * output.sum()` lets a rank without a loss of its own take part."
        ) from error


class NonfiniteGradientError(FsdpError, ArithmeticError):
    """Gradients with NaN or infinity in them."""


class GradientScaleError(FsdpError, ArithmeticError):
    """Gradients, or their norm, that are not what the ranks computed, by a factor or otherwise.

    Attributes:
        report: all that was measured, a ``GradientScale``.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class CheckpointError(FsdpError):
    """A checkpoint that is missing, damaged or of another model."""
