"""Megatron-FSDP's functions, by the path that users know; see ``integrations.megatron.fully_shard_model``."""

from megatron_fsdp.integrations.megatron.fully_shard_model import fully_shard_model, fully_shard_model_and_optimizer

__all__ = ["fully_shard_model", "fully_shard_model_and_optimizer"]
