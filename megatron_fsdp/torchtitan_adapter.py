"""torchtitan's ``parallelize_fn``, by the path that users know; see ``megatron_fsdp.integrations.torchtitan``."""

from megatron_fsdp.integrations.torchtitan import parallelize_decoder

__all__ = ["parallelize_decoder"]
