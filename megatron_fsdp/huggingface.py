"""Hugging Face's front door, by the path that users know; see ``megatron_fsdp.integrations.huggingface``."""

from megatron_fsdp.integrations.huggingface.prepare import accelerate_fsdp2, prepare_model

__all__ = ["accelerate_fsdp2", "prepare_model"]
