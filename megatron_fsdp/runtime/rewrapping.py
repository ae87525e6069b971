"""What a sharded module answers to an engine that would wrap it once more."""

from __future__ import annotations

from typing import NoReturn

from megatron_fsdp.errors import ConfigError

__all__ = ["refuse_ddp"]


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
