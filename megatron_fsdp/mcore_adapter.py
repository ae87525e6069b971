"""megatron-core over this engine, by the path that users know; see ``megatron_fsdp.integrations.megatron.adapter``."""

from typing import Any

from megatron_fsdp.integrations.megatron import adapter
from megatron_fsdp.integrations.megatron.adapter import get_megatron_optimizer, install, uninstall
from megatron_fsdp.integrations.megatron.torch_dist import load_torch_dist, save_torch_dist

__all__ = [  # noqa: F822  (the first is made when asked for)
    "ShardedDataParallel",
    "get_megatron_optimizer",
    "install",
    "load_torch_dist",
    "save_torch_dist",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Make ``ShardedDataParallel`` when it is first asked for: its base class is megatron.core's."""
    return getattr(adapter, name)
