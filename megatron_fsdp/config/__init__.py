"""Settings as other programs spell them: Megatron-LM's flags, Hugging Face's keys."""

from megatron_fsdp.config.fsdp_config import FsdpConfig

__all__ = ["FsdpConfig"]
