"""What Hugging Face's users call: accelerate and Trainer over this engine."""

from megatron_fsdp.integrations.accelerate import accelerate_fsdp2

__all__ = ["accelerate_fsdp2"]
