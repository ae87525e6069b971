"""Use this engine with Hugging Face's accelerate and Trainer."""

from megatron_fsdp.integrations.accelerate import accelerate_fsdp2

__all__ = ["accelerate_fsdp2"]
