"""accelerate_fsdp2: make accelerate shard models with this engine inside a block."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_fsdp.api import fully_shard
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.lifecycle.module import FSDPModule, register_fsdp_forward_method
from megatron_fsdp.policy.launch import job_place

__all__ = ["accelerate_fsdp2"]


@contextmanager
def accelerate_fsdp2(*, forward_order: bool = False) -> Iterator[None]:
    """Make ``Accelerator.prepare`` shard with this engine instead of FSDP2, inside the block.

    ``transformers.Trainer`` calls ``prepare`` in ``train``, so a script with ``TrainingArguments(fsdp=True)`` needs
    only ``with accelerate_fsdp2(): trainer.train()``. Inside the block, ``fully_shard`` and ``FSDPModule`` of
    ``torch.distributed.fsdp`` are this package's. Models that were prepared work outside of the block too, with
    ``backward``, ``clip_grad_norm_``, ``accumulate``, ``save_state`` and ``get_state_dict``.

    Args:
        forward_order: call ``set_forward_order()`` on each model that ``prepare`` shards, so that a rank may skip units
            (such as an image tower on a rank without images).
    Raises:
        ConfigError: accelerate is not installed, or its version has no FSDP2 path. ``prepare`` raises it too if the
            ``Accelerator`` is not set up for FSDP2; in a job of one process it only warns.

    Example:
        with accelerate_fsdp2():
            trainer.train()
    """
    try:
        importlib.import_module("accelerate.utils.fsdp_utils").fsdp2_prepare_model  # noqa: B018  (looked up, not used)
    except (ImportError, AttributeError):
        raise ConfigError(
            "accelerate_fsdp2 needs accelerate with its FSDP2 path. fix: pip install 'accelerate>=1.15'"
        ) from None
    fsdp: Any = importlib.import_module("torch.distributed.fsdp")
    accelerator: Any = importlib.import_module("accelerate").Accelerator
    prepare = accelerator.prepare

    @functools.wraps(prepare)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        _check_path(self)
        prepared = prepare(self, *args, **options)
        for each in prepared if isinstance(prepared, (list, tuple)) else (prepared,):
            if isinstance(each, nn.Module) and isinstance(each, FSDPModule) and hasattr(each, "generate"):
                # Ranks run as many forwards as each other where transformers asks: generating, and dropping layers.
                # torch.compile refuses modules that have only the first attribute.
                for module in each.modules():
                    module._is_fsdp_managed_module = True  # type: ignore[assignment]
                    module._fsdp_use_orig_params = True  # type: ignore[assignment]
                # ``generate`` uses the root's own parameters, so it gathers them.
                register_fsdp_forward_method(each, "generate")
            if forward_order and isinstance(each, FSDPModule):
                each.set_forward_order()
        return prepared

    lent = {"fully_shard": fully_shard, "FSDPModule": FSDPModule}
    own = {name: getattr(fsdp, name) for name in lent}
    vars(fsdp).update(lent)
    accelerator.prepare = checked
    try:
        yield
    finally:
        vars(fsdp).update(own)
        accelerator.prepare = prepare


def _check_path(accelerator: Any) -> None:
    """Refuse an accelerator that would wrap models in something else, or sees one of several processes."""
    if accelerator.is_fsdp2:
        return
    version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", None)
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    seen = started = accelerator.num_processes
    if dist.is_initialized():
        started = dist.get_world_size()
    elif seen == 1 and (place := job_place(os.environ)) is not None:
        started = place.size
    text = (
        "accelerate_fsdp2() needs a GPU and accelerate's FSDP2 settings: accelerate takes its FSDP2 path on GPUs only. "
        f"This Accelerator is not on its FSDP2 path (found distributed_type {kind}"
        + (f", fsdp_version {version}" if version is not None else "")
        + f"; it sees {seen} of {started} processes), so nothing is sharded by this engine. fix: on GPUs give "
        "TrainingArguments(fsdp=True), Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)) or a "
        "file of `accelerate launch` with distributed_type FSDP and fsdp_version 2; on CPUs, and "
        "without accelerate's settings, call fully_shard on the model's layers and on the model"
    )
    if started > 1:
        raise ConfigError(text)
    warnings.warn(text, stacklevel=4)
