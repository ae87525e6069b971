"""``Timeline``, by the path that users know; see ``megatron_fsdp.observability.timeline``."""

from megatron_fsdp.observability.timeline import Timeline

__all__ = ["Timeline"]
