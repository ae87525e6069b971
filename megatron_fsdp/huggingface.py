"""What Hugging Face's users call: models for a loop of one's own, and accelerate or Trainer over this engine."""

from megatron_fsdp.integrations.huggingface.prepare import accelerate_fsdp2, prepare_model

__all__ = ["accelerate_fsdp2", "prepare_model"]
