"""The timeout of a job's process groups, changed while the job runs."""

from datetime import timedelta

import torch.distributed as dist

__all__ = ["give_up_after"]


def give_up_after(seconds: float) -> None:
    """Change the timeout of the job's group, and of groups made later."""
    world = dist.group.WORLD
    assert world is not None
    for device in world._device_types:
        world._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))
