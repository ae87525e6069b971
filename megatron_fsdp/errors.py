"""Errors of the runtime. All are the caller's to mend, so all are ``ValueError``s that say how."""

__all__ = ["CheckpointError", "ConfigError", "FsdpError", "OwnershipError", "StateError"]


class FsdpError(ValueError):
    """Base of everything this package raises on purpose."""


class ConfigError(FsdpError):
    """A setting, flag or module that cannot be sharded as asked."""


class OwnershipError(ConfigError):
    """A parameter that two units claim, or that no unit can own."""


class StateError(FsdpError):
    """A call that does not fit the state that the module is in."""


class CheckpointError(FsdpError):
    """A checkpoint that is missing, damaged or of another model."""
