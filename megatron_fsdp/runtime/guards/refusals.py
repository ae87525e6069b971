"""What is refused by name, apart from what would have to be known to do it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from megatron_fsdp.errors import ConfigError, StateError

__all__ = ["refuse_ddp", "refuse_meta"]


def refuse_ddp(module: object) -> NoReturn:
    """Refuse ``torch.nn.parallel.DistributedDataParallel`` around a sharded module.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{type(module).__name__} is sharded and reduces its gradients itself, so DistributedDataParallel cannot be "
        "around it: train the module as it is. With accelerate, hand optimizer and data loader to Accelerator.prepare "
        "without the model, or give it the whole model inside of accelerate_fsdp2()"
    )


def refuse_meta(unit: str, parameters: Iterable[str]) -> NoReturn:
    """Refuse to gather weights that are not there.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"unit {unit!r}: parameters {', '.join(map(repr, parameters))} are on the meta device still. "
        "Call materialize(model), or model.to_empty(device=...) and initialise it, or load a checkpoint."
    )
