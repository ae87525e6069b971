"""Settings as other programs spell them: Megatron-LM's flags, Hugging Face's keys."""
