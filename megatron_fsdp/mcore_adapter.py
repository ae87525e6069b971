"""megatron-core over this engine, by the path that users know; see ``megatron_fsdp.integrations.megatron.adapter``."""

from typing import Any

from megatron_fsdp.integrations.megatron import adapter
from megatron_fsdp.integrations.megatron.adapter import get_megatron_optimizer, install, uninstall

__all__ = ["ShardedDataParallel", "get_megatron_optimizer", "install", "uninstall"]  # noqa: F822  (made when asked for)


def __getattr__(name: str) -> Any:
    """Make ``ShardedDataParallel`` when it is first asked for: its base class is megatron.core's."""
    return getattr(adapter, name)
